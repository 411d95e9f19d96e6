//! Which addresses the boxes of one daemon have.
//!
//! Several daemons may run on one host. Each claims its block by an `unreachable` route, whose metric is the daemon's
//! instance number: others see the claim, addresses of boxes that do not run lead nowhere, and the claim is gone with
//! the host's boot. The choice is kept in the data directory, since boxes that outlive a daemon keep their addresses.

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use futures_util::TryStreamExt;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType};
use rtnetlink::{Handle, RouteMessageBuilder};

use crate::{EngineError, Result};

/// A block of IPv4 addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub base: Ipv4Addr,
    pub prefix: u8,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "a range of addresses is written like 10.213.0.0/16, with a prefix of 8 to 29 bits and no bits set after it"
)]
pub struct InvalidRange;

impl std::str::FromStr for Range {
    type Err = InvalidRange;

    fn from_str(text: &str) -> Result<Self, InvalidRange> {
        let (base, prefix) = text.split_once('/').ok_or(InvalidRange)?;
        let base: Ipv4Addr = base.parse().map_err(|_| InvalidRange)?;
        let prefix: u8 = prefix.parse().map_err(|_| InvalidRange)?;
        let range = Self { base, prefix };
        let fits = (8..=29).contains(&prefix) && base.to_bits() & (range.size() - 1) == 0;
        if fits { Ok(range) } else { Err(InvalidRange) }
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

impl Range {
    fn size(&self) -> u32 {
        1 << (32 - u32::from(self.prefix))
    }

    /// How many boxes have room: the first and last address are left free.
    pub fn slots(&self) -> u32 {
        self.size() - 2
    }

    /// The address of the box in `slot`.
    pub fn address(&self, slot: u32) -> Option<Ipv4Addr> {
        (slot < self.slots()).then(|| Ipv4Addr::from_bits(self.base.to_bits() + 1 + slot))
    }
}

/// Blocks to choose from if none is configured: 10.128.0.0/16 to 10.255.0.0/16.
const CANDIDATES: u32 = 128;

impl Range {
    fn candidate(number: u32) -> Self {
        Self {
            base: Ipv4Addr::new(10, 128 + (number % CANDIDATES) as u8, 0, 0),
            prefix: 16,
        }
    }

    fn overlaps(&self, other: &Range) -> bool {
        let bits = self.prefix.min(other.prefix);
        let prefix = |base: Ipv4Addr| u64::from(base.to_bits()) >> (32 - u32::from(bits));
        prefix(self.base) == prefix(other.base)
    }
}

/// Chooses a block that no other route on this host overlaps, and claims it.
pub(super) async fn claim(
    host: &Handle,
    configured: Option<Range>,
    data: &Path,
    instance: &str,
) -> Result<Range> {
    let failed = |e| EngineError::io("cannot claim addresses for boxes")(io::Error::other(e));
    let metric = metric(instance);
    let kept = data.join("network");
    let saved = std::fs::read_to_string(&kept)
        .ok()
        .and_then(|text| text.trim().parse::<Range>().ok());
    let candidates: Vec<Range> = match configured {
        Some(range) => vec![range],
        None => saved
            .into_iter()
            .chain((0..CANDIDATES).map(|n| Range::candidate(metric.wrapping_add(n))))
            .collect(),
    };
    let taken = routes(host).await.map_err(failed)?;
    // Boxes that outlived an earlier daemon have addresses in the block that it claimed.
    let ours = taken.iter().find(|t| t.metric == Some(metric)).map(|t| t.range);
    let free = |range: &Range| ours == Some(*range) || taken.iter().all(|t| !t.range.overlaps(range));
    for range in candidates {
        if !free(&range) {
            continue;
        }
        if ours != Some(range) {
            host.route()
                .add(claim_route(&range, metric))
                .execute()
                .await
                .map_err(failed)?;
            // Of two daemons that claim the same block at the same time, the lower number keeps it.
            let rival = |t: &Taken| t.range.overlaps(&range) && t.metric.is_some_and(|m| m < metric);
            if routes(host).await.map_err(failed)?.iter().any(rival) {
                release(host, &range, instance).await;
                continue;
            }
        }
        // On a disk that is full, a file that is written again would be empty.
        if saved != Some(range) {
            std::fs::write(&kept, format!("{range}\n"))
                .map_err(EngineError::io("cannot keep the network range"))?;
        }
        return Ok(range);
    }
    let hint = match configured {
        Some(range) => format!(
            "{range} overlaps a route of this host; set network.range to another block, or to \"auto\""
        ),
        None => {
            "every block from 10.128.0.0/16 to 10.255.0.0/16 overlaps a route; set network.range".to_owned()
        }
    };
    Err(EngineError::io("no addresses for boxes")(io::Error::other(hint)))
}

pub(super) async fn release(host: &Handle, range: &Range, instance: &str) {
    let _ = host
        .route()
        .del(claim_route(range, metric(instance)))
        .execute()
        .await;
}

fn claim_route(range: &Range, metric: u32) -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(range.base, range.prefix)
        .kind(RouteType::Unreachable)
        .scope(RouteScope::Universe)
        .priority(metric)
        .build()
}

/// The instance as a number above all usual metrics, so that a real route to the same block would win.
fn metric(instance: &str) -> u32 {
    0x0100_0000 | u32::from_str_radix(instance, 16).unwrap_or_default()
}

#[derive(Debug)]
struct Taken {
    range: Range,
    /// Present for claims.
    metric: Option<u32>,
}

async fn routes(host: &Handle) -> Result<Vec<Taken>, rtnetlink::Error> {
    let all = host
        .route()
        .get(RouteMessageBuilder::<Ipv4Addr>::new().build())
        .execute();
    let all: Vec<RouteMessage> = all.try_collect().await?;
    Ok(all.iter().filter_map(taken).collect())
}

fn taken(route: &RouteMessage) -> Option<Taken> {
    let base = route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(RouteAddress::Inet(base)) => Some(*base),
        _ => None,
    })?;
    let metric = route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Priority(metric) => Some(*metric),
        _ => None,
    });
    let range = Range {
        base,
        prefix: route.header.destination_prefix_length,
    };
    Some(Taken {
        range,
        metric: metric.filter(|_| route.header.kind == RouteType::Unreachable),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_gives_every_slot_an_address_of_its_own() {
        let range: Range = "10.9.8.0/29".parse().unwrap();
        let addresses: Vec<_> = (0..7).map(|slot| range.address(slot)).collect();
        assert_eq!(range.slots(), 6);
        assert_eq!(addresses[0], Some(Ipv4Addr::new(10, 9, 8, 1)));
        assert_eq!(addresses[5], Some(Ipv4Addr::new(10, 9, 8, 6)));
        assert_eq!(addresses[6], None);
    }

    #[test]
    fn a_range_with_bits_after_its_prefix_is_refused() {
        assert!("10.9.8.1/24".parse::<Range>().is_err());
        assert!("10.9.8.0".parse::<Range>().is_err());
        assert!("10.0.0.0/30".parse::<Range>().is_err());
    }

    #[test]
    fn blocks_overlap_if_one_holds_the_other() {
        let range = |text: &str| text.parse::<Range>().unwrap();
        assert!(range("10.128.0.0/16").overlaps(&range("10.128.4.0/24")));
        assert!(range("10.128.4.0/24").overlaps(&range("10.0.0.0/8")));
        assert!(!range("10.128.0.0/16").overlaps(&range("10.129.0.0/16")));
    }
}
