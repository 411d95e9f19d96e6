//! What the boxes of all engines have in common: a process that cannot be mistaken for another, a cgroup, a network
//! namespace with an interface pair, and a home.
//!
//! [`Host`] keeps the boxes that run now. Everything else about a box can be found again from its id.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use dorm_sys::cgroup::{Group, GroupLimits, Hierarchy};
use dorm_sys::process::{self, Process};
use rustix::process::WaitIdStatus;
use tokio::sync::watch;

use crate::criu::manifest::Manifest;
use crate::guest_binary::{self, GuestBinary};
use crate::home::Pool;
use crate::launch;
use crate::network::{self, Network};
use crate::{BoxExit, BoxRecord, BoxSpec, BoxStats, EngineError, Id, Isolation, Limits, Result, VolumeMount};

mod adopt;
mod counters;
mod freeze;
pub(crate) mod image;
pub(crate) mod large_pages;
mod occupy;
mod sought;
mod stop;
pub(crate) mod trial;

pub(crate) use sought::Sought;

/// Where directories of boxes are made, in one for each daemon.
const RUN: &str = "/run";
/// How often a process is looked at whose end the kernel cannot be asked to tell.
const LOOKS_APART: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub struct Config {
    pub data: PathBuf,
    /// The program that runs [`crate::launch::main`] when called with [`crate::launch::SUBCOMMAND`].
    pub launcher: PathBuf,
    pub network: network::Config,
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) pool: Pool,
    pub(crate) launcher: PathBuf,
    /// For files that live as long as a call.
    pub(crate) work: PathBuf,
    /// Holds a directory for each box that needs one while it runs.
    run: PathBuf,
    pub(crate) guest: GuestBinary,
    pub(crate) cgroups: Hierarchy,
    pub(crate) network: Network,
    boxes: Mutex<HashMap<Id, Slot>>,
}

/// A box that is coming up holds its place, so that no second one is started on the same home.
#[derive(Debug, Clone)]
enum Slot {
    Starting,
    Live(Arc<LiveBox>),
}

#[derive(Debug)]
pub(crate) struct LiveBox {
    pub(crate) id: Id,
    pub(crate) isolation: Isolation,
    /// Process 1 of a container; of other boxes the process that runs them.
    pub(crate) process: Process,
    pub(crate) netns: Arc<OwnedFd>,
    pub(crate) group: Group,
    memory_limit: u64,
    pub(crate) uid_base: u32,
    pub(crate) guest_hash: String,
    /// In the home for the sake of an image, and in the way once the box goes on.
    names: Mutex<Arc<Vec<PathBuf>>>,
    pub(crate) volumes: Vec<VolumeMount>,
    /// Set once somebody asked for the box's end.
    stopping: watch::Sender<bool>,
}

impl LiveBox {
    pub(crate) fn new(
        process: Process,
        netns: Arc<OwnedFd>,
        group: Group,
        spec: &BoxSpec,
        record: &BoxRecord,
    ) -> Self {
        Self {
            id: spec.id.clone(),
            isolation: spec.isolation,
            process,
            netns,
            group,
            memory_limit: spec.limits.memory,
            uid_base: spec.uid_base,
            guest_hash: record.guest_hash.clone(),
            names: Mutex::default(),
            volumes: spec.volumes.clone(),
            stopping: watch::Sender::new(false),
        }
    }

    /// Gives them for as long as nobody has taken them.
    pub(crate) fn note_names(&self, names: Vec<PathBuf>) -> Weak<Vec<PathBuf>> {
        let names = Arc::new(names);
        let noted = Arc::downgrade(&names);
        *self.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
        noted
    }

    pub(crate) fn stats(&self) -> Result<BoxStats> {
        let stats = self.group.stats();
        let stats = stats.map_err(EngineError::io("cannot measure the box"))?;
        Ok(BoxStats {
            cpu_usec: stats.cpu_usec,
            memory_bytes: stats.memory,
            memory_peak_bytes: stats.memory_peak,
            pids: stats.pids,
            oom_kills: stats.oom_kills,
            forks_refused: stats.forks_refused,
        })
    }

