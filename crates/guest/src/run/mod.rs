//! Runs: the processes that clients start in the box.
//!
//! ```text
//!  service (RPC) ──▶ Runs ──▶ supervise::start ──▶ spawn (clone, exec)
//!       ▲              ▲              │
//!       │ events       │ exited       ▼ one follow task and one pump per stream
//!     Reader ◀── Output ◀──────── supervise ◀── reaper (SIGCHLD)
//! ```

mod command;
mod events;
mod oom;
pub(crate) mod output;
mod process;
mod pty;
pub(crate) mod service;
mod spawn;
mod spill;
mod supervise;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use connectrpc::ConnectError;
use dorm_proto::process::{ProcessInfo, ProcessSelector, StartRequest, process_selector::Selector};
use tokio::time::Instant;

pub(crate) use process::Run;

use crate::log::log;
use crate::settings::Settings;
use crate::users::User;

/// Ended runs whose output is kept, beyond which the oldest goes.
const KEPT_MAX: usize = 200;
/// How long the end of an attached run waits for a client that was cut off.
const UNHEARD_FOR: Duration = Duration::from_secs(600);

pub(crate) struct Runs {
    settings: Arc<Settings>,
    spill_folder: PathBuf,
    all: Mutex<All>,
    stopping: AtomicBool,
    oom: oom::Watch,
}

#[derive(Default)]
struct All {
    running: Vec<Arc<Run>>,
    /// Kept, oldest end first.
    ended: VecDeque<Arc<Run>>,
}

impl Runs {
    pub(crate) fn new(settings: Arc<Settings>, spill_folder: PathBuf) -> Self {
        // Whatever lies there belonged to runs of an earlier start of the box.
        let _ = std::fs::remove_dir_all(&spill_folder);
        if let Err(e) = make_private(&spill_folder) {
            log!("output cannot be kept in {}: {e}", spill_folder.display());
        }
        Self {
            settings,
            spill_folder,
            all: Mutex::default(),
            stopping: AtomicBool::new(false),
            oom: oom::Watch::new(),
        }
    }

    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().expect("no holder panics")
    }

    /// Starts a run, with a reader of its output from the first byte.
    pub(crate) fn start(
        self: &Arc<Self>,
        request: &StartRequest,
        user: &User,
        deadline: Option<Instant>,
    ) -> Result<(Arc<Run>, output::Reader), ConnectError> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(ConnectError::unavailable("the box is stopping"));
        }
        let (run, pumps) = supervise::start(&self.settings, &self.spill_folder, request, user)?;
        let reader = run.output.subscribe(Some(0));
        self.all().running.push(run.clone());
        tokio::spawn(supervise::follow(self.clone(), run.clone(), pumps, deadline));
        Ok((run, reader))
    }

    /// Hands the wait status of a child to its run. Other children are nobody's concern once reaped.
    pub(crate) fn exited(&self, pid: i32, status: i32) {
        if let Some(run) = self.all().running.iter().find(|r| r.pid == pid && r.alive()) {
            run.exit.send_replace(Some(status));
        }
    }

    fn ended(self: &Arc<Self>, run: &Arc<Run>) {
        // A client that was cut off from its run may come back for the end of it.
        let unheard = !run.keep && !run.output.has_readers();
        let mut all = self.all();
        all.running.retain(|r| !Arc::ptr_eq(r, run));
        if run.keep || unheard {
            all.ended.push_back(run.clone());
            if all.ended.len() > KEPT_MAX {
                all.ended.pop_front();
            }
        }
        drop(all);
        if unheard {
            let (runs, run) = (self.clone(), run.clone());
            tokio::spawn(async move {
                tokio::time::sleep(UNHEARD_FOR).await;
                runs.all().ended.retain(|r| !Arc::ptr_eq(r, &run));
            });
        }
        if run.output.len() > 512 * 1024 {
            crate::memory::trim_soon();
        }
    }

    pub(crate) fn list(&self, with_ended: bool) -> Vec<ProcessInfo> {
        let all = self.all();
        let ended = all.ended.iter().filter(|_| with_ended);
        ended.chain(&all.running).map(|r| r.info()).collect()
    }

    /// The newest run that is meant, one that still runs before one that has ended.
    pub(crate) fn find(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Run>, ConnectError> {
        let selector = selector
            .and_then(|s| s.selector.as_ref())
            .ok_or_else(|| ConnectError::invalid_argument("the request selects no process"))?;
        let meant = |run: &&Arc<Run>| match selector {
            Selector::Pid(pid) => u32::try_from(run.pid) == Ok(*pid),
            Selector::Tag(tag) => run.tag.as_ref() == Some(tag),
            Selector::RunId(id) => run.id == *id,
        };
        let all = self.all();
        all.running
            .iter()
            .rev()
            .find(meant)
            .or_else(|| all.ended.iter().rev().find(meant))
            .cloned()
            .ok_or_else(|| {
                ConnectError::not_found(match selector {
                    Selector::Pid(pid) => format!("no process with pid {pid}"),
                    Selector::Tag(tag) => format!("no process with tag '{tag}'"),
                    Selector::RunId(id) => format!("no run '{id}'"),
                })
            })
    }

    pub(crate) fn forget(&self, run: &Arc<Run>) -> Result<(), ConnectError> {
        if run.ended().is_none() {
            return Err(ConnectError::failed_precondition(format!(
                "run {} has not ended",
                run.id
            )));
        }
        self.all().ended.retain(|r| !Arc::ptr_eq(r, run));
        Ok(())
    }

    /// Starts nothing more, and gives what still runs.
    pub(crate) fn stop(&self) -> Vec<Arc<Run>> {
        self.stopping.store(true, Ordering::Relaxed);
        self.all().running.clone()
    }
}

fn make_private(folder: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}
