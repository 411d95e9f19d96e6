//! A machine whose pool becomes full while it runs: its disk reports errors, or it ends for want of memory.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::needs_machines;
use crate::full::Ballast;
use crate::harness::{self, Options, Server};

/// Room for the template twice, as files and as a disk, and for a machine.
const POOL: u64 = 6 << 30;
/// Room for records, and not for what the machine writes.
const LITTLE: u64 = 12 << 20;
/// The client waits ten minutes for a box that does not answer.
const WRITTEN_WITHIN: Duration = Duration::from_secs(15 * 60);
/// What a program is told whose writes do not reach the disk, or that asks after a journal could not be written.
const ERRORS: [&str; 3] = ["Input/output error", "No space left on device", "Read-only file system"];

pub(super) fn a_machine_on_a_full_disk_loses_nothing_that_it_has_synced() -> Result<()> {
    needs_machines()?;
    let server = Server::start_with(&Options { disk: Some(POOL), config: harness::CALM, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    let agent = server.agent_with("full", &["--isolation", "vm", "--memory", "256M", "--cpus", "1", "--disk", "3G"])?;
    let sum = agent.root_text("head -c 32M /dev/urandom > /root/synced && sync && sha256sum < /root/synced")?;

    let ballast = Ballast::beside(&server)?;
    ballast.fill(LITTLE)?;
    let write = "dd if=/dev/urandom of=/root/fill bs=1M count=200 conv=fsync";
    let write = server.command(&["exec", "-u", "root", &agent.name, "--", "sh", "-c", write]);
    let written = harness::run_within(WRITTEN_WITHIN, write, b"")?;
    ensure!(written.code != 0, "200 MiB found room in {}: {written}", LITTLE >> 20);
    ensure!(server.get("/healthz")?.status == 200, "the daemon does not answer");
    ballast.remove()?;
    // What ended while nothing could be recorded is recorded by now.
    if !ERRORS.iter().any(|error| written.stderr.contains(error)) {
        harness::eventually("the end of the machine is told", || {
            let told = agent.events()?;
            let is_end = |event: &serde_json::Value| {
                event["reason"].as_str().is_some_and(|why| why.contains("the virtual machine of the box ended"))
            };
            Ok(told.iter().any(is_end).then_some(()))
        })?;
    }

    if agent.state()? == "running" {
        agent.stop()?;
    }
    let whole = agent.root_text("sha256sum < /root/synced && rm -f /root/fill && echo new > /root/new && sync && cat /root/new")?;
    ensure!(whole == format!("{sum}\nnew"), "{sum} became {whole}");
    agent.hibernate()?;
    ensure!(agent.root_text("cat /root/new")? == "new");
    server.in_order()
}
