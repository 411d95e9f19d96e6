//! The JSON that the REST API under `/v1` takes and gives. The CLI uses the same types.

use std::collections::BTreeMap;

use dorm_engine::{Id, Isolation};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::isolation::Choice;

/// Body of every answer that is not a success.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Stable, for programs: `not_found`, `already_exists`, `invalid_argument`, `conflict`,
    /// `unauthorized`, `too_large`, `no_space`, `unavailable`, `internal`.
    pub code: String,
    /// What happened.
    pub message: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Lives until it is deleted.
    Persistent,
    /// Is deleted when its box ends.
    Ephemeral,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAgent {
    /// 1 to 63 lowercase letters, digits and hyphens; starts with a letter. Becomes the host name.
    pub name: String,
    /// Name or id of a template; `base` if absent.
    #[serde(default)]
    pub template: Option<String>,
    /// What stands between it and the machine. The daemon's default if absent.
    #[serde(default)]
    pub isolation: Option<Choice>,
    /// Cores, in steps of a thousandth.
    #[serde(default)]
    pub cpus: Option<f64>,
    /// Bytes.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Bytes.
    #[serde(default)]
    pub disk: Option<u64>,
    #[serde(default)]
    pub pids: Option<u32>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub lifetime: Option<Lifetime>,
    /// Seconds without use after which it goes to standby; 0 is never. The daemon's default if absent.
    #[serde(default)]
    pub standby_after: Option<f64>,
    /// Seconds in standby after which its memory is on disk too; 0 is never.
    #[serde(default)]
    pub durable_after: Option<f64>,
    /// Seconds in standby after which it goes to disk; 0 is never.
    #[serde(default)]
    pub hibernate_after: Option<f64>,
    /// Never goes to sleep by itself.
    #[serde(default)]
    pub keep_awake: bool,
    /// Its ports need no token.
    #[serde(default)]
    pub public: bool,
    /// What it may reach; the internet if absent.
    #[serde(default)]
    pub network: Network,
    /// Volumes that it mounts.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Start it at once. Otherwise the first use does.
    #[serde(default = "yes")]
    pub start: bool,
}

fn yes() -> bool {
    true
}

/// A volume, and where in the agent it is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// Name or id; an id in answers.
    pub volume: String,
    pub path: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVolume {
    /// 1 to 63 lowercase letters, digits and hyphens; starts with a letter.
    pub name: String,
    /// Bytes that it may hold; as many as a home if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// Data that outlives agents.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub created: i64,
    /// Names of the agents that mount it.
    pub agents: Vec<String>,
    /// Bytes that it holds, and that it may hold, as far as they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// What an agent may reach. What is allowed wins over what is denied; what is private or link-local, the host and other
/// agents are always out of reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Without it, only what is allowed.
    pub internet: bool,
    /// Addresses, blocks like `198.51.100.0/24`, and names like `example.org` or `*.example.org`.
    pub allow: Vec<String>,
    /// Addresses and blocks; `0.0.0.0/0` is everything.
    pub deny: Vec<String>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            internet: true,
            allow: Vec::new(),
            deny: Vec::new(),
        }
    }
}

/// What is to be different about an agent. What is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentChange {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<Choice>,
    /// Seconds without use after which it goes to standby; 0 is never, null the daemon's default.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<f64>)]
    pub standby_after: Option<Option<f64>>,
    /// Seconds in standby after which its memory is on disk too; 0 is never, null the daemon's default.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<f64>)]
    pub durable_after: Option<Option<f64>>,
    /// Seconds in standby after which it goes to disk; 0 is never, null the daemon's default.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<f64>)]
    pub hibernate_after: Option<Option<f64>>,
    /// Never goes to sleep by itself.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub keep_awake: Option<bool>,
}

