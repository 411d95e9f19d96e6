//! The JSON that the REST API under `/v1` takes and gives. The CLI uses the same types.

use std::collections::BTreeMap;

use dorm_engine::Id;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// Start it at once. Otherwise the first use does.
    #[serde(default = "yes")]
    pub start: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Agent {
    #[schema(value_type = String)]
    pub id: Id,
    pub name: String,
    pub template: String,
    pub lifetime: Lifetime,
    /// `stopped`, `starting`, `running`, `stopping`, `failed` or `deleting`.
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
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StopRequest {
    /// Seconds between the request to end and the end by force; 10 if absent.
    pub grace: Option<f64>,
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
    /// Shell command that runs in every box of this template.
    pub start: Option<String>,
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

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Info {
    pub version: String,
    pub guest_protocol: u32,
    pub pool_total: u64,
    pub pool_free: u64,
    pub agents: u64,
    pub running: u64,
}
