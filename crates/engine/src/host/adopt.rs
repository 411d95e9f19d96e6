//! Taking charge of a box that an earlier daemon started.

use std::sync::Arc;

use dorm_sys::process::{self, Process};

use super::{Host, LiveBox, Slot};
use crate::{BoxRecord, BoxSpec, Id, Result};

impl Host {
    pub(crate) async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        match self.find(spec, record) {
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

    fn find(&self, spec: &BoxSpec, record: &BoxRecord) -> Option<LiveBox> {
        if process::host_boot_id().ok()? != record.host_boot_id {
            return None;
        }
        let process = Process::open(record.pid).ok()?;
        // Asked after the descriptor is open, so that the answer is about the same process.
        if process::start_time(record.pid).ok()? != record.pid_start {
            return None;
        }
        let group = self.cgroups.group(spec.id.as_str());
        if !group.processes().ok()?.contains(&record.pid) {
            return None;
        }
        let netns = Arc::new(dorm_sys::namespace::open(record.pid, "net").ok()?);
        Some(LiveBox::new(process, netns, group, spec, record))
    }
}
