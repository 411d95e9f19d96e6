//! Taking charge of a box that came back from disk while its daemon ended.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dorm_sys::cgroup::Group;
use dorm_sys::process::Process;
use tokio::time::Instant;

use super::Container;
use super::checkpoint::limit_again;
use crate::criu::manifest::{Manifest, Unusable};
use crate::engines::Kind as _;
use crate::host::{LiveBox, record_of};
use crate::{BoxRecord, BoxSpec, EngineError, Isolation, Result};

/// How long a restore may go on by itself after its daemon has ended.
const RESTORED_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

impl Container {
    pub(super) async fn recover_box(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        let group = self.host.cgroups.group(spec.id.as_str());
        let Some(first) = restored(&group).await? else {
            return Ok(None);
        };
        let manifest = Manifest::read(image).map_err(Unusable::into_error)?;
        let failed = || EngineError::io("cannot take charge of the restored box");
        let Ok(process) = Process::open(first) else {
            return Ok(None);
        };
        let netns = dorm_sys::namespace::open(first, "net").map_err(failed())?;
        // What was to be done once the box is back.
        self.host
            .network
            .apply(&spec.id, spec.slot, &spec.network)
            .await?;
        dorm_sys::namespace::open(first, "uts")
            .and_then(|uts| dorm_sys::namespace::set_hostname(uts.as_fd(), &spec.hostname))
            .map_err(failed())?;
        limit_again(&group, &self.host.group_limits(&spec.limits)?).await;
        let record = record_of(Isolation::Container, &process, &manifest.guest_hash).map_err(failed())?;
        let live = LiveBox::new(process, Arc::new(netns), group, spec, &record);
        let answers = tokio::time::timeout(RESTORED_WITHIN, self.connect(&live)).await;
        Ok(match answers {
            Ok(Ok(_)) => {
                self.host.remember(live);
                Some(record)
            }
            Ok(Err(_)) | Err(_) => None,
        })
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
