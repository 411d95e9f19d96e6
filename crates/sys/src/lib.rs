//! The system calls that dorm needs and no library has in a safe, typed form.
//!
//! Mechanism only: what is called in which order, and why, is decided in `dorm-engine`. This crate and
//! the guest are the only places where `unsafe` is allowed.

pub mod breakpoint;
pub mod btrfs;
pub mod cache;
pub mod cgroup;
pub mod confine;
pub mod loopdev;
pub mod mode;
pub mod mount;
pub mod namespace;
pub mod process;
pub mod random;
pub mod readiness;
pub mod tap;
pub mod uuid;
