//! What dorm keeps in the store, in the words that store, lifecycle and API share.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use dorm_engine::network::Policy;
use dorm_engine::{BoxRecord, Env, Id, Isolation, Limits};
use serde::{Deserialize, Serialize};

mod build;
mod sandbox;
mod secret;

pub use build::{BuildRecord, BuildStatus};
pub use sandbox::{OnTimeout, Origin, PauseMode, SandboxRecord, VolumeMount};
pub use secret::SecretRecord;

/// Milliseconds since 1970, as every time in dorm is kept.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The tenant that owns agents, templates and keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Workspace(std::sync::Arc<str>);

impl Workspace {
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The one workspace that exists from the first start on.
impl Default for Workspace {
    fn default() -> Self {
        Self::new("default")
    }
}

/// Where an agent is in its life. See [`crate::lifecycle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    Stopped,
    Starting,
    Running,
    /// On the way to `standby`.
    Freezing,
    /// Frozen in memory: no CPU, and back at once.
    Standby,
    /// On the way to `hibernated`.
    Hibernating,
    /// Its memory is on disk; no process, no RAM.
    Hibernated,
    /// On the way back from `standby` or `hibernated`.
    Waking,
    Stopping,
    Failed,
    Deleting,
}

impl State {
    pub const ALL: [State; 11] = [
        Self::Stopped,
        Self::Starting,
        Self::Running,
        Self::Freezing,
        Self::Standby,
        Self::Hibernating,
        Self::Hibernated,
        Self::Waking,
        Self::Stopping,
        Self::Failed,
        Self::Deleting,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Freezing => "freezing",
            Self::Standby => "standby",
            Self::Hibernating => "hibernating",
            Self::Hibernated => "hibernated",
            Self::Waking => "waking",
            Self::Stopping => "stopping",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("unknown {what} {found:?}")]
pub struct UnknownWord {
    what: &'static str,
    found: String,
}

impl FromStr for State {
    type Err = UnknownWord;

    fn from_str(s: &str) -> Result<Self, UnknownWord> {
        let known = Self::ALL.into_iter().find(|state| state.as_str() == s);
        known.ok_or_else(|| UnknownWord {
            what: "state",
            found: s.to_owned(),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Lives until it is deleted.
    Persistent,
    /// Is deleted when its box ends.
    Ephemeral,
}

impl Lifetime {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "persistent",
            Self::Ephemeral => "ephemeral",
        }
    }
}

impl FromStr for Lifetime {
    type Err = UnknownWord;

    fn from_str(s: &str) -> Result<Self, UnknownWord> {
        match s {
            "persistent" => Ok(Self::Persistent),
            "ephemeral" => Ok(Self::Ephemeral),
            _ => Err(UnknownWord {
                what: "lifetime",
                found: s.to_owned(),
            }),
        }
    }
}

/// A state with its reason, in words, and the time at which it began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    pub reason: String,
    pub since: i64,
}

impl Status {
    pub fn now(state: State, reason: impl Into<String>) -> Self {
        Self {
            state,
            reason: in_bounds(reason.into()),
            since: now(),
        }
    }

    /// Since when it has been so, where `before` was the same state: whatever was tried meanwhile has led nowhere else.
    pub fn following(self, before: &Self) -> Self {
        let since = match self.state == before.state {
            true => before.since,
            false => self.since,
        };
        Self { since, ..self }
    }
}

/// No more of a text than records are for: some of it may be a box's own words.
fn in_bounds(mut text: String) -> String {
    const MOST: usize = 4096;
    text.truncate(text.floor_char_boundary(MOST));
    text
}

/// What an agent was asked to be. Kept as JSON, so that fields can be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentSpec {
    #[serde(default)]
    pub isolation: Isolation,
    pub limits: Limits,
    #[serde(default)]
    pub env: Env,
    /// Like `network`, as recorded when the agent became known; it may have others by now.
    #[serde(default)]
    pub sleep: Sleep,
    /// As recorded when the agent became known; it may have another by now.
    #[serde(default)]
    pub network: Policy,
    #[serde(default)]
    pub volumes: Vec<dorm_engine::VolumeMount>,
}

