//! Boxes as hardened containers.
//!
//! [`Container`] keeps the boxes that run now; each is a [`LiveBox`]: a process that cannot be mistaken for another, its
//! network namespace and its cgroup. Everything else about a box can be found again from its id.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dorm_sys::cgroup::{Group, Hierarchy};
use dorm_sys::confine::SystemCallFilter;
use dorm_sys::process::Process;
use tokio::sync::watch;

use self::spare::Spares;
use crate::criu::Criu;
use crate::guest_binary::{self, GuestBinary};
use crate::home::Pool;
use crate::network::{self, Network};
use crate::{
    BoxExit, BoxRecord, BoxSpec, BoxStats, Dumped, Engine, EngineError, GuestStream, Id, Listening,
    MemoryImage, Result,
};

mod adopt;
mod checkpoint;
mod freeze;
mod spare;
mod start;
mod stop;

#[derive(Debug, Clone)]
pub struct Config {
    pub data: PathBuf,
    /// The program that runs [`crate::launch::main`] when called with [`crate::launch::SUBCOMMAND`].
    pub launcher: PathBuf,
    pub network: network::Config,
}

/// The container engine of one daemon.
#[derive(Debug)]
pub struct Container {
    pool: Pool,
    launcher: PathBuf,
    /// For files that live as long as a call.
    work: PathBuf,
    guest: GuestBinary,
    /// The program that makes memory images, or why there is none.
    criu: Result<Criu, String>,
    cgroups: Hierarchy,
    spares: Arc<Spares>,
    network: Network,
    boxes: Mutex<HashMap<Id, Slot>>,
}

/// A box that is coming up holds its place, so that no second one is started on the same home.
#[derive(Debug, Clone)]
enum Slot {
    Starting,
    Live(Arc<LiveBox>),
}

#[derive(Debug)]
struct LiveBox {
    process: Process,
    netns: Arc<OwnedFd>,
    group: Group,
    memory_limit: u64,
    uid_base: u32,
    guest_hash: String,
    /// In the home for the sake of an image, and in the way once the box goes on.
    names: Mutex<Vec<PathBuf>>,
    /// Where its volumes are mounted.
    volumes: Vec<String>,
    /// Set once somebody asked for the box's end.
    stopping: watch::Sender<bool>,
}

impl LiveBox {
    fn new(process: Process, netns: Arc<OwnedFd>, group: Group, spec: &BoxSpec, record: &BoxRecord) -> Self {
        Self {
            process,
            netns,
            group,
            memory_limit: spec.limits.memory,
            uid_base: spec.uid_base,
            guest_hash: record.guest_hash.clone(),
            names: Mutex::default(),
            volumes: spec.volumes.iter().map(|volume| volume.path.clone()).collect(),
            stopping: watch::Sender::new(false),
        }
    }
}

impl LiveBox {
    fn note_names(&self, names: Vec<PathBuf>) {
        self.names
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(names);
    }