/// Tells null from a field that is absent.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Agent {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub template: String,
    pub lifetime: Lifetime,
    /// `container`, `gvisor` or `vm`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub isolation: Isolation,
    /// What it is run and kept by here. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_on: Option<RunsOn>,
    /// `stopped`, `starting`, `running`, `freezing`, `standby`, `hibernating`, `hibernated`, `waking`, `stopping`,
    /// `failed` or `deleting`.
    pub state: String,
    /// Why it is in this state, in words.
    pub reason: String,
    /// When it came into this state. Milliseconds since 1970, like all times.
    pub since: i64,
    pub created: i64,
    pub cpus: f64,
    pub memory: u64,
    pub disk: u64,
    pub pids: u32,
    pub env: BTreeMap<String, String>,
    /// The box's address on this machine, while there is a box.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Process 1 of the box, as the host sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Seconds for which nobody has used it, if it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<f64>,
    /// Seconds without use after which it goes to standby; 0 is never. The daemon's default if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby_after: Option<f64>,
    /// Seconds in standby after which its memory is on disk too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durable_after: Option<f64>,
    /// Seconds in standby after which it goes to disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate_after: Option<f64>,
    pub keep_awake: bool,
    /// Whether its ports need no token.
    #[serde(default)]
    pub public: bool,
    pub network: Network,
    pub volumes: Vec<VolumeMount>,
    /// Whether its memory, as it is now, is on disk.
    pub durable: bool,
    /// Bytes of its memory image on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_size: Option<u64>,
    /// Bytes of RAM that it holds. Only where usage was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used: Option<u64>,
    /// Bytes of disk that it holds, with what its snapshots keep of files and memory. Only where usage was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_used: Option<u64>,
}

/// What an agent with its isolation is run and kept by on this machine.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RunsOn {
    /// With its version.
    pub engine: String,
    pub accelerator: String,
    /// Whether that is emulation, which takes many times as long as the processor would.
    pub slow: bool,
    /// What keeps its files, at every stop.
    pub files: String,
    /// What keeps its memory and processes, when it sleeps.
    pub memory: String,
}

/// Why an agent is as it is, and what will become of it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Why {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub state: String,
    pub reason: String,
    pub since: i64,
    /// What keeps it awake, or from going deeper to sleep.
    pub because: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<NextState>,
    pub sleep: SleepTimes,
    /// By what its files outlive a crash of this machine.
    pub files: String,
    /// Where its memory is, and what that outlives.
    pub memory: String,
    /// What last went wrong with putting its memory to disk or bringing it back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setback: Option<Setback>,
    /// Why this daemon can make no memory images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_images: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NextState {
    pub state: String,
    /// When, if nothing happens until then.
    pub at: i64,
}

/// When an agent goes to sleep by itself, by the daemon's defaults where it has no times of its own. In seconds; what is absent
/// is never.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SleepTimes {
    /// Without use, until it goes to standby.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby_after: Option<f64>,
    /// In standby, until its memory is on disk too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durable_after: Option<f64>,
    /// In standby, until it goes to disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate_after: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Setback {
    pub time: i64,
    pub what: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewSnapshot {
    /// To find it by.
    pub label: String,
    /// Without the memory.
    pub files_only: bool,
}

/// An agent at one instant.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    #[schema(value_type = String)]
    pub id: Id,
    /// Name of the agent.
    pub agent: String,
    pub made: i64,
    pub label: String,
    /// `full` with the memory, or `files`.
    pub kind: String,
    /// The snapshot that the agent was at before.
    #[schema(value_type = Option<String>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<Id>,
    /// What the agent had then. Its memory is of no use with another.
    #[schema(value_type = String)]
    pub isolation: Isolation,
    /// Bytes of its memory on disk.
    pub size: u64,
    /// Bytes of files that it holds beyond the snapshot before it, or else beyond the template; told where snapshots are listed. It
    /// shares them with the home until they change there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// Id or label of a snapshot of this agent; of several with the label, the newest is meant.
    pub snapshot: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RolledBack {
    pub agent: Agent,
    /// What it was before.
    pub before: Snapshot,
    /// What memory is lost, and why: that of before, which could not be saved, or that of the snapshot, which could not be brought back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// Of the new agent. If there are several, they are called NAME-1, NAME-2 and so on.
    pub name: String,
    #[serde(default)]
    pub count: Option<u32>,
    /// Id or label of a snapshot of this agent; otherwise what it is now.
    #[serde(default)]
    pub from: Option<String>,
    /// Without the memory.
    #[serde(default)]
    pub files_only: bool,
    /// Start them at once. Otherwise the first use does.
    #[serde(default = "yes")]
    pub start: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewHold {
    /// For how long.
    pub seconds: f64,
    #[serde(default)]
    pub reason: String,
}

/// Keeps an agent from going to sleep by itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Hold {
    #[schema(value_type = String)]
    pub id: Id,
    /// Name of the agent.
    pub agent: String,
    pub reason: String,
    pub made: i64,
    pub until: i64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StopRequest {
    /// Seconds between the request to end and the end by force; 10 if absent.
    pub grace: Option<f64>,
}

/// A port that something in a box listens on.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Port {
    pub port: u16,
    /// `0.0.0.0` and `::` are all of the box's.
    pub addresses: Vec<String>,
    pub url: String,
}

