//! Keeps the records, decides over every agent's lifecycle, and answers HTTP.

pub mod api;
