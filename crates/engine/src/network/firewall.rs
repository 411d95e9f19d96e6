//! What boxes may reach: one nftables table for each daemon.
//!
//! No rule here names a box. The kernel's own routes say which address belongs behind which interface, and that is
//! what the source check asks; so starting and stopping a box changes nothing. A box that has a policy of its own has a
//! chain for it, which a map leads to: see [`super::gate`].
//!
//! Boxes have no need to ask for hardware addresses. Answering them would tell which addresses the host has, and every
//! question leaves an entry for its sender in the host's one neighbour table, which a box could fill.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::{GATEWAY, Range};
use crate::{EngineError, Result};

/// Private, shared, link-local, loopback, multicast, documentation-only benchmarks and reserved.
pub(super) const OUT_OF_BOUNDS: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, \
    192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/4, 240.0.0.0/4";

/// How fast one box may open connections. The host's table of them is shared, and a box that fills it would cut off all others.
const NEW_CONNECTIONS: &str = "500/second burst 2000 packets";

/// Far beyond what nft takes. Whoever has to do with the policies of boxes waits for it.
const LONGEST: Duration = Duration::from_secs(60);

/// How long one that was killed may take to end: what the kernel is doing for it, it does to its end.
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// First characters of the host's interfaces of one daemon's boxes.
pub(super) fn interface_prefix(instance: &str) -> String {
    format!("d{}", &instance[..4])
}

pub(super) fn table(instance: &str) -> String {
    format!("dorm_{instance}")
}

