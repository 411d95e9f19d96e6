//! Boxes as virtual machines: the box has a kernel of its own, run by a QEMU that is itself confined.
//!
//! ```text
//!  Vm ──▶ launch::machine (jail) ──▶ QEMU ──▶ kernel, guest (process 1)
//!   ├──▶ monitor: QMP on a socket in QEMU's network namespace      │
//!   ├──▶ link: streams on the machine's serial port ───────────────┤
//!   └──▶ volumes: a file server (jail) on another serial port ─────┘
//! ```
//!
//! The home of a machine holds two files, its disk and its memory, which QEMU maps. So a snapshot of the home has both at one
//! instant, and a memory image is the state of the devices alone: saving copies no memory, and waking reads none.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dorm_sys::confine::SystemCallFilter;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;

use self::accelerator::Accelerator;
use self::link::Link;
use self::monitor::Monitor;
use self::qemu::Qemu;
use self::start::no_engine;
use crate::engines::Kind;
use crate::home::Room;
use crate::host::{Host, LiveBox, Sought};
use crate::{
    About, BoxRecord, BoxSpec, Dumped, EngineError, GuestStream, Id, Listening, Result, about, chain,
    guest_binary,
};

mod accelerator;
pub(crate) mod bare;
mod checkpoint;
mod command;
mod convert;
mod cpio;
mod frames;
mod link;
mod monitor;
mod qemu;
mod reach;
mod start;
mod state;
mod volumes;

/// The engine of machines of one daemon.
#[derive(Debug)]
pub(crate) struct Vm {
    host: Arc<Host>,
    data: PathBuf,
    /// Looked for whenever it is needed, until it is found.
    qemu: Arc<Sought<Qemu>>,
    /// Of QEMU's system calls.
    filter: Vec<u8>,
    talks: Mutex<HashMap<Id, Arc<Talk>>>,
    files: volumes::Servers,
    /// One machine for each processor boots at a time: of many at once none would be up in time.
    booting: Semaphore,
}

/// How many connections to ports may wait for an answer at once. Of streams that the guest has said nothing on there can be 256, and a
/// program that accepts nothing must not take all of them.
const CONNECTING: usize = 128;

/// What is known of the guest of a machine, beside what the host keeps.
#[derive(Debug)]
struct Talk {
    /// Of the process that runs the machine.
    pid: i32,
    link: tokio::sync::Mutex<Option<Arc<Link>>>,
    /// The ports that were listened on when the machine was stopped.
    listening: Mutex<Vec<Listening>>,
    connecting: Semaphore,
}

impl Talk {
    fn with(pid: i32) -> Self {
        Self {
            pid,
            link: tokio::sync::Mutex::default(),
            listening: Mutex::default(),
            connecting: Semaphore::new(CONNECTING),
        }
    }

    fn is_over(&self) -> bool {
        let link = self.link.try_lock();
        link.is_ok_and(|link| link.as_ref().is_some_and(|link| link.is_over()))
    }
}