/// When an agent that nobody uses goes to sleep. What is absent is the daemon's default; times are
/// milliseconds, and 0 is never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sleep {
    pub standby_after: Option<u64>,
    pub durable_after: Option<u64>,
    pub hibernate_after: Option<u64>,
    /// Never by itself.
    pub keep_awake: bool,
}

impl Sleep {
    pub fn changed(self, by: SleepChange) -> Self {
        Self {
            standby_after: by.standby_after.unwrap_or(self.standby_after),
            durable_after: by.durable_after.unwrap_or(self.durable_after),
            hibernate_after: by.hibernate_after.unwrap_or(self.hibernate_after),
            keep_awake: by.keep_awake.unwrap_or(self.keep_awake),
        }
    }

    /// Whether it says itself that it stays awake, whatever the daemon's defaults are.
    pub fn is_never(&self) -> bool {
        self.keep_awake || self.standby_after == Some(0)
    }
}

/// What is to be different about [`Sleep`]. What is absent stays as it is; a time of `Some(None)` is the daemon's default
/// again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SleepChange {
    pub standby_after: Option<Option<u64>>,
    pub durable_after: Option<Option<u64>>,
    pub hibernate_after: Option<Option<u64>>,
    pub keep_awake: Option<bool>,
}

/// Who may reach an agent's ports, and how. Kept as JSON, so that fields can be added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reach {
    /// Its ports, other than the guest's, need no token.
    pub public: bool,
    /// What the servers in the box see as `Host`, with `${PORT}` for the port; the real one if absent.
    pub host: Option<String>,
}

/// A memory image of an agent, in its folder under `DATA/images`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub id: Id,
    /// Of the home, at the instant of the image: it is of no use with any other.
    pub generation: u64,
    /// Bytes on disk.
    pub size: u64,
    pub made: i64,
    /// Whether it is what the agent's memory is now. A box that goes on makes it stale.
    pub current: bool,
    /// Made of another agent: whoever wakes from it must be told who it is now.
    #[serde(default)]
    pub foreign: bool,
    /// Processor time that the box had used at the instant of the image, in microseconds. One that has used no more since has
    /// not gone on. Not known of an image that came from elsewhere.
    #[serde(default)]
    pub cpu_usec: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SnapshotKind {
    /// The home alone.
    Files,
    /// The home and the memory, of one instant.
    Full,
}

impl SnapshotKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Full => "full",
        }
    }
}

impl FromStr for SnapshotKind {
    type Err = UnknownWord;

    fn from_str(s: &str) -> Result<Self, UnknownWord> {
        match s {
            "files" => Ok(Self::Files),
            "full" => Ok(Self::Full),
            _ => Err(UnknownWord {
                what: "kind of snapshot",
                found: s.to_owned(),
            }),
        }
    }
}

/// An agent at one instant. Its memory image, if any, lies beside the agent's own under the same id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRecord {
    pub id: Id,
    pub agent: Id,
    pub made: i64,
    pub label: String,
    pub kind: SnapshotKind,
    /// The snapshot that the agent was at before.
    pub parent: Option<Id>,
    /// What the agent had then: its memory is of no use with another.
    pub isolation: Isolation,
    /// Bytes of its memory image.
    pub size: u64,
    /// Only of a snapshot that outlives its agent.
    pub origin: Option<Origin>,
}

/// Keeps an agent from going to sleep by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldRecord {
    pub id: Id,
    pub agent: Id,
    pub reason: String,
    pub made: i64,
    pub until: i64,
}

/// What a template gives to the agents made from it. An agent keeps its own copy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TemplateDefaults {
    pub env: Env,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub start: Option<String>,
    /// Whether an agent is at work while `start` runs, which is a service otherwise.
    pub start_keeps_awake: bool,
    /// Succeeds once what `start` began is ready.
    pub ready: Option<String>,
}

/// What the template itself knows of its making; agents have no need of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Built {
    pub limits: TemplateLimits,
    /// The build through the E2B API that made it.
    pub build: Option<String>,
}

/// What agents of a template have, unless they ask for something else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TemplateLimits {
    pub cpu_millis: Option<u32>,
    pub memory: Option<u64>,
    /// At the least.
    pub disk: Option<u64>,
}

