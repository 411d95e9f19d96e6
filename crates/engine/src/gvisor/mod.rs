//! Boxes behind gVisor: a kernel in user space answers their system calls, and only it speaks to the machine's.
//!
//! `runsc` makes the sandbox out of the same home, guest, cgroup and network interface that a container has; its processes
//! are users of the box's id range. The guest listens on the sandbox's own loopback interface, and streams to it are handed in
//! over the sandbox's control socket, so that nothing depends on the box's network.
//!
//! The run directory of a box holds what its sandbox needs: its description, what its guest is told, runsc's own state with
//! the control socket, the secret of its guest, and marks of what is going on.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use self::control::Control;
use self::find::Runsc;
use crate::engines::Kind;
use crate::home::Room;
use crate::host::{Host, LiveBox, Sought};
use crate::{About, BoxRecord, BoxSpec, Dumped, EngineError, GuestStream, Id, Listening, Result, about};

pub(crate) mod bare;
mod bundle;
mod checkpoint;
mod control;
pub(crate) mod find;
mod freeze;
mod reach;
mod start;

/// How long a sandbox may take to answer on a busy host, and how slow the slowest disk is that its memory is read from or written
/// to, in bytes a second.
const PATIENCE: Duration = Duration::from_secs(60);
const SLOWEST: u64 = 16 << 20;

/// How long a sandbox may take for what it does with so many bytes of memory.
fn time_for(bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(bytes / SLOWEST)
}

/// The gVisor engine of one daemon.
#[derive(Debug)]
pub(crate) struct Gvisor {
    host: Arc<Host>,
    /// Looked for whenever it is needed, until it is found.
    runsc: Arc<Sought<Runsc>>,
    /// Of frozen boxes, whose kernel cannot be asked.
    listeners: Mutex<HashMap<Id, Vec<Listening>>>,
}

impl Gvisor {
    pub(crate) async fn open(data: &Path, host: Arc<Host>) -> Self {
        Self {
            host,
            runsc: Sought::open(data, find::find, |_| None).await,
            listeners: Mutex::default(),
        }
    }

    fn runsc(&self) -> Result<Arc<Runsc>> {
        self.runsc.get().map_err(EngineError::CannotCheckpoint)
    }

    fn control(&self, id: &Id) -> Control {
        Control::of(self.host.run_directory(id), id)
    }

    fn listeners(&self) -> std::sync::MutexGuard<'_, HashMap<Id, Vec<Listening>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Kind for Gvisor {
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        self.start_box(spec).await
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        self.restore_box(spec, image).await
    }

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        self.recover_box(spec, image).await
    }

    async fn dump(&self, live: &LiveBox, image: &Path, _: &mut Room) -> Result<Dumped> {
        self.dump_box(live, image).await
    }

    async fn connect(&self, live: &LiveBox) -> Result<Box<dyn GuestStream>> {
        let stream = self.reach_guest(live).await;
        Ok(Box::new(
            stream.map_err(EngineError::io("cannot reach the guest"))?,
        ))
    }

    async fn connect_port(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>> {
        self.reach_port(live, port).await
    }

    async fn listening(&self, live: &LiveBox) -> Result<Vec<Listening>> {
        self.ports(live).await
    }

    /// Its kernel alone takes some percent of a core, whatever the box does.
    async fn worked(&self, live: &LiveBox) -> Result<Duration> {
        let worked = self.control(&live.id).worked().await;
        worked.map_err(EngineError::io("cannot find out what the box works"))
    }

    async fn freeze(&self, live: &LiveBox) -> Result<()> {
        self.freeze_box(live).await
    }

    async fn thaw(&self, live: &LiveBox) -> Result<()> {
        self.thaw_box(live).await
    }

    async fn ask_to_end(&self, live: &LiveBox) {
        // Its kernel takes the signal once it runs, and its processes go on after that.
        let _ = live.thaw();
        let signal = rustix::process::Signal::TERM.as_raw();
        let _ = self.control(&live.id).signal(signal).await;
        let _ = self.thaw_box(live).await;
    }

    fn can_run(&self) -> Result<(), String> {
        self.runsc.get().map(drop)
    }

    fn can_checkpoint(&self) -> Result<(), String> {
        self.can_run()
    }

    fn about(&self) -> About {
        let (engine, accelerator, memory_by) = match self.runsc.get() {
            Ok(runsc) => (
                format!("gVisor, runsc {}", runsc.version),
                runsc.platform.name(),
                "checkpoints by gVisor itself".to_owned(),
            ),
            Err(reason) => (format!("none: {reason}"), "none", format!("nothing: {reason}")),
        };
        About {
            engine,
            accelerator: accelerator.to_owned(),
            slow: false,
            files_by: about::HOME.to_owned(),
            memory_by,
        }
    }
}
