//! The end of a box.

use std::time::Duration;

use dorm_sys::process::Process;
use rustix::process::Signal;

use super::{Container, Slot, ended};
use crate::{EngineError, Id, Result};

/// Killed processes are gone within milliseconds, unless they hang in the kernel.
const GONE_WITHIN: Duration = Duration::from_secs(20);

/// How long the guest has after the grace is over.
const FAREWELL: Duration = Duration::from_secs(2);

impl Container {
    pub(super) async fn stop_box(&self, id: &Id, grace: Duration) -> Result<()> {
        let slot = self.boxes().get(id).cloned();
        if let Some(Slot::Live(live)) = slot {
            live.stopping.send_replace(true);
            // The first asks, the second tells the guest to kill what is left and to let clients know.
            let patience = if grace.is_zero() {
                vec![]
            } else {
                vec![grace, FAREWELL]
            };
            for patience in patience {
                let _ = live.process.signal(Signal::TERM);
                let _ = live.group.thaw();
                if tokio::time::timeout(patience, ended(&live.process)).await.is_ok() {
                    break;
                }
            }
        }
        self.remove_remains(id).await?;
        self.boxes().remove(id);
        Ok(())
    }

    /// Ends all processes in the box's cgroup, then removes the cgroup and the interface.
    ///
    /// All are killed before any is thawed: one that still ran when its terminal or pipe ends would change the home after
    /// the memory that goes with it was saved.
    pub(super) async fn remove_remains(&self, id: &Id) -> Result<()> {
        let group = self.cgroups.group(id.as_str());
        let failed = || EngineError::io(format!("cannot remove the box of {id}"));
        let deadline = tokio::time::Instant::now() + GONE_WITHIN;
        let network = self.network.detach(id);
        let processes = async {
            loop {
                let mut listed = Vec::new();
                for pid in group.processes().map_err(failed())? {
                    match Process::open(pid) {
                        Ok(process) => listed.push(process),
                        // Gone by now, it needs no killing.
                        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                        Err(error) => return Err(failed()(error)),
                    }
                }
                // One that went to a stranger before it was opened is not in the group now.
                let members = group.processes().map_err(failed())?;
                listed.retain(|process| {
                    members.binary_search(&process.pid).is_ok() || process.reap().is_some()
                });
                for process in &listed {
                    let _ = process.signal(Signal::KILL);
                }
                let _ = group.thaw();
                for process in &listed {
                    let _ = tokio::time::timeout(GONE_WITHIN, ended(process)).await;
                }
                match group.remove() {
                    Ok(()) => return Ok(()),
                    Err(error) if tokio::time::Instant::now() > deadline => return Err(failed()(error)),
                    // An ended process leaves its cgroup a little later.
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let ((), removed) = tokio::join!(network, processes);
        removed
    }
}