impl TemplateLimits {
    pub fn or(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.or(other.cpu_millis),
            memory: self.memory.or(other.memory),
            disk: self.disk.or(other.disk),
        }
    }

    pub fn of(&self, defaults: &Limits) -> Limits {
        Limits {
            cpu_millis: self.cpu_millis.unwrap_or(defaults.cpu_millis),
            memory: self.memory.unwrap_or(defaults.memory),
            disk: self.disk.unwrap_or(0).max(defaults.disk),
            ..defaults.clone()
        }
    }
}

/// What does not change while an agent lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    pub template_id: Id,
    pub template_name: String,
    pub lifetime: Lifetime,
    pub spec: AgentSpec,
    pub defaults: TemplateDefaults,
    /// Decides address and host uids; unique among all agents.
    pub slot: u32,
    pub uid_base: u32,
    pub created: i64,
    /// What of the stored row could not be read. Such an agent cannot be started, only deleted.
    pub damage: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentRecord {
    pub profile: Profile,
    pub status: Status,
    /// What the engine needs to adopt the box, while there is one.
    pub box_record: Option<BoxRecord>,
    pub image: Option<ImageRecord>,
    /// The snapshot that it was made at, or rolled back to, last.
    pub snapshot: Option<Id>,
    pub reach: Reach,
    /// What last went wrong with putting its memory to disk or bringing it back.
    pub setback: Option<Note>,
    /// Whether the next daemon is to bring it back.
    pub goes_on: bool,
}

/// Something that was seen of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub time: i64,
    pub what: String,
}

impl Note {
    pub fn now(what: impl Into<String>) -> Self {
        Self {
            time: now(),
            what: in_bounds(what.into()),
        }
    }
}

/// An agent before the store gave it a slot.
#[derive(Debug, Clone)]
pub struct NewAgentRecord {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    pub template_id: Id,
    pub template_name: String,
    pub lifetime: Lifetime,
    pub spec: AgentSpec,
    pub defaults: TemplateDefaults,
    pub status: Status,
    /// Host uids that are not those of its slot: a memory image is bound to the ones it was made with.
    pub uid_base: Option<u32>,
    pub image: Option<ImageRecord>,
    pub reach: Reach,
    /// If it was made through the E2B API.
    pub sandbox: Option<SandboxRecord>,
}

/// Which slots and host uids agents may have.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    pub max: u32,
    pub first_uid: u32,
}

impl Slots {
    pub const UIDS: u32 = 65_536;

    pub fn uid_base(&self, slot: u32) -> u32 {
        self.first_uid + slot * Self::UIDS
    }
}

/// A change of state, with what becomes of the box's record.
#[derive(Debug, Clone)]
pub struct Change<'a> {
    pub agent: &'a Id,
    pub from: State,
    pub to: &'a Status,
    /// When it came about, which may be later than the beginning of a state that it leads back to.
    pub at: i64,
    /// How long the transition took, if this ends one.
    pub millis: Option<i64>,
    pub box_record: BoxChange<'a>,
    pub image: ImageChange,
}

/// What a change of state makes of the agent's memory image. A new one is recorded by itself, before
/// anything rests on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageChange {
    Keep,
    /// The memory has gone on.
    Stale,
    Clear,
}

#[derive(Debug, Clone, Copy)]
pub enum BoxChange<'a> {
    Keep,
    Set(&'a BoxRecord),
    Clear,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRecord {
    pub seq: i64,
    pub agent: Id,
    pub time: i64,
    pub from: Option<State>,
    pub to: State,
    pub reason: String,
    pub millis: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRecord {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    /// Absent for an imported template.
    pub recipe_hash: Option<String>,
    pub defaults: TemplateDefaults,
    pub built: Built,
    /// Bytes of files in it.
    pub size: u64,
    pub created: i64,
}

/// Data that outlives agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRecord {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    pub created: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    /// The first characters of the secret, shown to tell keys apart.
    pub prefix: String,
    /// BLAKE3 of the secret. The secret is 160 random bits, so that no slow hash is needed.
    pub hash: [u8; 32],
    pub created: i64,
    pub last_used: Option<i64>,
}
