//! What a sandbox may reach, and who may reach it.

use axum::Extension;
use axum::extract::State;
use dorm_engine::network::{Block, Policy as Egress};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::errors::{Error, Result};
use super::extract::{Body, Path};
use super::view::find;
use crate::api::AppState;
use crate::records::Workspace;

/// What a network update may hold; what it leaves out is cleared.
const REPLACED: [&str; 5] = ["allowOut", "denyOut", "dnsServers", "egressProxy", "rules"];

/// A sandbox's network settings, in dorm's words.
#[derive(Debug, Clone, Default)]
pub(super) struct Policy {
    /// What it may reach.
    pub(super) egress: Egress,
    /// Its ports need no token.
    pub(super) public: bool,
    /// What its servers see as `Host`.
    pub(super) mask_host: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Settings {
    allow_public_traffic: Option<bool>,
    mask_request_host: Option<String>,
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    egress_proxy: Option<Value>,
    rules: Option<Map<String, Value>>,
}

impl Policy {
    pub(super) fn read(network: Option<&Value>, internet: Option<bool>) -> Result<Self> {
        let settings: Settings = match network {
            None | Some(Value::Null) => Settings::default(),
            Some(network) => serde_json::from_value(network.clone())
                .map_err(|error| Error::invalid(format!("network: {error}")))?,
        };
        let unsupported = |what: &str, why: &str| {
            Err(Error::invalid(format!(
                "network.{what}: this server {why}; create the sandbox without it"
            )))
        };
        if settings.egress_proxy.is_some_and(|proxy| !proxy.is_null()) {
            return unsupported("egressProxy", "sends nothing through a proxy");
        }
        if settings.rules.is_some_and(|rules| !rules.is_empty()) {
            return unsupported("rules", "does not change what a sandbox sends");
        }
        let egress = egress(
            internet.unwrap_or(true),
            &settings.allow_out.unwrap_or_default(),
            &settings.deny_out.unwrap_or_default(),
        )?;
        Ok(Self {
            egress,
            public: settings.allow_public_traffic.unwrap_or(true),
            mask_host: settings.mask_request_host,
        })
    }
}

/// What is private or link-local is out of reach for every sandbox, so that allowing it changes nothing.
fn egress(internet: bool, allow: &[String], deny: &[String]) -> Result<Egress> {
    let allow = allow.iter().filter(|text| {
        let block: Result<Block, _> = text.parse();
        !block.is_ok_and(|block| block.is_out_of_bounds())
    });
    let network = crate::api::types::Network {
        internet,
        allow: allow.cloned().collect(),
        deny: deny.to_vec(),
    };
    Ok(crate::api::policy(&network)?)
}

pub(super) async fn replace(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(mut body): Body<Map<String, Value>>,
) -> Result<StatusCode> {
    let found = find(&state, &workspace, &id)?;
    let internet = body
        .remove("allow_internet_access")
        .and_then(|value| value.as_bool());
    let policy = Policy::read(Some(&Value::Object(body.clone())), internet)?;
    // An agent that is no sandbox has no more settings than this.
    let Some(sandbox) = found.sandbox else {
        found.agent.set_network(policy.egress).await?;
        return Ok(StatusCode::NO_CONTENT);
    };
    let update = move |record: &mut crate::records::SandboxRecord| {
        let mut network = match record.network.take() {
            Some(Value::Object(network)) => network,
            _ => Map::new(),
        };
        for field in REPLACED {
            match body.get(field) {
                Some(value) => network.insert(field.to_owned(), value.clone()),
                None => network.remove(field),
            };
        }
        record.network = Some(Value::Object(network));
        record.allow_internet = internet;
    };
    let told = async move { Ok(state.sandboxes.change(&sandbox, update).await?) };
    found.agent.set_network_and(policy.egress, told).await?;
    Ok(StatusCode::NO_CONTENT)
}
