//! Engines and homes that exist only in memory.
