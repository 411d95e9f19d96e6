//! A launcher that waits for its box.
//!
//! Two things that take milliseconds can be done before anybody asks for a box: starting the launcher,
//! and making it a member of a cgroup, for which the kernel waits until every core has passed a quiet point. So a
//! few launchers are always kept ready. Where groups can be renamed (version 1), each is a member of a group already, which
//! gets the name of the box when there is one. A box that comes back from disk takes a launcher that has become CRIU already.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dorm_sys::cgroup::{Group, GroupLimits, Hierarchy};

use crate::host::failed;
use crate::launch::{self, Launcher};
use crate::{Id, Result};

/// First characters of the names of groups whose box is not there yet.
const PREFIX: &str = "spare-";
const LEAVING: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Spares {
    program: PathBuf,
    cgroups: Hierarchy,
    part: Part,
    ready: Mutex<Vec<Spare>>,
    /// Held while a spare is made ready: one at a time is enough, and the end waits for it.
    refilling: tokio::sync::Mutex<()>,
    closed: AtomicBool,
}

/// What launchers wait as.
#[derive(Debug)]
pub(super) enum Part {
    /// For a box that is started. With the filter of its system calls.
    Launcher(Vec<u8>),
    /// For a box that is restored, by this job.
    Criu(launch::Job),
}

impl Part {
    /// How many wait.
    fn count(&self) -> usize {
        match self {
            Self::Launcher(_) => 2,
            Self::Criu(_) => 1,
        }
    }
}

/// A launcher, and the group that it is in.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) launcher: Launcher,
    group: Option<SpareGroup>,
}

/// Is removed at its end, unless a box takes it over.
#[derive(Debug)]
struct SpareGroup {
    cgroups: Hierarchy,
    /// None once it is a box's.
    name: Option<String>,
}

impl SpareGroup {
    fn join_files(&self) -> Vec<PathBuf> {
        let group = self.name.as_ref().map(|name| self.cgroups.group(name));
        group.map(|group| group.join_files()).unwrap_or_default()
    }

    async fn remove(mut self) {
        if let Some(name) = self.name.take() {
            remove(self.cgroups.clone(), name).await;
        }
    }
}

impl Drop for SpareGroup {
    fn drop(&mut self) {
        if let (Some(name), Ok(runtime)) = (self.name.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(remove(self.cgroups.clone(), name));
        }
    }
}

async fn remove(cgroups: Hierarchy, name: String) {
    // An ended process leaves its group a little later.
    for _ in 0..LEAVING.as_millis() / PAUSE.as_millis() {
        if cgroups.group(&name).remove().is_ok() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    tracing::warn!(
        group = name,
        "a group of processes that have ended cannot be removed"
    );
}

impl Spares {
    pub(super) fn new(program: PathBuf, cgroups: Hierarchy, part: Part) -> Arc<Self> {
        let (ready, refilling, closed) = Default::default();
        let spares = Arc::new(Self {
            program,
            cgroups,
            part,
            ready,
            refilling,
            closed,
        });
        spares.refill();
        spares
    }

    /// What an earlier daemon kept ready went with it, but for the groups.
    pub(super) fn sweep(cgroups: &Hierarchy) {
        let names = cgroups.list().unwrap_or_default();
        for name in names.into_iter().filter(|name| name.starts_with(PREFIX)) {
            tokio::spawn(remove(cgroups.clone(), name));
        }
    }

    /// A spare launcher, or a new one. Whoever takes one has it replaced by [`Self::refill`], when that is in nobody's way.
    pub(super) async fn take(&self) -> Result<Spare> {
        let mut spare = self.ready().pop();
        if spare.is_none() {
            // The one that is being made comes sooner than another would.
            let _made = self.refilling.lock().await;
            spare = self.ready().pop();
        }
        let alive = spare
            .as_mut()
            .is_some_and(|s| s.launcher.process.try_wait().is_ok_and(|ended| ended.is_none()));
        match spare {
            Some(spare) if alive => Ok(spare),
            dead => {
                if let Some(dead) = dead {
                    dead.end().await;
                }
                self.prepare().await
            }
        }
    }

    /// Ends the spare launchers, and makes no others.
    pub(super) async fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let _made = self.refilling.lock().await;
        let spares = std::mem::take(&mut *self.ready());
        for spare in spares {
            spare.end().await;
        }
    }

    /// Makes ready what is missing, in the background.
    pub(super) fn refill(self: &Arc<Self>) {
        self.refill_in(Duration::ZERO);
    }

    pub(super) fn refill_in(self: &Arc<Self>, time: Duration) {
        let spares = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            loop {
                let _alone = spares.refilling.lock().await;
                if spares.closed.load(Ordering::SeqCst) || spares.ready().len() >= spares.part.count() {
                    return;
                }
                match spares.prepare().await {
                    Ok(spare) => spares.ready().push(spare),
                    Err(error) => {
                        tracing::warn!(error = %crate::chain(&error), "no launcher could be made ready");
                        return;
                    }
                }
            }
        });
    }

    async fn prepare(&self) -> Result<Spare> {
        let group = match self.cgroups.can_rename() {
            true => Some(self.make_group()?),
            false => None,
        };
        let join = group.iter().flat_map(SpareGroup::join_files).collect();
        let launcher = self.start(join).await;
        let launcher = launcher.map_err(|reason| failed("was prepared")(reason.into()))?;
        Ok(Spare { launcher, group })
    }

    async fn start(&self, join: Vec<PathBuf>) -> io::Result<Launcher> {
        match &self.part {
            Part::Launcher(filter) => Launcher::start(&self.program, join, Some(filter)).await,
            Part::Criu(job) => {
                let launcher = Launcher::start(&self.program, join, None).await?;
                launcher.become_criu(job.clone()).await
            }
        }
    }

    fn make_group(&self) -> Result<SpareGroup> {
        let name = format!("{PREFIX}{}", Id::random());
        let made = self.cgroups.group(&name).make();
        let group = SpareGroup {
            cgroups: self.cgroups.clone(),
            name: Some(name),
        };
        made.map_err(|e| failed("was given its limits")(e.into()))?;
        Ok(group)
    }

    fn ready(&self) -> std::sync::MutexGuard<'_, Vec<Spare>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spare {
    /// Ends the launcher and removes its group.
    pub(super) async fn end(self) {
        self.launcher.end().await;
        if let Some(group) = self.group {
            group.remove().await;
        }
    }

    /// Gives the launcher's group, or a new one that it has yet to join, to the box `id`.
    pub(super) fn claim(
        &mut self,
        cgroups: &Hierarchy,
        id: &Id,
        limits: &GroupLimits,
    ) -> Result<(Group, Vec<PathBuf>)> {
        let failed = |e: std::io::Error| failed("was given its limits")(e.into());
        match self.group.take() {
            Some(mut spare) => {
                let name = spare.name.as_deref().unwrap_or_default();
                let group = cgroups.rename(name, id.as_str()).map_err(failed)?;
                spare.name = None;
                group.limit(limits).map_err(failed)?;
                Ok((group, Vec::new()))
            }
            None => {
                let group = cgroups.create(id.as_str(), limits).map_err(failed)?;
                let join = group.join_files();
                Ok((group, join))
            }
        }
    }
}
