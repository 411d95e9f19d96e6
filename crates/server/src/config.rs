//! What the binary tells the server, parsed and checked before anything is touched.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use dorm_engine::Limits;
use dorm_engine::network::Range;

use crate::isolation::Choice;
use crate::lifecycle::idle::pressure::Budget;
use crate::records::Slots;
use crate::tls::TlsConfig;

#[derive(Debug, Clone)]
pub struct Config {
    /// The data directory. Exists, and is locked by the caller.
    pub data: PathBuf,
    pub listen: SocketAddr,
    /// HTTPS in place of HTTP.
    pub tls: Option<TlsConfig>,
    /// Boxes are reached as `<port>-<id>.<domain>`, perhaps with a port; and always below `localhost`.
    pub domain: Option<String>,
    /// Limits of agents that name none.
    pub defaults: Limits,
    /// Of agents that name none.
    pub isolation: Choice,
    /// Agent slot n is given the 65,536 host uids from `first_uid + n * 65536` on.
    pub first_uid: u32,
    /// How many agents there may be.
    pub max_slots: u32,
    pub network_range: NetworkRange,
    /// What a box finds in /etc/resolv.conf.
    pub nameservers: Vec<String>,
    pub on_shutdown: OnShutdown,
    /// Between the request to end and the end by force, unless a request says otherwise.
    pub stop_grace: Duration,
    /// Where finished templates are kept by recipe hash, across data directories.
    pub template_cache: Option<PathBuf>,
    /// CA certificates of the host, put into templates that are built.
    pub host_ca: Option<PathBuf>,
    pub standby: Standby,
    /// Longest JSON body. Streams to guests and uploads have no limit.
    pub max_body: u64,
}

/// When agents that nobody uses go to sleep, unless they say otherwise. A time of 0 is never.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standby {
    /// From `running` to `standby`.
    pub after: Duration,
    /// In `standby`: until its memory is on disk too.
    pub durable_after: Duration,
    /// From `standby` to `hibernated`.
    pub hibernate_after: Duration,
    /// Part of a core below which a box does nothing.
    pub cpu: f64,
    /// What all boxes in standby may hold.
    pub memory: Budget,
}

impl Default for Standby {
    fn default() -> Self {
        Self {
            after: Duration::from_secs(15),
            durable_after: Duration::from_secs(60),
            hibernate_after: Duration::from_secs(600),
            cpu: 0.02,
            memory: Budget::Percent(50.0),
        }
    }
}

/// What becomes of running boxes when the daemon ends in order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnShutdown {
    /// They go on, and the next daemon adopts them.
    Leave,
    Stop,
    /// Their memory goes to disk; where that is not possible they are left.
    #[default]
    Hibernate,
}

/// Slots beyond those of agents, for boxes in which templates are built.
pub const BUILD_SLOTS: u32 = 8;

impl Config {
    pub fn slots(&self) -> Slots {
        Slots {
            max: self.max_slots,
            first_uid: self.first_uid,
        }
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        let last = u64::from(self.max_slots) + u64::from(BUILD_SLOTS);
        let last_uid = u64::from(self.first_uid) + last * u64::from(Slots::UIDS);
        if last_uid > u64::from(u32::MAX) {
            return Err(ConfigError::TooFewUids {
                slots: self.max_slots,
                first_uid: self.first_uid,
            });
        }
        if u64::from(self.network_range.range().slots()) < last {
            return Err(ConfigError::TooFewAddresses {
                slots: self.max_slots,
                range: self.network_range,
            });
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{slots} agents from host uid {first_uid} on, with 65,536 uids each, do not fit into 32 bits")]
    TooFewUids { slots: u32, first_uid: u32 },
    #[error("the network range {}/{} has too few addresses for {slots} agents", range.base, range.prefix)]
    TooFewAddresses { slots: u32, range: NetworkRange },
}

/// The addresses of boxes. The engine gives them out; here they are only shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkRange {
    pub base: Ipv4Addr,
    pub prefix: u8,
}

impl NetworkRange {
    fn range(&self) -> Range {
        Range {
            base: self.base,
            prefix: self.prefix,
        }
    }

    pub fn address_of(&self, slot: u32) -> Option<Ipv4Addr> {
        self.range().address(slot)
    }
}
