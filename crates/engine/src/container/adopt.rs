//! Taking charge of a box that an earlier daemon started.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dorm_sys::cgroup::Group;
use dorm_sys::process::{self, Process};
use tokio::time::Instant;

use super::start::record_of;
use super::{Container, LiveBox, Slot};
use crate::criu::manifest::Manifest;
use crate::{BoxRecord, BoxSpec, Engine as _, EngineError, Result};

/// How long a restore may go on by itself after its daemon has ended.
const RESTORED_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

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

    pub(super) async fn recover_box(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        let group = self.cgroups.group(spec.id.as_str());
        let Some(first) = restored(&group).await? else {
            return Ok(None);
        };
        let manifest = Manifest::read(image).map_err(EngineError::BadImage)?;
        let failed = || EngineError::io("cannot take charge of the restored box");
        let Ok(process) = Process::open(first) else {
            return Ok(None);
        };
        let netns = dorm_sys::namespace::open(first, "net").map_err(failed())?;
        // What was to be done once the box is back.
        self.network.apply(&spec.id, spec.slot, &spec.network).await?;
        dorm_sys::namespace::open(first, "uts")
            .and_then(|uts| dorm_sys::namespace::set_hostname(uts.as_fd(), &spec.hostname))
            .map_err(failed())?;
        let record = record_of(&process, &manifest.guest_hash).map_err(failed())?;
        let live = LiveBox::new(process, Arc::new(netns), group, spec, &record);
        self.boxes().insert(spec.id.clone(), Slot::Live(Arc::new(live)));
        let answers = tokio::time::timeout(RESTORED_WITHIN, self.connect(&spec.id)).await;
        match answers {
            Ok(Ok(_)) => Ok(Some(record)),
            Ok(Err(_)) | Err(_) => {
                self.boxes().remove(&spec.id);
                Ok(None)
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

/// Process 1 of the box in `group`, once nothing of the program that restores it is in there any more.
async fn restored(group: &Group) -> Result<Option<i32>> {
    let failed = || EngineError::io("cannot look for the restored box");
    let until = Instant::now() + RESTORED_WITHIN;
    let namespace = |pid: &str| std::fs::read_link(PathBuf::from("/proc").join(pid).join("ns/pid")).ok();
    let outside = namespace("self");
    loop {
        if !group.exists() {
            return Ok(None);
        }
        let members = group.processes().map_err(failed())?;
        let at_work = members
            .iter()
            .any(|pid| namespace(&pid.to_string()).is_none_or(|of| Some(of) == outside));
        if !at_work {
            return Ok(members.into_iter().find(|pid| is_first(*pid)));
        }
        if Instant::now() > until {
            return Ok(None);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether a process is number 1 of its pid namespace.
fn is_first(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_some_and(|numbers| numbers.split_whitespace().next_back() == Some("1"))
}
