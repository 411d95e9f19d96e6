//! Runs boxes and keeps their homes. Knows no HTTP and no database.
//!
//! A [`Homes`] pool holds root filesystems as btrfs subvolumes; an [`Engine`] runs one box on one
//! home. The server talks to both through the traits in this file, so that the lifecycle can be
//! tested against [`fake`] parts with declared faults.
//!
//! ```text
//!   server::lifecycle ──Engine──▶ engines ─▶ container, gvisor, vm ─▶ host ─▶ sys (namespaces, cgroups, netlink)
//!                    └──Homes───▶ home::Pool ─────────────────────────────▶ sys (btrfs ioctls, loop devices)
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

pub use dorm_proto::boot::{BootConfig, Command};

mod about;
mod container;
pub mod criu;
pub mod doctor;
pub mod engines;
pub mod fake;
pub mod guest_binary;
mod gvisor;
pub mod home;
pub mod host;
pub mod launch;
pub mod network;
mod packet;
pub mod reserve;
mod vm;
mod volumes;

pub use about::About;
pub use gvisor::bare::BareRunsc;
pub use vm::bare::BareQemu;

/// A part of a file that holds one tar archive.
#[derive(Debug)]
pub struct Layer {
    pub file: std::fs::File,
    pub offset: u64,
    pub length: u64,
}

/// An error with all its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Names an agent, a template, or anything else that owns a home. Twenty lowercase letters and
/// digits, so that it is a DNS label, a file name and an E2B sandbox id at the same time.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Id(Box<str>);

impl Id {
    pub const LEN: usize = 20;

    pub fn random() -> Self {
        const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
        let mut bytes = [0u8; Self::LEN];
        getrandom::fill(&mut bytes).expect("the kernel's random source answers");
        Self(
            bytes
                .iter()
                .map(|b| ALPHABET[usize::from(b % 32)] as char)
                .collect(),
        )
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Id {
    type Err = InvalidId;

    fn from_str(s: &str) -> Result<Self, InvalidId> {
        let fits = s.len() == Self::LEN && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if fits { Ok(Self(s.into())) } else { Err(InvalidId) }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("an id is {} lowercase letters and digits", Id::LEN)]
pub struct InvalidId;

impl TryFrom<String> for Id {
    type Error = InvalidId;
    fn try_from(s: String) -> Result<Self, InvalidId> {
        s.parse()
    }
}

impl From<Id> for String {
    fn from(id: Id) -> String {
        id.0.into()
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What stands between a box and the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Namespaces and a system call filter on the machine's own kernel.
    #[default]
    Container,
    /// A kernel in user space, which answers the box's system calls.
    Gvisor,
    /// A virtual machine with a kernel of its own.
    Vm,
}

impl Isolation {
    pub const ALL: [Self; 3] = [Self::Container, Self::Gvisor, Self::Vm];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Gvisor => "gvisor",
            Self::Vm => "vm",
        }
    }
}

impl FromStr for Isolation {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|isolation| isolation.as_str() == text);
        found.ok_or_else(|| format!("`{text}` is no isolation"))
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a box may use. Enforced by cgroups, except `disk`, which is a btrfs quota on the home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Thousandths of a core.
    pub cpu_millis: u32,
    /// Bytes of memory, the box's tmpfs files included.
    pub memory: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Bytes the home may hold beyond its template.
    pub disk: u64,
    /// Bytes a second read from, and written to, the pool's device. `None` is unlimited.
    pub io_bps: Option<u64>,
}

/// Everything an engine must know to bring up a box on an existing home.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BoxSpec {
    pub id: Id,
    pub isolation: Isolation,
    pub hostname: String,
    /// Decides the box's address and interface name. Unique among the boxes of this machine.
    pub slot: u32,
    /// First of the 65,536 host uids that the box's users are mapped to.
    pub uid_base: u32,
    pub limits: Limits,
    pub boot: BootConfig,
    #[serde(default)]
    pub network: network::Policy,
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
}

/// A volume, and where in the box it is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    pub volume: Id,
    pub path: String,
}

/// What the engine wants remembered about a box, so that another daemon process can adopt it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxRecord {
    pub pid: i32,
    /// Start time of `pid` in clock ticks since the host's boot: tells a reused pid from ours.
    pub pid_start: u64,
    pub host_boot_id: String,
    pub guest_hash: String,
    pub engine: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BoxStats {
    pub cpu_usec: u64,
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    pub pids: u64,
    /// Processes killed because the box was out of memory, since it was started.
    pub oom_kills: u64,
    /// Forks refused because the box was at its process limit, since it was started.
    pub forks_refused: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeUsage {
    /// Bytes that only this home holds.
    pub used: u64,
    pub limit: u64,
}

/// What is known of a memory image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryImage {
    /// Bytes on disk.
    pub size: u64,
    pub guest_hash: String,
}

