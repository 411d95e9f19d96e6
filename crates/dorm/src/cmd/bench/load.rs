//! What runs in the agents that are put to sleep, woken and copied.

use anyhow::{Result, ensure};

use super::Bench;
use crate::client::wire::StartRequest;

/// MiB that the larger of the measured agents holds.
pub(super) const LARGE: u32 = 100;
/// And those of which there are many.
const SMALL: u32 = 8;

/// Holds memory that differs from page to page, and notes in a file when it was held still for longer than the scheduler
/// usually does.
const HOLDER: &str = r#"
import os, sys, time
ballast = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
open("/tmp/bench-ready", "w").close()
last = time.monotonic()
while True:
    time.sleep(0.002)
    now = time.monotonic()
    if now - last > 0.01:
        with open("/dev/shm/gaps", "a") as gaps:
            gaps.write(f"{now - last}\n")
    last = now
"#;

/// Holds memory and does nothing: a hundred of the above would keep three cores busy.
const RESTING: &str = r#"
import os, signal, sys
ballast = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
open("/tmp/bench-ready", "w").close()
while True:
    signal.pause()
"#;

const BEGIN: &str = r#"
setsid python3 -c "$1" "$2" </dev/null >/dev/null 2>&1 &
for _ in $(seq 300); do test -e /tmp/bench-ready && exit 0; sleep 0.1; done
exit 1
"#;

/// Why this template cannot be loaded, if so.
pub(super) async fn missing(bench: &Bench, agent: &str) -> Result<Option<String>> {
    let found = bench
        .shell(agent, "command -v python3 && command -v setsid")
        .await?;
    Ok(found.is_none().then(|| "the template has no python3".to_owned()))
}

/// Starts a process in the agent that holds so many MiB.
pub(super) async fn hold(bench: &Bench, agent: &str, mib: u32) -> Result<()> {
    start(bench, agent, HOLDER, mib).await
}

/// Starts one that holds little, and does nothing.
pub(super) async fn rest(bench: &Bench, agent: &str) -> Result<()> {
    start(bench, agent, RESTING, SMALL).await
}

async fn start(bench: &Bench, agent: &str, program: &str, mib: u32) -> Result<()> {
    let guest = bench.client.guest(agent, Some("root"));
    let arguments = ["-c", BEGIN, "sh", program, &mib.to_string()].map(str::to_owned);
    let (_, _, end) = guest.run(&StartRequest::command("/bin/sh", arguments)).await?;
    ensure!(
        end.code() == 0,
        "a process of {mib} MiB could not be started in {agent}"
    );
    Ok(())
}

/// Whether the process is there still: an agent that lost its memory was measured for nothing.
pub(super) async fn still_held(bench: &Bench, agent: &str) -> Result<()> {
    let found = bench.shell(agent, "grep -lax python3 /proc/[0-9]*/comm").await?;
    ensure!(found.is_some(), "{agent} has lost its memory");
    Ok(())
}

/// Seconds of the longest time that the process was held still since the last call.
pub(super) async fn longest_gap(bench: &Bench, agent: &str) -> Result<Option<f64>> {
    let gaps = bench
        .shell(agent, "cat /dev/shm/gaps 2>/dev/null; rm -f /dev/shm/gaps")
        .await?;
    let gaps = gaps.unwrap_or_default();
    Ok(gaps.lines().filter_map(|line| line.parse().ok()).reduce(f64::max))
}
