//! What an engine without machines knows of its boxes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use tokio::sync::watch;

use crate::{BoxExit, BoxRecord, BoxSpec, EngineError, Id, Isolation, Result};

#[derive(Default)]
pub(super) struct World {
    pub(super) boxes: BTreeMap<Id, FakeBox>,
    pub(super) fail_starts: Vec<EngineError>,
    pub(super) fail_stops: Vec<String>,
    pub(super) fail_freezes: Vec<String>,
    pub(super) fail_thaws: Vec<String>,
    pub(super) fail_checkpoints: Vec<EngineError>,
    pub(super) hidden: bool,
    pub(super) fail_restores: Vec<EngineError>,
    pub(super) fail_conversions: Vec<EngineError>,
    pub(super) refuse_conversion: Option<EngineError>,
    pub(super) conversions: Vec<Isolation>,
    /// What homes were converted for.
    pub(super) forms: BTreeMap<Id, Isolation>,
    pub(super) left_out: Vec<String>,
    /// Images that left nothing in their homes, and the forms that those had then.
    pub(super) released: Vec<(PathBuf, Isolation)>,
    pub(super) cannot_checkpoint: Option<String>,
    pub(super) starts: u64,
    pub(super) stops: u64,
    pub(super) freezes: u64,
    pub(super) thaws: u64,
    pub(super) checkpoints: u64,
    pub(super) restores: u64,
    pub(super) connects: u64,
    pub(super) swept: Vec<Id>,
    pub(super) specs: Vec<BoxSpec>,
    pub(super) ports: BTreeSet<u16>,
}

impl World {
    pub(super) fn add(&mut self, spec: &BoxSpec, memory: String) -> BoxRecord {
        let number = self.starts + self.restores;
        let record = BoxRecord {
            pid: i32::try_from(1000 + number).unwrap_or(i32::MAX),
            pid_start: number,
            host_boot_id: "fake".to_owned(),
            guest_hash: "fake".to_owned(),
            engine: "fake".to_owned(),
        };
        let one = FakeBox {
            record: record.clone(),
            ended: watch::Sender::new(None),
            stopping: false,
            frozen: watch::Sender::new(false),
            memory,
            cpu_usec: 1_500_000,
        };
        self.boxes.insert(spec.id.clone(), one);
        record
    }

    /// Whether the home has the form for it; a new one is as a template is.
    pub(super) fn has_its_form(&self, spec: &BoxSpec) -> bool {
        *self.forms.get(&spec.id).unwrap_or(&Isolation::Container) == spec.isolation
    }

    pub(super) fn living(&mut self, id: &Id) -> Result<&mut FakeBox> {
        self.boxes
            .get_mut(id)
            .filter(|one| one.ended.borrow().is_none())
            .ok_or_else(|| EngineError::NotRunning(id.clone()))
    }
}

pub(super) struct FakeBox {
    pub(super) record: BoxRecord,
    /// `None` while it runs.
    pub(super) ended: watch::Sender<Option<BoxExit>>,
    /// Whether `stop` was called: then its end is no news.
    pub(super) stopping: bool,
    pub(super) frozen: watch::Sender<bool>,
    /// What its processes hold only in memory.
    pub(super) memory: String,
    pub(super) cpu_usec: u64,
}
