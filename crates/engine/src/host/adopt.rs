//! Taking charge of a box that an earlier daemon started.

use std::io;
use std::sync::Arc;

use dorm_sys::process::{self, Process};
use rustix::io::Errno;

use super::{Host, LiveBox, Slot};
use crate::{BoxRecord, BoxSpec, EngineError, Id, Result};

impl Host {
    pub(crate) async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        match self
            .find(spec, record)
            .map_err(EngineError::io("cannot look for the box"))?
        {
            Some(live) => {
                self.network.apply(&spec.id, spec.slot, &spec.network).await?;
                self.remember(live);
                Ok(true)
            }
            None => {
                self.remove_remains(&spec.id).await?;
                Ok(false)
            }
        }
    }

    /// Takes charge of a box that is there already.
    pub(crate) fn remember(&self, live: LiveBox) {
        self.boxes().insert(live.id.clone(), Slot::Live(Arc::new(live)));
    }

    /// No box is on the home of `id` any more.
    pub(crate) fn forget(&self, id: &Id) {
        self.boxes().remove(id);
    }

    /// None if it is gone, or another.
    fn find(&self, spec: &BoxSpec, record: &BoxRecord) -> io::Result<Option<LiveBox>> {
        if process::host_boot_id()? != record.host_boot_id {
            return Ok(None);
        }
        let process = match Process::open(record.pid) {
            // The number is a thread's by now.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => None,
            opened => if_there(opened)?,
        };
        let Some(process) = process else {
            return Ok(None);
        };
        // Asked after the descriptor is open, so that the answer is about the same process.
        if if_there(process::start_time(record.pid))? != Some(record.pid_start) {
            return Ok(None);
        }
        let group = self.cgroups.group(spec.id.as_str());
        if !if_there(group.processes())?.is_some_and(|members| members.contains(&record.pid)) {
            return Ok(None);
        }
        let netns = if_there(dorm_sys::namespace::open(record.pid, "net"))?;
        Ok(netns.map(|netns| LiveBox::new(process, Arc::new(netns), group, spec, record)))
    }
}

/// Whoever cannot look, for want of descriptors for instance, has not seen that there is nothing.
fn if_there<T>(looked: io::Result<T>) -> io::Result<Option<T>> {
    match looked {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}
