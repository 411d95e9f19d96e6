//! A launcher that waits for its box.
//!
//! Two things that take milliseconds can be done before anybody asks for a box: starting the launcher,
//! and making it a member of a cgroup, for which the kernel waits until every core has passed a quiet point. So a
//! few launchers are always kept ready. Where groups can be renamed (version 1), each is a member of a group already, which
//! gets the name of the box when there is one.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dorm_sys::cgroup::{Group, GroupLimits, Hierarchy};
use tokio::process::Child;

use crate::host::failed;
use crate::launch::{self, Preparation, Report};
use crate::packet::PacketSocket;
use crate::{Id, Result};

/// First characters of the names of groups whose box is not there yet.
const PREFIX: &str = "spare-";
/// How many launchers wait.
const READY: usize = 2;
const LEAVING: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Spares {
    launcher: PathBuf,
    filter: Vec<u8>,
    cgroups: Hierarchy,
    ready: Mutex<Vec<Spare>>,
    /// Held while a spare is made ready: one at a time is enough, and the end waits for it.
    refilling: tokio::sync::Mutex<()>,
    closed: AtomicBool,
}

/// A launcher, and the group that it is in.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) process: Child,
    pub(super) socket: PacketSocket,
    group: Option<SpareGroup>,
}

/// Is to be removed, unless a box takes it over.
#[derive(Debug)]
struct SpareGroup {
    cgroups: Hierarchy,
    name: String,
}

impl SpareGroup {
    async fn remove(self) {
        // An ended process leaves its group a little later.
        for _ in 0..LEAVING.as_millis() / PAUSE.as_millis() {
            if self.cgroups.group(&self.name).remove().is_ok() {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        tracing::warn!(
            group = self.name,
            "a group of processes that have ended cannot be removed"
        );
    }
}

impl Spares {
    pub(super) fn new(launcher: PathBuf, filter: Vec<u8>, cgroups: Hierarchy) -> Arc<Self> {
        // What an earlier daemon kept ready went with it, but for the group.
        for name in cgroups
            .list()
            .unwrap_or_default()
            .into_iter()
            .filter(|name| name.starts_with(PREFIX))
        {
            tokio::spawn(
                SpareGroup {
                    cgroups: cgroups.clone(),
                    name,
                }
                .remove(),
            );
        }
        let (ready, refilling, closed) = Default::default();
        let spares = Arc::new(Self {
            launcher,
            filter,
            cgroups,
            ready,
            refilling,
            closed,
        });
        spares.refill();
        spares
    }

    /// A spare launcher, or a new one; others are made ready meanwhile.
    pub(super) async fn take(self: &Arc<Self>) -> Result<Spare> {
        let mut spare = self.ready().pop();
        if spare.is_none() {
            // The one that is being made comes sooner than another would.
            let _made = self.refilling.lock().await;
            spare = self.ready().pop();
        }
        let alive = spare
            .as_mut()
            .is_some_and(|s| s.process.try_wait().is_ok_and(|ended| ended.is_none()));
        let spare = match spare {
            Some(spare) if alive => Ok(spare),
            dead => {
                if let Some(dead) = dead {
                    dead.end().await;
                }
                self.prepare().await
            }
        };
        self.refill();
        spare
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

    fn refill(self: &Arc<Self>) {
        let spares = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                let _alone = spares.refilling.lock().await;
                if spares.closed.load(Ordering::SeqCst) || spares.ready().len() >= READY {
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
        let spawned = PacketSocket::pair().and_then(|(socket, theirs)| {
            let process = launch::spawn(&self.launcher, theirs, std::process::Stdio::null())?;
            Ok((process, socket))
        });
        let (process, socket) = match spawned {
            Ok(spawned) => spawned,
            Err(error) => {
                if let Some(group) = group {
                    group.remove().await;
                }
                return Err(failed("was prepared")(error.into()));
            }
        };
        let spare = Spare {
            process,
            socket,
            group,
        };
        let join = spare
            .group
            .as_ref()
            .map(|g| self.cgroups.group(&g.name).join_files())
            .unwrap_or_default();
        let said = async {
            spare
                .socket
                .send_json(&Preparation { join, filter: true })
                .await?;
            spare.socket.send(&self.filter).await?;
            spare.socket.receive().await
        };
        let refused = match said.await {
            Ok(said) => match serde_json::from_slice(&said) {
                Ok(Report::Prepared) => return Ok(spare),
                _ => failed("was prepared")(super::start::reason(&said).into()),
            },
            Err(error) => failed("was prepared")(error.into()),
        };
        spare.end().await;
        Err(refused)
    }

    fn make_group(&self) -> Result<SpareGroup> {
        let group = SpareGroup {
            cgroups: self.cgroups.clone(),
            name: format!("{PREFIX}{}", Id::random()),
        };
        self.cgroups
            .group(&group.name)
            .make()
            .map_err(|e| failed("was given its limits")(e.into()))?;
        Ok(group)
    }

    fn ready(&self) -> std::sync::MutexGuard<'_, Vec<Spare>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spare {
    /// Ends the launcher and removes its group.
    async fn end(self) {
        let Self {
            mut process,
            socket,
            group,
        } = self;
        drop(socket);
        let _ = process.wait().await;
        if let Some(group) = group {
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
            Some(spare) => {
                let group = cgroups.rename(&spare.name, id.as_str()).map_err(failed)?;
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
