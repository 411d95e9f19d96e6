//! A build of a template through the E2B API.

use serde::{Deserialize, Serialize};

use super::{TemplateLimits, Workspace};

/// Kept as JSON, so that fields can be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRecord {
    /// A UUID, as the SDKs insist.
    pub id: String,
    pub workspace: Workspace,
    pub name: String,
    /// At least one.
    pub tags: Vec<String>,
    #[serde(default)]
    pub limits: TemplateLimits,
    pub status: BuildStatus,
    /// What it was at when it failed, in E2B's words: `base`, the number of an instruction, or `finalize`.
    #[serde(default)]
    pub step: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuildStatus {
    /// For its instructions.
    Waiting,
    Building,
    Ready,
    Failed(String),
}
