//! The policies of single boxes, as chains of the daemon's table.
//!
//! A map leads from a box's address to its chain, which comes before everything that lets packets pass. A connection
//! that the policy lets through is marked with the policy's own number: as long as that holds, its packets pass
//! without being asked again, so that an address whose name has another by now stays reachable for who is connected.
//! A changed policy has another number, and so every connection is judged anew, at its next packet.
//!
//! What a policy allows returns to the rules for all boxes: nothing that is out of bounds can be allowed.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};

use super::policy::{Block, Name, Policy};
use super::{GATEWAY, firewall};
use crate::{EngineError, Result};

/// Addresses that the names of one box can have at a time.
const MAX_NAMED: u32 = 4096;

#[derive(Debug)]
pub(super) struct Gate {
    table: String,
    /// Held while the chains are changed.
    chains: Arc<Mutex<Chains>>,
}

#[derive(Debug, Default)]
struct Chains {
    /// Boxes that have one, by the name of their interface.
    of: HashMap<String, Ipv4Addr>,
    /// Nobody has heard how the last change ended: the kernel may have it or not.
    doubtful: bool,
}

/// An address that a name gave, and for how many seconds it holds.
pub(super) type Lease = (Ipv4Addr, u64);

impl Gate {
    /// The gate of a table that is loaded. Finds the chains that an earlier daemon left.
    pub(super) async fn open(instance: &str) -> Result<Self> {
        let table = firewall::table(instance);
        let found = read(&table).await?;
        Ok(Self {
            chains: Arc::new(Mutex::new(found)),
            table,
        })
    }

    /// The chains as the kernel has them, for whoever may change them.
    async fn chains(&self) -> Result<OwnedMutexGuard<Chains>> {
        let mut chains = self.chains.clone().lock_owned().await;
        if chains.doubtful {
            *chains = read(&self.table).await?;
        }
        Ok(chains)
    }

    /// Makes `policy` hold for the box with this interface and address, in one step. `kept` are the addresses that its
    /// names still give; without it, those that it has stay.
    pub(super) async fn apply(
        &self,
        interface: &str,
        address: Ipv4Addr,
        policy: &Policy,
        kept: Option<&[Lease]>,
    ) -> Result<()> {
        let chains = self.chains().await?;
        let strangers: Vec<String> = chains
            .of
            .iter()
            .filter(|(of, at)| of.as_str() != interface && **at == address)
            .map(|(of, _)| of.clone())
            .collect();
        let known = chains.of.contains_key(interface);
        let mut rules: String = strangers.iter().map(|of| self.removal(of, address)).collect();
        match policy.is_default() {
            true if known => rules.push_str(&self.removal(interface, address)),
            true => {}
            false => rules.push_str(&self.addition(interface, address, policy, kept)),
        }
        if rules.is_empty() {
            return Ok(());
        }
        let (interface, is_default) = (interface.to_owned(), policy.is_default());
        let changing = async move { firewall::nft(&rules).await };
        let changed = change(chains, changing, move |chains| {
            chains.retain(|of, _| !strangers.contains(of));
            if is_default {
                chains.remove(&interface);
            } else {
                chains.insert(interface, address);
            }
        });
        changed
            .await
            .map_err(EngineError::io("cannot apply the network policy"))
    }

    /// Removes what there is of the box's policy. The box must not have its interface any more.
    pub(super) async fn remove(&self, interface: &str) {
        if let Err(error) = self.try_to_remove(interface).await {
            // Found again by whoever gets the address next.
            tracing::warn!(
                error = crate::chain(&error),
                interface,
                "a network policy is left"
            );
        }
    }

    async fn try_to_remove(&self, interface: &str) -> Result<()> {
        let chains = self.chains().await?;
        let Some(address) = chains.of.get(interface) else {
            return Ok(());
        };
        let rules = self.removal(interface, *address);
        let of = interface.to_owned();
        let changing = async move { firewall::nft(&rules).await };
        let changed = change(chains, changing, move |chains| {
            chains.remove(&of);
        });
        changed
            .await
            .map_err(EngineError::io("cannot remove the network policy"))
    }

