//! What boxes may reach: one nftables table for each daemon, the same for all its boxes.
//!
//! No rule names a box. The kernel's own routes say which address belongs behind which interface, and that is
//! what the source check asks; so starting and stopping a box changes nothing here.
//!
//! Boxes have no need to ask for hardware addresses. Answering them would tell which addresses the host has, and every
//! question leaves an entry for its sender in the host's one neighbour table, which a box could fill.

use std::io;
use std::net::Ipv4Addr;
use std::process::Stdio;

use tokio::io::AsyncWriteExt;

use super::{GATEWAY, Range};
use crate::{EngineError, Result};

/// Private, shared, link-local, loopback, multicast, documentation-only benchmarks and reserved.
const OUT_OF_BOUNDS: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, \
    192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/4, 240.0.0.0/4";

/// How fast one box may open connections. The host's table of them is shared, and a box that fills it would cut off all others.
const NEW_CONNECTIONS: &str = "500/second burst 2000 packets";

/// First characters of the host's interfaces of one daemon's boxes.
pub(super) fn interface_prefix(instance: &str) -> String {
    format!("d{}", &instance[..4])
}

fn table(instance: &str) -> String {
    format!("dorm_{instance}")
}

fn ruleset(instance: &str, range: &Range, resolvers: &[Ipv4Addr]) -> String {
    let table = table(instance);
    let boxes = format!("\"{}*\"", interface_prefix(instance));
    let dns = match resolvers {
        [] => String::new(),
        [first, ..] => ["udp", "tcp"]
            .map(|protocol| {
                format!("iifname {boxes} ip daddr {GATEWAY} {protocol} dport 53 dnat ip to {first}")
            })
            .join("\n    "),
    };
    format!(
        r#"table inet {table}
delete table inet {table}
table inet {table} {{
  set openers {{
    type ipv4_addr
    flags dynamic
    timeout 1m
  }}
  chain own_address {{
    type filter hook prerouting priority raw; policy accept;
    iifname {boxes} meta nfproto ipv6 drop
    iifname {boxes} fib saddr . iif oif 0 drop
  }}
  chain names {{
    type nat hook prerouting priority dstnat; policy accept;
    {dns}
  }}
  chain to_host {{
    type filter hook input priority filter - 10; policy accept;
    iifname {boxes} reject with icmpx admin-prohibited
  }}
  chain through {{
    type filter hook forward priority filter - 10; policy accept;
    oifname {boxes} iifname != {boxes} ct state established,related accept
    oifname {boxes} reject with icmpx admin-prohibited
    iifname {boxes} ct state established,related accept
    iifname {boxes} update @openers {{ ip saddr limit rate over {NEW_CONNECTIONS} }} drop
    iifname {boxes} ct status dnat ct original ip daddr {GATEWAY} accept
    iifname {boxes} ip daddr {{ {OUT_OF_BOUNDS} }} reject with icmpx admin-prohibited
    iifname {boxes} fib daddr type != unicast drop
  }}
  chain outward {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {range} oifname != {boxes} masquerade
  }}
}}
table arp {table}
delete table arp {table}
table arp {table} {{
  chain questions {{
    type filter hook input priority 0; policy accept;
    iifname {boxes} arp operation != reply drop
  }}
}}
"#
    )
}

/// Replaces the tables in one transaction: at no moment are boxes without them.
pub(super) async fn load(instance: &str, range: &Range, resolvers: &[Ipv4Addr]) -> Result<()> {
    nft(&ruleset(instance, range, resolvers))
        .await
        .map_err(EngineError::io("cannot load the firewall of boxes"))
}

pub(super) async fn unload(instance: &str) {
    let table = table(instance);
    for family in ["inet", "arp"] {
        let _ = nft(&format!(
            "table {family} {table}\ndelete table {family} {table}\n"
        ))
        .await;
    }
}

async fn nft(rules: &str) -> io::Result<()> {
    let mut command = tokio::process::Command::new("nft");
    command
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("nft (package nftables): {e}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(rules.as_bytes()).await?;
    }
    let output = child.wait_with_output().await?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(
        String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    ))
}
