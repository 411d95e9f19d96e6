//! What the E2B API adds to an agent, and what keeps a snapshot usable when its agent is gone.

use std::collections::BTreeMap;

use dorm_engine::Id;
use dorm_engine::network::Policy;
use serde::{Deserialize, Serialize};

use super::{AgentSpec, Lifetime, Profile, Reach, TemplateDefaults, Workspace};

/// An agent that was made through the E2B API. Kept as JSON, so that fields can be added.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxRecord {
    /// What it was made from: the name of a template, without tag, or the id of a snapshot.
    pub template: String,
    /// Name of that template or snapshot.
    pub alias: Option<String>,
    pub metadata: BTreeMap<String, String>,
    pub started: i64,
    /// When its time is over; absent while it is paused.
    pub end: Option<i64>,
    /// Milliseconds that it was given last.
    pub timeout: i64,
    pub on_timeout: OnTimeout,
    pub auto_resume: bool,
    pub paused: Option<PauseMode>,
    pub network: Option<serde_json::Value>,
    pub allow_internet: Option<bool>,
    pub volumes: Vec<VolumeMount>,
    /// The key that the request which made it had, so that the same request again makes no second one.
    pub idempotency: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    #[default]
    Kill,
    Pause(PauseMode),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// With the memory.
    Full,
    Files,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    pub name: String,
    pub path: String,
}

/// What an agent that is made of another, or of a snapshot, takes over from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Whose memory images are those of the snapshots.
    pub agent: Id,
    pub name: String,
    pub workspace: Workspace,
    pub template_id: Id,
    pub template_name: String,
    pub lifetime: Lifetime,
    pub spec: AgentSpec,
    pub defaults: TemplateDefaults,
    pub uid_base: u32,
    #[serde(default)]
    pub reach: Reach,
}

impl Origin {
    pub fn of(profile: &Profile, reach: &Reach, network: &Policy) -> Self {
        Self {
            agent: profile.id.clone(),
            name: profile.name.clone(),
            workspace: profile.workspace.clone(),
            template_id: profile.template_id.clone(),
            template_name: profile.template_name.clone(),
            lifetime: profile.lifetime,
            spec: AgentSpec {
                network: network.clone(),
                ..profile.spec.clone()
            },
            defaults: profile.defaults.clone(),
            uid_base: profile.uid_base,
            reach: reach.clone(),
        }
    }
}