    /// Makes addresses that the names of a box gave reachable for it, unless they are no longer wanted by then.
    pub(super) async fn let_through(
        &self,
        interface: &str,
        leases: &[Lease],
        wanted: impl FnOnce() -> bool,
    ) -> std::io::Result<()> {
        let _unchanging = self.chains.lock().await;
        if !wanted() {
            return Err(std::io::Error::other("the policy has changed"));
        }
        firewall::nft(&self.leases(interface, leases)).await
    }

    fn leases(&self, interface: &str, leases: &[Lease]) -> String {
        let set = format!("inet {} n_{interface}", self.table);
        leases
            .iter()
            .map(|(address, seconds)| {
                // An element that is there keeps its time, unless it is removed before.
                format!(
                    "add element {set} {{ {address} }}\ndelete element {set} {{ {address} }}\n\
                     add element {set} {{ {address} timeout {seconds}s }}\n"
                )
            })
            .collect()
    }

    fn addition(
        &self,
        interface: &str,
        address: Ipv4Addr,
        policy: &Policy,
        kept: Option<&[Lease]>,
    ) -> String {
        let table = &self.table;
        let chain = format!("inet {table} b_{interface}");
        let mark = number(policy);
        let pass = format!("ct mark set {mark} return");
        let names = policy.names();
        let mut rules = vec![format!("ct state established,related ct mark {mark} return")];
        if names.is_empty() && policy.denies_everything_else() {
            // What a name server is asked leaves this host, too.
            rules.push(format!(
                "ct original ip daddr {GATEWAY} reject with icmpx admin-prohibited"
            ));
        } else {
            rules.push(format!("ct status dnat ct original ip daddr {GATEWAY} return"));
        }
        if let allowed @ [_, ..] = &*policy.allowed_blocks() {
            rules.push(format!("ip daddr {{ {} }} {pass}", list(allowed)));
        }
        rules.push(format!("ip daddr @n_{interface} {pass}"));
        if let denied @ [_, ..] = &*policy.denied_blocks() {
            let denied = list(denied);
            rules.push(format!(
                "ip daddr {{ {denied} }} meta l4proto tcp reject with tcp reset"
            ));
            rules.push(format!(
                "ip daddr {{ {denied} }} reject with icmpx admin-prohibited"
            ));
        }
        rules.push(pass);
        let rules: String = rules
            .iter()
            .map(|rule| format!("add rule {chain} {rule}\n"))
            .collect();
        let elements = match kept {
            Some(leases) => format!(
                "flush set inet {table} n_{interface}\n{}",
                self.leases(interface, leases)
            ),
            None => String::new(),
        };
        let named = if names.is_empty() {
            self.unnamed(address)
        } else {
            self.named(address)
        };
        format!(
            "add set inet {table} n_{interface} {{ type ipv4_addr; flags timeout; size {MAX_NAMED}; }}\n\
             {elements}add chain {chain}\nflush chain {chain}\n{rules}{named}\
             add element inet {table} policies {{ {address} : jump b_{interface} }}\n"
        )
    }

    fn named(&self, address: Ipv4Addr) -> String {
        format!("add element inet {} named {{ {address} }}\n", self.table)
    }

    fn unnamed(&self, address: Ipv4Addr) -> String {
        // Only what is there can be removed.
        let named = self.named(address);
        format!("{named}{}", named.replacen("add", "delete", 1))
    }

    fn removal(&self, interface: &str, address: Ipv4Addr) -> String {
        let table = &self.table;
        format!(
            "delete element inet {table} policies {{ {address} }}\n{}\
             flush chain inet {table} b_{interface}\ndelete chain inet {table} b_{interface}\n\
             delete set inet {table} n_{interface}\n",
            self.unnamed(address)
        )
    }
}

/// Goes on to its end when nobody waits for it any more: otherwise the kernel might have what `chains` does not tell of.
async fn change(
    mut chains: OwnedMutexGuard<Chains>,
    changing: impl Future<Output = std::io::Result<()>> + Send + 'static,
    then: impl FnOnce(&mut HashMap<String, Ipv4Addr>) + Send + 'static,
) -> std::io::Result<()> {
    let changing = tokio::spawn(async move {
        chains.doubtful = true;
        changing.await?;
        then(&mut chains.of);
        chains.doubtful = false;
        Ok(())
    });
    changing.await.map_err(std::io::Error::other)?
}

