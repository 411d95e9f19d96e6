//! What the daemon and its clients say to the guest of a box, and the other way round.
//!
//! [`process`] and [`filesystem`] are generated from `proto/`; [`boot`] is the one message that comes
//! before them; [`vm`] and [`volume`] are what goes over the ports of a virtual machine. The feature `client` adds the generated clients.

pub mod boot;
pub mod streams;
pub mod vm;
pub mod volume;
pub mod window;

mod generated {
    #![allow(
        clippy::all,
        clippy::allow_attributes_without_reason,
        unreachable_pub,
        unused_qualifications,
        reason = "the code generator does not write for our lints"
    )]
    include!(concat!(env!("OUT_DIR"), "/dorm_proto.rs"));
}

pub use generated::{filesystem, process};