impl Vm {
    pub(crate) async fn open(data: &Path, host: Arc<Host>) -> Result<Self> {
        let filter = SystemCallFilter::compile().map_err(EngineError::io("cannot prepare machines"))?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            host,
            data: data.to_owned(),
            qemu: Sought::open(data, Qemu::find, Qemu::doubted).await,
            filter: filter.to_bytes(),
            talks: Mutex::default(),
            files: volumes::Servers::new()?,
            booting: Semaphore::new(processors),
        })
    }

    fn talk(&self, live: &LiveBox) -> Arc<Talk> {
        let mut talks = self.talks.lock().unwrap_or_else(PoisonError::into_inner);
        let of_now = |talk: &&Arc<Talk>| talk.pid == live.process.pid;
        if let Some(talk) = talks.get(&live.id).filter(of_now) {
            return Arc::clone(talk);
        }
        // A good time to forget those of boxes that are gone.
        talks.retain(|_, talk| !talk.is_over());
        let talk = Arc::new(Talk::with(live.process.pid));
        talks.insert(live.id.clone(), Arc::clone(&talk));
        talk
    }

    /// See [`Qemu::boots`].
    pub(crate) async fn boots(&self) -> Result<()> {
        let (qemu, data) = (self.usable_qemu()?, self.data.clone());
        let guest = self.host.guest.clone();
        let seen = tokio::task::spawn_blocking(move || qemu.boots(&data, &guest)).await;
        let seen = seen.unwrap_or_else(|error| Err(error.to_string()));
        seen.map_err(no_engine)
    }

    /// See [`Qemu::is_quick`].
    pub(crate) fn is_quick(&self) -> bool {
        self.qemu.get().is_ok_and(|qemu| qemu.is_quick())
    }

    async fn monitor(&self, live: &LiveBox) -> Result<Monitor> {
        let failed = || EngineError::io("cannot reach QEMU");
        let stream = self
            .socket(live, command::MONITOR_SOCKET)
            .await
            .map_err(failed())?;
        Monitor::open(stream).await.map_err(failed())
    }

    async fn socket(&self, live: &LiveBox, name: &'static str) -> std::io::Result<UnixStream> {
        let inside = self.host.network.inside();
        let stream = inside.connect(Arc::clone(&live.netns), name).await?;
        UnixStream::from_std(stream)
    }
}

#[async_trait]
impl Kind for Vm {
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        self.host.occupy(spec, self.start_machine(spec)).await
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        self.host.occupy(spec, self.restore_machine(spec, image)).await
    }

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        self.recover_machine(spec, image).await
    }

    async fn image_size(&self, _: &LiveBox) -> Result<u64> {
        Ok(checkpoint::STATE_SIZE)
    }

    async fn dump(&self, live: &LiveBox, image: &Path, _: &mut Room) -> Result<Dumped> {
        self.dump_machine(live, image).await
    }

    async fn connect(&self, live: &LiveBox) -> Result<Box<dyn GuestStream>> {
        self.connect_guest(live).await
    }

    async fn connect_port(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>> {
        self.connect_to(live, port).await
    }

    async fn listening(&self, live: &LiveBox) -> Result<Vec<Listening>> {
        self.ports(live).await
    }

    async fn freeze(&self, live: &LiveBox) -> Result<()> {
        self.freeze_machine(live).await
    }

    async fn thaw(&self, live: &LiveBox) -> Result<()> {
        self.thaw_machine(live).await
    }

    async fn ask_to_end(&self, live: &LiveBox) {
        if let Err(error) = self.turn_off(live).await {
            tracing::debug!(id = %live.id, error = %crate::chain(&error), "the machine cannot be asked to end");
        }
    }

    /// What was written in it may be in its memory alone, and goes to its disk at last.
    fn farewell(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn adopted(&self, live: &LiveBox) {
        self.serve_volumes(live);
    }

    fn can_run(&self) -> Result<(), String> {
        self.qemu.get().map(drop)
    }

    fn can_checkpoint(&self) -> Result<(), String> {
        self.can_run()
    }

    fn about(&self) -> About {
        let (engine, accelerator) = match self.qemu.get() {
            Ok(qemu) => (qemu.name(), Some(qemu.accelerator())),
            Err(reason) => (format!("none: {reason}"), None),
        };
        About {
            engine,
            accelerator: accelerator.map_or("none", Accelerator::describe).to_owned(),
            slow: accelerator == Some(Accelerator::Tcg),
            files_by: format!("a disk in {}", about::HOME),
            memory_by: "a file beside the disk, and the state of the devices by QEMU".to_owned(),
        }
    }
}

/// What this host has for machines, or what is missing, in words.
pub(crate) fn look(data: &Path) -> Result<String, String> {
    let qemu = Qemu::find(data)?;
    // Whoever only looks may not be the one to install anything.
    let passing = tempfile::tempdir().map_err(|error| error.to_string())?;
    let guest = guest_binary::install(passing.path()).map_err(|error| chain(&error))?;
    qemu.boots(data, &guest)?;
    Ok(qemu.describe())
}
