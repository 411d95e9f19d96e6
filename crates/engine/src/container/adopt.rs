//! Taking charge of a box that an earlier daemon started.

use std::sync::Arc;

use dorm_sys::process::{self, Process};

use super::{Container, LiveBox, Slot};
use crate::{BoxRecord, BoxSpec, Result};

impl Container {
    pub(super) async fn adopt_box(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        match self.find(spec, record) {
            Some(live) => {
                self.network.apply(&spec.id, spec.slot, &spec.network).await?;
                self.boxes().insert(spec.id.clone(), Slot::Live(Arc::new(live)));
                Ok(true)
            }
            None => {
                self.remove_remains(&spec.id).await?;
                Ok(false)
            }
        }
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
