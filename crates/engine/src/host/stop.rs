//! The end of a box.

use std::path::Path;
use std::time::Duration;

use dorm_sys::process::Process;
use rustix::process::Signal;

use super::{Host, LiveBox, ended};
use crate::engines::Kind;
use crate::{EngineError, Id, Result};

/// Killed processes are gone within milliseconds, unless they hang in the kernel.
const GONE_WITHIN: Duration = Duration::from_secs(20);

impl Host {
    /// Lets the box end by itself, within `grace`.
    pub(crate) async fn ask_to_end(&self, live: &LiveBox, kind: &dyn Kind, grace: Duration) {
        live.stopping.send_replace(true);
        if grace.is_zero() {
            return;
        }
        // The first asks, the second tells the guest to kill what is left and to let clients know.
        for patience in [grace, kind.farewell()] {
            let end = async {
                kind.ask_to_end(live).await;
                ended(&live.process).await;
            };
            if tokio::time::timeout(patience, end).await.is_ok() {
                return;
            }
        }
        tracing::warn!(id = %live.id, "the box does not end by itself, and is ended");
    }

    /// Removes what there is of a box, and it has no place on its home any more.
    pub(crate) async fn sweep(&self, id: &Id) -> Result<()> {
        self.remove_remains(id).await?;
        self.forget(id);
        Ok(())
    }

    /// Ends all processes in the box's cgroup, then removes its directory, the cgroup and the interface.
    ///
    /// All are killed before any is thawed: one that still ran when its terminal or pipe ends would change the home after
    /// the memory that goes with it was saved.
    pub(crate) async fn remove_remains(&self, id: &Id) -> Result<()> {
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
                remove_directory(&self.run_directory(id)).map_err(failed())?;
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

fn remove_directory(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