    fn take_names(&self) -> Vec<PathBuf> {
        std::mem::take(&mut *self.names.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Container {
    pub async fn open(config: &Config, pool: Pool) -> Result<Self> {
        let instance = instance(&config.data);
        let failed = || EngineError::io("cannot prepare the container engine");
        let cgroups =
            Hierarchy::open(&format!("dorm-{instance}")).map_err(EngineError::io("cannot use cgroups"))?;
        let filter = SystemCallFilter::compile().map_err(failed())?.to_bytes();
        let work = config.data.join("tmp");
        std::fs::create_dir_all(&work).map_err(failed())?;
        let (data, launcher) = (config.data.clone(), config.launcher.clone());
        let criu = tokio::task::spawn_blocking(move || {
            let canonical = std::fs::canonicalize(&data).unwrap_or_else(|_| data.clone());
            crate::criu::orphans::wait(&[canonical.join("images"), canonical.join("tmp")]);
            crate::criu::find(&data, &launcher)
        })
        .await;
        let criu = criu.unwrap_or_else(|e| Err(e.to_string()));
        match &criu {
            Ok(criu) => tracing::debug!(version = criu.version, "memory images are made by criu"),
            Err(reason) => tracing::warn!(
                reason,
                "no memory images: boxes can stand by and stop, but not hibernate"
            ),
        }
        Ok(Self {
            launcher: config.launcher.clone(),
            work,
            criu,
            guest: guest_binary::install(&config.data)?,
            network: Network::open(&config.network, &config.data, &instance).await?,
            spares: Spares::new(config.launcher.clone(), filter, cgroups.clone()),
            cgroups,
            pool,
            boxes: Mutex::default(),
        })
    }

    /// Takes back what the engine set up on the host, unless boxes still run.
    pub async fn close(&self) {
        self.spares.close().await;
        if self.cgroups.list().is_ok_and(|boxes| boxes.is_empty()) {
            self.cgroups.remove_if_empty();
            self.network.close().await;
        }
    }

    /// The addresses of this engine's boxes.
    pub fn addresses(&self) -> network::Range {
        self.network.range()
    }

    fn live(&self, id: &Id) -> Result<Arc<LiveBox>> {
        match self.boxes().get(id) {
            Some(Slot::Live(live)) => Ok(Arc::clone(live)),
            _ => Err(EngineError::NotRunning(id.clone())),
        }
    }

    fn boxes(&self) -> std::sync::MutexGuard<'_, HashMap<Id, Slot>> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the daemons of one host apart: six hex digits of the data directory's name.
pub(crate) fn instance(data: &Path) -> String {
    let data = std::fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
    blake3::hash(data.as_os_str().as_encoded_bytes()).to_hex()[..6].to_owned()
}

/// Waits for the end of a process, and reaps it if it is a child of ours.
pub(crate) async fn ended(process: &Process) {
    let Ok(pidfd) = process.pidfd.as_fd().try_clone_to_owned() else {
        return;
    };
    if let Ok(pidfd) = dorm_sys::readiness::register(pidfd) {
        let _ = pidfd.readable().await;
    }
    process.reap();
}

#[async_trait]
impl Engine for Container {
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        self.start_box(spec).await
    }

    async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        self.adopt_box(spec, record).await
    }

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        self.recover_box(spec, image).await
    }

    async fn stop(&self, id: &Id, grace: Duration) -> Result<()> {
        self.stop_box(id, grace).await
    }

    async fn exited(&self, id: &Id) -> Result<BoxExit> {
        let live = self.live(id)?;
        ended(&live.process).await;
        if *live.stopping.borrow() {
            return std::future::pending().await;
        }
        let oom_kills = live.group.stats().map(|s| s.oom_kills).unwrap_or_default();
        let reason = match oom_kills {
            0 => "process 1 of the box ended".to_owned(),
            _ => format!(
                "process 1 of the box ended; the box was out of memory (limit {} MiB)",
                live.memory_limit >> 20
            ),
        };
        Ok(BoxExit { reason })
    }

    async fn connect(&self, id: &Id) -> Result<Box<dyn GuestStream>> {
        let live = self.live(id)?;
        let failed = || EngineError::io("cannot reach the guest");
        let inside = self.network.inside();
        let stream = inside
            .connect(Arc::clone(&live.netns), dorm_proto::boot::GUEST_SOCKET)
            .await
            .map_err(failed())?;
        Ok(Box::new(
            tokio::net::UnixStream::from_std(stream).map_err(failed())?,
        ))
    }

    async fn connect_port(&self, id: &Id, port: u16) -> Result<Box<dyn GuestStream>> {
        let live = self.live(id)?;
        let stream = self.network.inside().connect_port(&live.netns, port).await;
        match stream {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                Err(EngineError::PortClosed { id: id.clone(), port })
            }
            Err(error) => Err(EngineError::io("cannot reach a port of the box")(error)),
        }
    }

    async fn listening(&self, id: &Id) -> Result<Vec<Listening>> {
        let live = self.live(id)?;
        let found = network::listening(live.process.pid);
        // Otherwise the number may be another process's by now.
        if live.process.has_ended() {
            return Err(EngineError::NotRunning(id.clone()));
        }
        found.map_err(EngineError::io("cannot read the ports of the box"))
    }

    async fn stats(&self, id: &Id) -> Result<BoxStats> {
        let stats = self
            .live(id)?
            .group
            .stats()
            .map_err(EngineError::io("cannot measure the box"))?;
        Ok(BoxStats {
            cpu_usec: stats.cpu_usec,
            memory_bytes: stats.memory,
            memory_peak_bytes: stats.memory_peak,
            pids: stats.pids,
            oom_kills: stats.oom_kills,
            forks_refused: stats.forks_refused,
        })
    }

    async fn sweep(&self, id: &Id) -> Result<()> {
        self.boxes().remove(id);
        self.remove_remains(id).await
    }

    async fn freeze(&self, id: &Id) -> Result<()> {
        self.freeze_box(id).await
    }

    async fn thaw(&self, id: &Id) -> Result<()> {
        self.thaw_box(id)
    }

    async fn checkpoint(&self, id: &Id, image: &Path) -> Result<MemoryImage> {
        self.dump_box(id, image).await?.seal().await
    }

    async fn dump(&self, id: &Id, image: &Path) -> Result<Dumped> {
        self.dump_box(id, image).await
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        self.restore_box(spec, image).await
    }

    async fn set_network(&self, spec: &BoxSpec) -> Result<()> {
        self.live(&spec.id)?;
        self.network.apply(&spec.id, spec.slot, &spec.network).await
    }

    fn is_untouched(&self, image: &Path) -> bool {
        checkpoint::Still::is_marked(image)
    }

    fn can_checkpoint(&self) -> Result<(), String> {
        self.usable_criu().map(|_| ())
    }

    async fn present(&self) -> Result<Vec<Id>> {
        let names = self
            .cgroups
            .list()
            .map_err(EngineError::io("cannot list the boxes"))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }
}