/// The chains that are there.
async fn read(table: &str) -> Result<Chains> {
    let listing = firewall::list(&format!("map inet {table} policies"))
        .await
        .map_err(EngineError::io("cannot read the policies of boxes"))?;
    Ok(Chains {
        of: chains(&listing),
        doubtful: false,
    })
}

fn list(blocks: &[Block]) -> String {
    blocks.iter().map(Block::to_string).collect::<Vec<_>>().join(", ")
}

/// What connections that this policy let through are marked with: the same for the same policy, whichever daemon
/// applied it. The high byte keeps it away from marks that others are likely to use.
fn number(policy: &Policy) -> String {
    let json = serde_json::to_vec(policy).unwrap_or_default();
    let hash = blake3::hash(&json);
    let [a, b, c, ..] = hash.as_bytes();
    format!("0xd0{a:02x}{b:02x}{c:02x}")
}

/// The boxes in nft's listing of the map.
fn chains(listing: &serde_json::Value) -> HashMap<String, Ipv4Addr> {
    let objects = listing["nftables"].as_array().into_iter().flatten();
    objects
        .flat_map(|object| object["map"]["elem"].as_array().into_iter().flatten())
        .filter_map(|element| {
            let address = element[0].as_str()?.parse().ok()?;
            let chain = element[1]["jump"]["target"].as_str()?;
            Some((chain.strip_prefix("b_")?.to_owned(), address))
        })
        .collect()
}

/// Of `leases`, those whose name the policy still allows.
pub(super) fn still_allowed<'a>(
    leases: impl Iterator<Item = (&'a str, Lease)>,
    names: &[Name],
) -> Vec<Lease> {
    leases
        .filter(|(name, _)| names.iter().any(|allowed| allowed.matches(name)))
        .map(|(_, lease)| lease)
        .collect()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_boxes_of_an_earlier_daemon_are_found_in_the_map() {
        let listing = serde_json::json!({"nftables": [{"metainfo": {}}, {"map": {"name": "policies", "elem":
            [["10.1.0.7", {"jump": {"target": "b_d1a2babcdefghij"}}], ["10.1.0.8", {"drop": null}]]}}]});
        let found = chains(&listing);
        assert_eq!(found.len(), 1);
        assert_eq!(found["d1a2babcdefghij"], Ipv4Addr::new(10, 1, 0, 7));
    }

    #[tokio::test]
    async fn a_change_that_nobody_waits_for_any_more_is_recorded_all_the_same() {
        let chains = Arc::new(Mutex::new(Chains::default()));
        let held = chains.clone().lock_owned().await;
        let slowly = async {
            tokio::task::yield_now().await;
            Ok(())
        };
        let changing = change(held, slowly, |chains| {
            chains.insert("d1a2babcdefghij".to_owned(), Ipv4Addr::LOCALHOST);
        });
        assert!(changing.now_or_never().is_none());
        let chains = chains.lock().await;
        assert!(chains.of.len() == 1 && !chains.doubtful);
    }

    #[tokio::test]
    async fn after_a_change_that_failed_nobody_relies_on_what_was_known() {
        let chains = Arc::new(Mutex::new(Chains::default()));
        let held = chains.clone().lock_owned().await;
        let failing = async { Err(std::io::ErrorKind::TimedOut.into()) };
        let changed = change(held, failing, |chains| {
            chains.insert("d1a2babcdefghij".to_owned(), Ipv4Addr::LOCALHOST);
        });
        changed.await.unwrap_err();
        let chains = chains.lock().await;
        assert!(chains.of.is_empty() && chains.doubtful);
    }

    #[test]
    fn a_policys_number_changes_with_the_policy_and_with_nothing_else() {
        let open = Policy::default();
        let closed = Policy {
            internet: false,
            ..Policy::default()
        };
        assert_eq!(number(&closed), number(&closed.clone()));
        assert_ne!(number(&open), number(&closed));
    }
}