    pub(crate) fn memory_in_no_file(&self) -> Result<u64> {
        let memory = self.group.memory_in_no_file();
        memory.map_err(EngineError::io("cannot measure the box's memory"))
    }

    pub(crate) fn take_names(&self) -> Arc<Vec<PathBuf>> {
        std::mem::take(&mut *self.names.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Host {
    pub(crate) async fn open(config: &Config, pool: Pool) -> Result<Self> {
        let instance = instance(&config.data);
        let cgroups =
            Hierarchy::open(&format!("dorm-{instance}")).map_err(EngineError::io("cannot use cgroups"))?;
        counters::raise();
        large_pages::LargePages::recover();
        let work = config.data.join("tmp");
        let failed = || EngineError::io("cannot prepare the engines");
        std::fs::create_dir_all(&work).map_err(failed())?;
        let run = Path::new(RUN).join(format!("dorm-{instance}"));
        make_passable(&run).map_err(failed())?;
        Ok(Self {
            launcher: config.launcher.clone(),
            work,
            run,
            guest: guest_binary::install(&config.data)?,
            network: Network::open(&config.network, &config.data, &instance).await?,
            cgroups,
            pool,
            boxes: Mutex::default(),
        })
    }

    /// Takes back what was set up, unless boxes still run.
    pub(crate) async fn close(&self) {
        let _ = std::fs::remove_dir(&self.run);
        if self.cgroups.list().is_ok_and(|boxes| boxes.is_empty()) {
            self.cgroups.remove_if_empty();
            self.network.close().await;
        }
    }

    pub(crate) fn live(&self, id: &Id) -> Result<Arc<LiveBox>> {
        match self.boxes().get(id) {
            Some(Slot::Live(live)) => Ok(Arc::clone(live)),
            _ => Err(EngineError::NotRunning(id.clone())),
        }
    }

    /// For what the box of `id` needs on this machine while it runs, such as sockets, whose paths must be short. Is removed
    /// with the box, by [`Host::remove_remains`]; what a crash of the machine left in it goes when the box is started next.
    pub(crate) fn run_directory(&self, id: &Id) -> PathBuf {
        self.run.join(id.as_str())
    }

    /// Makes that directory. Users of the box get through it, and see nothing.
    pub(crate) fn make_run_directory(&self, id: &Id) -> std::io::Result<PathBuf> {
        let directory = self.run_directory(id);
        make_passable(&directory)?;
        Ok(directory)
    }

    /// The guest that is in a memory image for the box of `spec`.
    pub(crate) fn guest_in(&self, image: &Manifest, spec: &BoxSpec) -> Result<PathBuf> {
        let guest = self.guest.path.with_file_name(&image.guest_hash);
        let is_here = guest.try_exists();
        if !is_here.map_err(EngineError::io("cannot look for the guest of the memory image"))? {
            return Err(EngineError::BadImage(format!(
                "its guest {} is no longer here",
                image.guest_hash
            )));
        }
        if image.uid_base != spec.uid_base {
            return Err(EngineError::BadImage(format!(
                "it was made for ids from {} on",
                image.uid_base
            )));
        }
        Ok(guest)
    }

    fn boxes(&self) -> std::sync::MutexGuard<'_, HashMap<Id, Slot>> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn group_limits(&self, limits: &Limits) -> Result<GroupLimits> {
        let io = match limits.io_bps {
            Some(bps) => Some((self.pool.device()?, bps)),
            None => None,
        };
        Ok(GroupLimits {
            cpu_millis: limits.cpu_millis,
            memory: limits.memory,
            pids: limits.pids,
            io,
        })
    }

    pub(crate) fn volumes(&self, mounts: &[VolumeMount]) -> Result<Vec<launch::Volume>> {
        let volume = |mount: &VolumeMount| {
            let source = self.pool.volume_path(&mount.volume);
            if !source.exists() {
                return Err(EngineError::NoVolume(mount.volume.clone()));
            }
            let at = mount.path.clone();
            Ok(launch::Volume { source, at })
        };
        mounts.iter().map(volume).collect()
    }

    pub(crate) async fn exited(&self, id: &Id) -> Result<BoxExit> {
        let live = self.live(id)?;
        let status = ended(&live.process).await;
        if *live.stopping.borrow() {
            return std::future::pending().await;
        }
        let oom_kills = live.group.stats().map(|s| s.oom_kills).unwrap_or_default();
        let what = end_of(live.isolation, status.as_ref());
        let reason = match oom_kills {
            0 => what,
            _ => format!(
                "{what}; the box was out of memory (limit {} MiB)",
                live.memory_limit >> 20
            ),
        };
        Ok(BoxExit { reason })
    }

    /// Ids of which there is a cgroup.
    pub(crate) fn present(&self) -> Result<Vec<Id>> {
        let names = self
            .cgroups
            .list()
            .map_err(EngineError::io("cannot list the boxes"))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The error of a box that did not come up while it `step`.
pub(crate) fn failed(step: &str) -> impl FnOnce(Cause) -> EngineError {
    move |source| EngineError::Start {
        step: step.to_owned(),
        source,
    }
}

/// The network namespace of a box's process 1.
pub(crate) fn netns_of(process: &Process) -> std::io::Result<Arc<OwnedFd>> {
    dorm_sys::namespace::open(process.pid, "net").map(Arc::new)
}

/// What another daemon needs to know this box again.
pub(crate) fn record_of(
    isolation: Isolation,
    process: &Process,
    guest_hash: &str,
) -> std::io::Result<BoxRecord> {
    Ok(BoxRecord {
        pid: process.pid,
        pid_start: process::start_time(process.pid)?,
        host_boot_id: process::host_boot_id()?,
        guest_hash: guest_hash.to_owned(),
        engine: isolation.to_string(),
    })
}

fn make_passable(directory: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new()
        .mode(0o711)
        .recursive(true)
        .create(directory)
}

/// Tells the daemons of one host apart: six hex digits of the data directory's name.
pub(crate) fn instance(data: &Path) -> String {
    let data = std::fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
    blake3::hash(data.as_os_str().as_encoded_bytes()).to_hex()[..6].to_owned()
}

/// So many random bytes as text, two hexadecimal digits for each.
pub(crate) fn random_hex<const BYTES: usize>() -> String {
    let mut bytes = [0u8; BYTES];
    getrandom::fill(&mut bytes).expect("the kernel's random source answers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Waits for the end of a process, and reaps it if it is a child of ours: whoever is the first to do so learns how it ended.
pub(crate) async fn ended(process: &Process) -> Option<WaitIdStatus> {
    ending(process).await;
    process.reap()
}

/// Waits for the end of a process, and leaves it to others to learn how it ended.
pub(crate) async fn ending(process: &Process) {
    let pidfd = process.pidfd.as_fd().try_clone_to_owned();
    if let Ok(pidfd) = pidfd.and_then(dorm_sys::readiness::register) {
        let _ = pidfd.readable().await;
        return;
    }
    // Whoever is short of descriptors has not seen it end.
    while !process.has_ended() {
        tokio::time::sleep(LOOKS_APART).await;
    }
}

/// What ended when the box's process did, in words.
fn end_of(isolation: Isolation, status: Option<&WaitIdStatus>) -> String {
    let what = match isolation {
        Isolation::Vm => "the virtual machine of the box ended",
        Isolation::Container | Isolation::Gvisor => return "process 1 of the box ended".to_owned(),
    };
    let killed = status.and_then(WaitIdStatus::terminating_signal);
    match (killed, status.and_then(WaitIdStatus::exit_status)) {
        (Some(signal), _) => format!("{what}: QEMU was killed by signal {signal}"),
        (_, Some(0)) => format!("{what}: it was turned off from inside, or its kernel failed"),
        (_, Some(code)) => format!("{what}: QEMU left with exit code {code}"),
        // It was the child of an earlier daemon.
        (None, None) => what.to_owned(),
    }
}