/// Where a port of an agent is reached.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PortUrl {
    pub port: u16,
    /// Whether it needs no token.
    pub public: bool,
    pub url: String,
    /// Opens all ports of the agent, sent as `e2b-traffic-access-token`.
    pub token: String,
    /// For a browser: opens the port, which then remembers the token as a cookie.
    pub link: String,
}

/// What an agent uses now, and what of its limits it ran into.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub state: String,
    pub cpu_seconds: f64,
    pub cpus: f64,
    pub memory_used: u64,
    pub memory_peak: u64,
    pub memory_limit: u64,
    pub pids: u64,
    pub pids_limit: u32,
    pub disk_used: u64,
    pub disk_limit: u64,
    pub oom_kills: u64,
    pub forks_refused: u64,
}

/// One transition of an agent, or something that happened to it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Event {
    pub seq: i64,
    #[schema(value_type = String)]
    pub agent: Id,
    /// Of the agent.
    pub name: String,
    pub time: i64,
    pub from: Option<String>,
    pub to: String,
    pub reason: String,
    /// How long the transition took, once it is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub millis: Option<i64>,
}

/// How a template is made. In `recipe.toml` the same names, with `source` in place of `content`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// `debian:SUITE` to bootstrap one, or the name of a template.
    pub from: String,
    /// Debian packages to install.
    pub apt: Vec<String>,
    pub files: Vec<RecipeFile>,
    /// Shell commands, run as root in a box of the template, in order.
    pub run: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// User of runs that name none; `root` if absent. Made if the template has none of that name.
    pub user: Option<String>,
    pub workdir: Option<String>,
    /// Shell command that runs in every box of this template. It is a service: it does not keep an agent awake.
    pub start: Option<String>,
    /// Whether it does, all the same. Absent: what the template that this one is made from says of the same command, or no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_keeps_awake: Option<bool>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecipeFile {
    /// Absolute path in the template.
    pub path: String,
    /// Base64.
    pub content: String,
    /// Octal, as `"0644"`, the default.
    pub mode: Option<String>,
    /// `user` or `user:group`; root if absent.
    pub owner: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Template {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub created: i64,
    /// Hash of the recipe and of what it stands on; absent for an imported template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe_hash: Option<String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub env: BTreeMap<String, String>,
    pub start: Option<String>,
    #[serde(default)]
    pub start_keeps_awake: bool,
    /// Bytes of files in it.
    pub size: u64,
    /// Agents made from it.
    pub agents: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildTemplate {
    pub recipe: Recipe,
    /// Build even if a template of this name and recipe exists.
    #[serde(default)]
    pub force: bool,
}

/// One line of the newline-delimited JSON that builds and imports answer with.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Progress {
    /// A new step begins; `step` of `steps`, counted from 1.
    Step {
        step: u32,
        steps: u32,
        title: String,
    },
    Log {
        line: String,
    },
    Done {
        template: Template,
        cached: bool,
    },
    Error {
        error: ErrorBody,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Key {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub created: i64,
    pub last_used: Option<i64>,
    /// The first characters, to tell keys apart.
    pub prefix: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewKey {
    pub name: String,
}

/// A key with its secret, which is shown this once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreatedKey {
    #[serde(flatten)]
    pub key: Key,
    pub secret: String,
}
