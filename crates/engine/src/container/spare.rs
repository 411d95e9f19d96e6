//! A launcher that waits for its box.
//!
//! Two things that take milliseconds can be done before anybody asks for a box: starting the launcher,
//! and making it a member of a cgroup, for which the kernel waits until every core has passed a quiet point. So one
//! launcher is always kept ready. Where groups can be renamed (version 1), it is a member of a group already, which gets
//! the name of the box when there is one.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use dorm_sys::cgroup::{Group, GroupLimits, Hierarchy};
use tokio::process::Child;

use super::start::failed;
use crate::launch::{self, Preparation, Report};
use crate::packet::PacketSocket;
use crate::{Id, Result};

/// First characters of the names of groups whose box is not there yet.
const PREFIX: &str = "spare-";

#[derive(Debug)]
pub(super) struct Spares {
    launcher: PathBuf,
    filter: Vec<u8>,
    cgroups: Hierarchy,
    ready: Mutex<Option<Spare>>,
}

/// A launcher, and the group that it is in.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) process: Child,
    pub(super) socket: PacketSocket,
    group: Option<SpareGroup>,
}

/// Removed with the spare, unless a box took it over.
#[derive(Debug)]
struct SpareGroup {
    cgroups: Hierarchy,
    name: String,
}

impl Drop for SpareGroup {
    fn drop(&mut self) {
        let _ = self.cgroups.group(&self.name).remove();
    }
}

impl Spares {
    pub(super) fn new(launcher: PathBuf, filter: Vec<u8>, cgroups: Hierarchy) -> Arc<Self> {
        // What an earlier daemon kept ready went with it, but for the group.
        for name in cgroups.list().unwrap_or_default().iter().filter(|name| name.starts_with(PREFIX)) {
            let _ = cgroups.group(name).remove();
        }
        let spares = Arc::new(Self { launcher, filter, cgroups, ready: Mutex::default() });
        spares.refill();
        spares
    }

    /// The spare launcher, or a new one; another is made ready meanwhile.
    pub(super) async fn take(self: &Arc<Self>) -> Result<Spare> {
        let mut ready = self.ready().take();
        let alive = ready.as_mut().is_some_and(|s| s.process.try_wait().is_ok_and(|ended| ended.is_none()));
        let spare = match ready.filter(|_| alive) {
            Some(spare) => Ok(spare),
            None => self.prepare().await,
        };
        self.refill();
        spare
    }

    /// Ends the spare launcher.
    pub(super) async fn close(&self) {
        let spare = self.ready().take();
        if let Some(Spare { mut process, socket, group }) = spare {
            drop(socket);
            let _ = process.wait().await;
            drop(group);
        }
    }

    fn refill(self: &Arc<Self>) {
        let spares = Arc::clone(self);
        tokio::spawn(async move {
            match spares.prepare().await {
                Ok(spare) => {
                    let surplus = spares.ready().replace(spare);
                    drop(surplus);
                }
                Err(error) => tracing::warn!(error = %crate::chain(&error), "no launcher could be made ready"),
            }
        });
    }

    async fn prepare(&self) -> Result<Spare> {
        let group = match self.cgroups.can_rename() {
            true => Some(self.make_group()?),
            false => None,
        };
        let (socket, theirs) = PacketSocket::pair().map_err(|e| failed("was prepared")(e.into()))?;
        let process = launch::spawn(&self.launcher, theirs, std::process::Stdio::null())
            .map_err(|e| failed("was prepared")(e.into()))?;
        let spare = Spare { process, socket, group };
        let join = spare.group.as_ref().map(|g| self.cgroups.group(&g.name).join_files()).unwrap_or_default();
        let said = async {
            spare.socket.send_json(&Preparation { join, filter: true }).await?;
            spare.socket.send(&self.filter).await?;
            spare.socket.receive().await
        };
        let said = said.await.map_err(|e| failed("was prepared")(e.into()))?;
        match serde_json::from_slice(&said) {
            Ok(Report::Prepared) => Ok(spare),
            _ => Err(failed("was prepared")(super::start::reason(&said).into())),
        }
    }

    fn make_group(&self) -> Result<SpareGroup> {
        let group = SpareGroup { cgroups: self.cgroups.clone(), name: format!("{PREFIX}{}", Id::random()) };
        self.cgroups.group(&group.name).make().map_err(|e| failed("was given its limits")(e.into()))?;
        Ok(group)
    }

    fn ready(&self) -> std::sync::MutexGuard<'_, Option<Spare>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spare {
    /// Gives the launcher's group, or a new one that it has yet to join, to the box `id`.
    pub(super) fn claim(&mut self, cgroups: &Hierarchy, id: &Id, limits: &GroupLimits) -> Result<(Group, Vec<PathBuf>)> {
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