/// A memory image that is written, but neither whole nor on disk. Dropped, nothing is left of it.
pub struct Dumped(Pin<Box<dyn Future<Output = Result<MemoryImage>> + Send>>);

impl Dumped {
    pub fn new(seal: impl Future<Output = Result<MemoryImage>> + Send + 'static) -> Self {
        Self(Box::pin(seal))
    }

    /// Returns when the image is whole and on disk, under its name.
    pub async fn seal(self) -> Result<MemoryImage> {
        self.0.await
    }
}

/// How a box came to its end without being asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxExit {
    /// In words: `process 1 was killed: out of memory (limit 512 MiB)`.
    pub reason: String,
}

/// A port of a box that a process of the box listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Listening {
    pub port: u16,
    pub address: std::net::IpAddr,
}

/// A byte stream into a box.
pub trait GuestStream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> GuestStream for T {}

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("no box of {0} is running here")]
    NotRunning(Id),
    #[error("a box of {0} is running already")]
    AlreadyRunning(Id),
    /// No box can be isolated in this way here.
    #[error("{isolation} boxes cannot be run here: {reason}")]
    NoEngine { isolation: Isolation, reason: String },
    #[error("there is no home of {0} on this machine")]
    NoHome(Id),
    #[error("the home of {0} has the form of another isolation")]
    OtherForm(Id),
    #[error("there is no volume {0} on this machine")]
    NoVolume(Id),
    #[error("no space is left on the disk ({free} bytes free)")]
    NoSpace { free: u64 },
    #[error("it takes {needed} bytes of room, and {free} are free")]
    TooLittleSpace { needed: u64, free: u64 },
    #[error(
        "it takes {needed} bytes of room, and {free} are free beside what the pool's file may still take"
    )]
    NoRoomBesidePool { needed: u64, free: u64 },
    #[error("nothing listens on port {port} of {id}")]
    PortClosed { id: Id, port: u16 },
    #[error("the layer cannot be unpacked: {0}")]
    BadLayer(String),
    /// A machine's disk was too slow; only together with its memory is it whole.
    #[error("the machine's disk has not taken all that was written yet")]
    Unwritten,
    /// The box could not be brought up; what was made of it is removed again.
    #[error("the box did not come up while it {step}")]
    Start {
        step: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The box holds something that cannot be put into a memory image; it goes on as it was.
    #[error("the memory cannot be saved: {0}")]
    CannotCheckpoint(String),
    /// The memory image is damaged, or of another kind of machine. Files are not affected.
    #[error("the memory image cannot be used: {0}")]
    BadImage(String),
    #[error("{doing}")]
    Io {
        doing: String,
        #[source]
        source: std::io::Error,
    },
}

impl EngineError {
    pub fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    /// Whether a disk, or the quota of an agent, is full.
    pub fn is_no_space(&self) -> bool {
        is_no_space(self)
    }
}

/// Whether `error`, or one of its causes, tells of a disk or a quota that is full.
pub fn is_no_space(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind;
    let mut cause = Some(error);
    while let Some(error) = cause {
        let full = match (error.downcast_ref(), error.downcast_ref::<std::io::Error>()) {
            (
                Some(
                    EngineError::NoSpace { .. }
                    | EngineError::TooLittleSpace { .. }
                    | EngineError::NoRoomBesidePool { .. },
                ),
                _,
            ) => true,
            (_, Some(error)) => matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded),
            _ => false,
        };
        if full {
            return true;
        }
        cause = error.source();
    }
    false
}

pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Runs boxes. Every method may be called for any id at any time; an engine refuses what does not
/// fit, and never leaves half a box behind.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// Brings up a box on the home of `spec.id`, which has the form for it, and returns when its guest answers.
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord>;

    /// Gives the home of `spec.id` the form that boxes of `spec.isolation` run on, with all its files, if it has another. No box may run on
    /// it. A crash leaves either form, whole, and so does an [`Engine::sweep`], which ends it early where the files come out of a machine. Gives
    /// what had to be left out, in words.
    async fn convert(&self, spec: &BoxSpec) -> Result<Vec<String>>;

    /// Whether there is an engine that works, and room, for [`Engine::convert`], as far as that can be told while a box runs on the home.
    async fn can_convert(&self, spec: &BoxSpec) -> Result<()>;

    /// Removes what there is of a memory in the home of `id`, on which no box runs: nobody will go on with it.
    async fn forget_memory(&self, _id: &Id) -> Result<()> {
        Ok(())
    }

    /// As [`Engine::forget_memory`], of a home whose files are to be enough without: [`EngineError::Unwritten`] if they are not.
    async fn leave_memory_out(&self, id: &Id) -> Result<()> {
        self.forget_memory(id).await
    }

    /// Keeps what there is of a memory in the home of `id` that cannot be used, for people to look at.
    async fn set_memory_aside(&self, _id: &Id) -> Result<()> {
        Ok(())
    }

    /// Takes charge of a box that an earlier daemon started. `false` if it is no longer there;
    /// its remains are then removed as by [`Engine::sweep`].
    async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool>;

    /// Takes charge of a box that was being restored from `image` when its daemon ended, if it came up: it has gone on since,
    /// and neither the image nor anything else is what it is now. `None` if there is no such box; its remains are to be swept.
    async fn recover(&self, spec: &BoxSpec, image: &std::path::Path) -> Result<Option<BoxRecord>>;

    /// Asks every process of the box to end, ends the rest after `grace`, and removes the box.
    /// Returns when nothing of it is left. Stopping a box that is not running is no error.
    async fn stop(&self, id: &Id, grace: Duration) -> Result<()>;

    /// Resolves when the box ends by itself. Pending forever once `stop` was called for it.
    async fn exited(&self, id: &Id) -> Result<BoxExit>;

    /// A new stream to the guest, opened inside the box: no routed address is involved.
    async fn connect(&self, id: &Id) -> Result<Box<dyn GuestStream>>;

    /// A new stream to a port of the box's loopback, opened inside the box. If nothing listens there, the
    /// error is [`EngineError::PortClosed`].
    async fn connect_port(&self, id: &Id, port: u16) -> Result<Box<dyn GuestStream>>;

    /// The TCP ports that processes of the box listen on, by number. A frozen box has them, too.
    async fn listening(&self, id: &Id) -> Result<Vec<Listening>>;

    async fn stats(&self, id: &Id) -> Result<BoxStats>;

    /// How long processes of the box have worked, without what it takes to run a box in which nothing does.
    async fn worked(&self, id: &Id) -> Result<Duration>;

    /// Removes whatever exists on this machine of a box of `id`: processes, cgroup, interface.
    async fn sweep(&self, id: &Id) -> Result<()>;

    /// Stops every process of the box where it is, without ending it. Returns when all of them are.
    async fn freeze(&self, id: &Id) -> Result<()>;

    /// Lets a frozen box go on. Thawing one that is not frozen is no error.
    async fn thaw(&self, id: &Id) -> Result<()>;

    /// Reads the memory of a frozen box, for the directory `image`, which must not exist. Returns as soon as the box, which stays
    /// frozen, may go on. Once that is sealed, `image` is whole and on disk; before, or after an error, it does not exist.
    async fn dump(&self, id: &Id, image: &std::path::Path) -> Result<Dumped>;

    /// Brings back the box that `image` was made of, on the home of `spec.id`, and returns when its
    /// guest answers. The home must be as it was when the image was made. The image stays as it is.
    async fn restore(&self, spec: &BoxSpec, image: &std::path::Path) -> Result<BoxRecord>;

    /// Takes away what `image`, which nobody will use any more, has left in the home of `id`. No other image that is to be
    /// used may be of this home. What cannot be taken away stays, and does no harm.
    async fn release(&self, id: &Id, image: &std::path::Path);

    /// Makes `spec.network` hold for the running box, in one step. Connections that it allows go on.
    async fn set_network(&self, spec: &BoxSpec) -> Result<()>;

    /// Whether the last restore from `image` was broken off, since this host was booted, before anything of the box ran. What
    /// has changed in the home since is then the restore's own work, and no reason to refuse the image.
    fn is_untouched(&self, image: &std::path::Path) -> bool;

    /// `Ok` where boxes of this kind can be run, otherwise the reason why not, in words.
    fn can_run(&self, isolation: Isolation) -> std::result::Result<(), String>;

    /// The strongest isolation that has been seen to work here without being slow.
    fn strongest(&self) -> Isolation;

    /// What boxes of this kind are run and kept by.
    fn about(&self, isolation: Isolation) -> About;

    /// `Ok` where memory images can be made of boxes of this kind and brought back, otherwise the reason why not, in words.
    /// An image that could not be brought back for that reason is as good as before.
    fn can_checkpoint(&self, isolation: Isolation) -> std::result::Result<(), String>;

    /// Ids of which there is something on this machine, running or left over.
    async fn present(&self) -> Result<Vec<Id>>;
}

/// What a snapshot has of a home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept<'a> {
    /// All that memory needs.
    Memory,
    /// Files alone: without what the home of a machine holds of its memory, the removal of which takes a while, and without
    /// what this image, if there is one, has left in the home.
    Files(Option<&'a std::path::Path>),
}