/// Rules come and go, but what a box's policy rests on stays: the tables are made if they are missing, and only the
/// rules in the chains below are exchanged. A chain whose hook or priority is to change needs another name.
fn ruleset(instance: &str, range: &Range, resolvers: &[Ipv4Addr], own: Option<SocketAddrV4>) -> String {
    let table = table(instance);
    let boxes = format!("\"{}*\"", interface_prefix(instance));
    let dns = |who: &str, to: &dyn std::fmt::Display| {
        ["udp", "tcp"]
            .map(|protocol| {
                format!("iifname {boxes} {who} ip daddr {GATEWAY} {protocol} dport 53 dnat ip to {to}\n    ")
            })
            .concat()
    };
    let for_named = own.map(|own| dns("ip saddr @named", &own)).unwrap_or_default();
    let for_all = resolvers.first().map(|first| dns("", first)).unwrap_or_default();
    let own_input = own
        .map(|own| {
            format!(
                "iifname {boxes} ip daddr {} meta l4proto {{ tcp, udp }} th dport {} ct status dnat accept",
                own.ip(),
                own.port()
            )
        })
        .unwrap_or_default();
    format!(
        r#"table inet {table} {{
  set openers {{
    type ipv4_addr
    flags dynamic
    timeout 1m
  }}
  map policies {{
    type ipv4_addr : verdict
  }}
  set named {{
    type ipv4_addr
  }}
  chain own_address {{ type filter hook prerouting priority raw; policy accept; }}
  chain names {{ type nat hook prerouting priority dstnat; policy accept; }}
  chain to_host {{ type filter hook input priority filter - 10; policy accept; }}
  chain through {{ type filter hook forward priority filter - 10; policy accept; }}
  chain outward {{ type nat hook postrouting priority srcnat; policy accept; }}
}}
flush chain inet {table} own_address
flush chain inet {table} names
flush chain inet {table} to_host
flush chain inet {table} through
flush chain inet {table} outward
table inet {table} {{
  chain own_address {{
    iifname {boxes} meta nfproto ipv6 drop
    iifname {boxes} fib saddr . iif oif 0 drop
  }}
  chain names {{
    {for_named}{for_all}
  }}
  chain to_host {{
    {own_input}
    iifname {boxes} reject with icmpx admin-prohibited
  }}
  chain through {{
    oifname {boxes} iifname != {boxes} ct state established,related accept
    oifname {boxes} reject with icmpx admin-prohibited
    iifname {boxes} ip saddr vmap @policies
    iifname {boxes} ct state established,related accept
    iifname {boxes} update @openers {{ ip saddr limit rate over {NEW_CONNECTIONS} }} drop
    iifname {boxes} ct status dnat ct original ip daddr {GATEWAY} accept
    iifname {boxes} ip daddr {{ {OUT_OF_BOUNDS} }} reject with icmpx admin-prohibited
    iifname {boxes} fib daddr type != unicast drop
  }}
  chain outward {{
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

/// Brings the tables up to date in one transaction: at no moment are boxes without them, nor without their policies.
/// `own` is where the daemon answers the DNS queries of boxes that may reach names.
pub(super) async fn load(
    instance: &str,
    range: &Range,
    resolvers: &[Ipv4Addr],
    own: Option<SocketAddrV4>,
) -> Result<()> {
    nft(&ruleset(instance, range, resolvers, own))
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

/// Applies `rules` in one transaction.
pub(super) async fn nft(rules: &str) -> io::Result<()> {
    run(&["-f", "-"], rules).await.map(drop)
}

/// What nft says of `object`, as JSON.
pub(super) async fn list(object: &str) -> io::Result<serde_json::Value> {
    let text = run(&["-j", &format!("list {object}")], "").await?;
    Ok(serde_json::from_slice(&text)?)
}

async fn run(args: &[&str], input: &str) -> io::Result<Vec<u8>> {
    let mut nft = Command::new("nft");
    nft.args(args);
    output_of(nft, input, LONGEST).await
}

/// What `command` answers to `input`. One that has not ended within `longest` is killed, and has ended when that is told: what it
/// was changing, it has changed or not.
async fn output_of(mut command: Command, input: &str, longest: Duration) -> io::Result<Vec<u8>> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("nft (package nftables): {e}")))?;
    let answered = tokio::time::timeout(longest, answer(&mut child, input)).await;
    let output = answered.unwrap_or_else(|_| {
        let text = format!("nft did not end within {} s, and was killed", longest.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    });
    if output.is_err() {
        let _ = tokio::time::timeout(ENDED_WITHIN, child.kill()).await;
    }
    let output = output?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(io::Error::other(
        String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    ))
}

async fn answer(child: &mut Child, input: &str) -> io::Result<Output> {
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).await?;
    }
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    if let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) {
        tokio::try_join!(out.read_to_end(&mut stdout), err.read_to_end(&mut stderr))?;
    }
    Ok(Output {
        status: child.wait().await?,
        stdout,
        stderr,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes called so, those that have ended and that nobody has waited for among them.
    fn called(name: &str) -> usize {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let names = processes.filter_map(|process| std::fs::read_to_string(process.path().join("comm")).ok());
        names.filter(|found| found.trim_end() == name).count()
    }

    #[tokio::test]
    async fn a_program_that_does_not_end_has_ended_when_that_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let name = format!("stuck-{}", std::process::id());
        let stuck = directory.path().join(&name);
        std::os::unix::fs::symlink("/bin/sleep", &stuck).unwrap();
        let mut stuck = Command::new(stuck);
        stuck.arg("4711");
        let error = output_of(stuck, "", Duration::from_millis(1)).await.unwrap_err();
        assert_eq!(called(&name), 0);
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("was killed"), "{error}");
    }

    #[tokio::test]
    async fn what_a_program_answers_is_passed_on_and_so_is_why_it_failed() {
        let long = Duration::from_secs(600);
        let answer = output_of(Command::new("cat"), "asked", long).await.unwrap();
        assert_eq!(answer, b"asked");
        let mut failing = Command::new("sh");
        failing.args(["-c", "cat >&2; exit 1"]);
        let error = output_of(failing, "no such table\n", long).await.unwrap_err();
        assert_eq!(error.to_string(), "no such table");
    }
}
