//! The JSON of the E2B API, as its SDKs send and read it. Fields that dorm does not know are passed over: an SDK may be
//! newer than this server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::records::VolumeMount;

/// Seconds that a sandbox is given if the client names none.
pub(super) const DEFAULT_TIMEOUT: i64 = 300;
/// Unlocks every version gate of the SDKs.
pub(super) const ENVD_VERSION: &str = "0.6.13";
pub(super) const CLIENT_ID: &str = "dorm";

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NewSandbox {
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    pub(super) timeout: Option<i64>,
    pub(super) auto_pause: bool,
    pub(super) auto_pause_memory: Option<bool>,
    pub(super) auto_resume: Option<AutoResume>,
    #[serde(rename = "allow_internet_access")]
    pub(super) allow_internet_access: Option<bool>,
    pub(super) network: Option<Value>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) env_vars: Option<BTreeMap<String, String>>,
    pub(super) volume_mounts: Option<Vec<VolumeMount>>,
    pub(super) mcp: Option<Value>,
    pub(super) iam: Option<Value>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct AutoResume {
    pub(super) enabled: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Connect {
    pub(super) timeout: Option<i64>,
    pub(super) memory: Option<bool>,
    /// Only of the old `resume`.
    pub(super) auto_pause: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Pause {
    pub(super) memory: Option<bool>,
    pub(super) require_healthy_guest: bool,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Timeout {
    pub(super) timeout: i64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refresh {
    pub(super) duration: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NewSnapshot {
    pub(super) name: Option<String>,
    pub(super) memory: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Fork {
    pub(super) timeout: Option<i64>,
    pub(super) count: Option<u32>,
}

/// What a client needs to reach a sandbox.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Access {
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    #[serde(rename = "sandboxID")]
    pub(super) sandbox_id: String,
    #[serde(rename = "clientID")]
    pub(super) client_id: &'static str,
    pub(super) envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) alias: Option<String>,
    pub(super) envd_access_token: String,
    pub(super) traffic_access_token: Option<String>,
    pub(super) domain: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    #[serde(rename = "sandboxID")]
    pub(super) sandbox_id: String,
    #[serde(rename = "clientID")]
    pub(super) client_id: &'static str,
    pub(super) started_at: String,
    pub(super) end_at: String,
    pub(super) envd_version: &'static str,
    pub(super) cpu_count: u32,
    #[serde(rename = "memoryMB")]
    pub(super) memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    pub(super) disk_size_mb: u64,
    pub(super) state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) alias: Option<String>,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) volume_mounts: Vec<VolumeMount>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Detail {
    #[serde(flatten)]
    pub(super) listed: Listed,
    pub(super) envd_access_token: String,
    pub(super) domain: Option<String>,
    pub(super) allow_internet_access: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) network: Option<Value>,
    pub(super) lifecycle: Lifecycle,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pause_mode: Option<&'static str>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lifecycle {
    pub(super) auto_resume: bool,
    pub(super) on_timeout: &'static str,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metric {
    pub(super) timestamp: String,
    pub(super) timestamp_unix: i64,
    pub(super) cpu_count: u32,
    pub(super) cpu_used_pct: f64,
    pub(super) mem_used: u64,
    pub(super) mem_total: u64,
    pub(super) mem_cache: u64,
    pub(super) disk_used: u64,
    pub(super) disk_total: u64,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Snapshot {
    #[serde(rename = "snapshotID")]
    pub(super) snapshot_id: String,
    pub(super) names: Vec<String>,
}