/// Keeps the root filesystems of agents, and the templates they start from.
#[async_trait]
pub trait Homes: Send + Sync + 'static {
    /// Makes the home of `id` as a writable copy of `template`, in constant time.
    async fn create(&self, id: &Id, template: &Id, disk: u64) -> Result<()>;

    /// Removes the home of `id`. Removing what is not there is no error.
    async fn delete(&self, id: &Id) -> Result<()>;

    /// Of a home, or of a template.
    async fn usage(&self, id: &Id) -> Result<HomeUsage>;

    async fn set_limit(&self, id: &Id, disk: u64) -> Result<()>;

    /// Ids of all homes, agents' and unfinished builds' alike.
    async fn list(&self) -> Result<Vec<Id>>;

    /// Ids of all templates.
    async fn templates(&self) -> Result<Vec<Id>>;

    /// An empty home for `id` in which a template can be made.
    async fn create_empty(&self, id: &Id) -> Result<()>;

    /// Fills the empty home of `id` with Debian by mmdebstrap; `log` gets its output by lines.
    async fn bootstrap(&self, id: &Id, debian: &Debian, log: LogSink) -> Result<()>;

    /// Unpacks one layer (tar, plain or compressed with gzip or zstd) over the home of `id`, inside
    /// a sandbox rooted there. OCI whiteouts are applied.
    async fn unpack(&self, id: &Id, uid_base: u32, layer: Layer, log: LogSink) -> Result<()>;

    /// Makes the home of `id` the read-only template `id`, durably.
    async fn seal(&self, id: &Id) -> Result<()>;

    async fn delete_template(&self, id: &Id) -> Result<()>;

    /// Writes template `id` to `to` as one compressed file, or makes it from such a file.
    async fn export_template(&self, id: &Id, to: &std::path::Path) -> Result<()>;
    async fn import_template(&self, id: &Id, from: &std::path::Path) -> Result<()>;

    async fn space(&self) -> Result<Space>;

    /// Keeps the home of `id` as it is now, read-only, as `snapshot`: durably, in constant time.
    async fn snapshot(&self, id: &Id, snapshot: &Id, kept: Kept<'_>) -> Result<()>;

    /// Makes the home of `id` as a writable copy of `snapshot`, durably. Gives its generation.
    async fn create_from_snapshot(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<u64>;

    /// Makes a writable copy of `snapshot` beside the home of `id`, for [`Homes::exchange`]. On an error there is none.
    async fn stage(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<()>;

    /// Removes what was staged, if anything was.
    async fn unstage(&self, id: &Id);

    /// Puts what was staged in the place of the home of `id`, in one step: a crash leaves either home, whole. No
    /// box may run on it. Gives its generation.
    async fn exchange(&self, id: &Id) -> Result<u64>;

    async fn delete_snapshot(&self, snapshot: &Id) -> Result<()>;

    /// Bytes of the files in `snapshot` that were written since `before`, an earlier snapshot or a template.
    async fn written_since(&self, snapshot: &Id, before: &Id) -> Result<u64>;

    async fn snapshots(&self) -> Result<Vec<Id>>;

    /// Makes an empty volume that may hold `disk` bytes, durably.
    async fn create_volume(&self, volume: &Id, disk: u64) -> Result<()>;

    /// Removes a volume that no box has mounted. Removing what is not there is no error.
    async fn delete_volume(&self, volume: &Id) -> Result<()>;

    async fn volumes(&self) -> Result<Vec<Id>>;

    /// What is in a volume, whoever has it mounted. Its methods block.
    async fn volume_files(&self, volume: &Id) -> Result<home::tree::Tree>;

    /// A number that grows whenever something in the home has changed on disk. Two equal answers, each
    /// taken while no process could write, mean that nothing changed in between. All that was written is on disk when this returns.
    async fn generation(&self, id: &Id) -> Result<u64>;

    /// Whether everything that can be seen in the home is as it was at generation `since`. The generation itself may have
    /// grown: a deleted file goes for good when the last process ends that had it open. It waits for no disk, and what is not on it yet may
    /// not be seen: where somebody can have written unnoticed, [`Homes::generation`] comes first.
    async fn is_unchanged(&self, id: &Id, since: u64) -> Result<bool>;
}

/// Room in the pool, and what it may still grow to.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Space {
    pub total: u64,
    pub free: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Debian {
    pub suite: String,
    pub packages: Vec<String>,
}

/// Receives progress of long work, line by line.
pub type LogSink = tokio::sync::mpsc::UnboundedSender<String>;

/// Environment for a box or a run.
pub type Env = BTreeMap<String, String>;
