//! Finds sandboxes, and says what they are.

use std::sync::Arc;

use dorm_engine::Id;
use http::HeaderMap;
use http::header::HOST;

use super::errors::{Error, Result};
use super::sandboxes::Sandbox;
use super::time::{NEVER, rfc3339};
use super::types::{Access, CLIENT_ID, Detail, ENVD_VERSION, Lifecycle, Listed};
use crate::api::AppState;
use crate::lifecycle::Agent;
use crate::records::{OnTimeout, PauseMode, SandboxRecord, State, Workspace};

const MIB: u64 = 1 << 20;

/// An agent, with what the E2B API has added to it if it was made through it.
pub(super) struct Found {
    pub(super) agent: Arc<Agent>,
    pub(super) sandbox: Option<Arc<Sandbox>>,
}

/// By id. Old SDKs add the client's id to it.
pub(super) fn find(state: &AppState, workspace: &Workspace, id: &str) -> Result<Found> {
    let plain = id.split_once('-').map_or(id, |(plain, _)| plain);
    let agent = plain
        .parse::<Id>()
        .ok()
        .and_then(|id| state.registry.by_id(&id))
        .filter(|agent| agent.profile.workspace == *workspace && agent.state() != State::Deleting)
        .ok_or_else(|| Error::no_sandbox(id))?;
    let sandbox = state.sandboxes.get(&agent.profile.id);
    Ok(Found { agent, sandbox })
}

impl Found {
    /// What was added to it; for one of dorm's own agents, what comes nearest.
    pub(super) fn record(&self) -> SandboxRecord {
        match &self.sandbox {
            Some(sandbox) => sandbox.record(),
            None => SandboxRecord {
                template: self.agent.profile.template_name.clone(),
                alias: Some(self.agent.profile.template_name.clone()),
                started: self.agent.profile.created,
                on_timeout: OnTimeout::Pause(PauseMode::Full),
                auto_resume: true,
                paused: match self.agent.state() {
                    State::Hibernated => Some(PauseMode::Full),
                    State::Stopped | State::Failed => Some(PauseMode::Files),
                    _ => None,
                },
                ..SandboxRecord::default()
            },
        }
    }

    pub(super) fn access(&self, state: &AppState, headers: &HeaderMap) -> Access {
        let id = &self.agent.profile.id;
        let record = self.record();
        Access {
            template_id: record.template,
            sandbox_id: id.to_string(),
            client_id: CLIENT_ID,
            envd_version: ENVD_VERSION,
            alias: record.alias,
            envd_access_token: state.tokens.access(id),
            traffic_access_token: (!self.agent.reach().public).then(|| state.tokens.traffic(id)),
            domain: domain(state, headers),
        }
    }

    pub(super) fn listed(&self) -> Listed {
        let limits = &self.agent.profile.spec.limits;
        let record = self.record();
        Listed {
            template_id: record.template,
            sandbox_id: self.agent.profile.id.to_string(),
            client_id: CLIENT_ID,
            started_at: rfc3339(record.started),
            // The time of a paused one stands still: if it were resumed now, it would end then.
            end_at: rfc3339(match (&self.sandbox, record.end) {
                (None, _) => NEVER,
                (Some(_), Some(end)) => end,
                (Some(_), None) => crate::records::now().saturating_add(record.timeout),
            }),
            envd_version: ENVD_VERSION,
            cpu_count: limits.cpu_millis.div_ceil(1000).max(1),
            memory_mb: limits.memory / MIB,
            disk_size_mb: limits.disk / MIB,
            state: if record.paused.is_some() {
                "paused"
            } else {
                "running"
            },
            alias: record.alias,
            metadata: record.metadata,
            volume_mounts: record.volumes,
        }
    }

    pub(super) fn detail(&self, state: &AppState, headers: &HeaderMap) -> Detail {
        let record = self.record();
        Detail {
            listed: self.listed(),
            envd_access_token: state.tokens.access(&self.agent.profile.id),
            domain: domain(state, headers),
            allow_internet_access: record.allow_internet,
            network: record.network,
            lifecycle: Lifecycle {
                auto_resume: record.auto_resume,
                on_timeout: match record.on_timeout {
                    OnTimeout::Kill => "kill",
                    OnTimeout::Pause(_) => "pause",
                },
            },
            pause_mode: record.paused.map(|mode| match mode {
                PauseMode::Full => "full",
                PauseMode::Files => "filesystem",
            }),
        }
    }
}

/// What a sandbox's host names end with: `<port>-<id>.<domain>`.
fn domain(state: &AppState, headers: &HeaderMap) -> Option<String> {
    if state.config.domain.is_some() {
        return Some(state.names.domain().to_owned());
    }
    let host = headers.get(HOST)?.to_str().ok()?;
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (name, Some(port)),
        _ => (host, None),
    };
    let is_address = name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
    let name = if is_address {
        "localhost"
    } else {
        name.strip_prefix("api.").unwrap_or(name)
    };
    Some(match port {
        Some(port) => format!("{name}:{port}"),
        None => name.to_owned(),
    })
}
