//! Keeps the records, decides over every agent's lifecycle, and answers HTTP.

pub mod api;
pub mod build_slots;
pub mod config;
pub mod e2b;
pub mod faults;
pub mod guest_client;
mod held;
pub mod isolation;
pub mod keys;
pub mod lifecycle;
mod listen;
pub mod metrics;
pub mod names;
pub mod proxy;
pub mod records;
mod secrets;
mod serve;
pub mod store;
pub mod templates;
pub mod tls;
pub mod tokens;
pub mod volumes;

pub use config::Config;
pub use serve::{Left, ServeError, serve};
