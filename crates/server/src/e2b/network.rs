//! What a sandbox may reach, and who may reach it.

use axum::Extension;
use axum::extract::State;
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

/// The part of a sandbox's network settings that concerns what comes in.
#[derive(Debug, Clone, Default)]
pub(super) struct Policy {
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
}

impl Policy {
    pub(super) fn read(network: Option<&Value>) -> Result<Self> {
        let settings: Settings = match network {
            None | Some(Value::Null) => Settings::default(),
            Some(network) => serde_json::from_value(network.clone())
                .map_err(|error| Error::invalid(format!("network: {error}")))?,
        };
        Ok(Self {
            public: settings.allow_public_traffic.unwrap_or(true),
            mask_host: settings.mask_request_host,
        })
    }
}

pub(super) async fn replace(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(mut body): Body<Map<String, Value>>,
) -> Result<StatusCode> {
    let found = find(&state, &workspace, &id)?;
    let Some(sandbox) = &found.sandbox else {
        return Err(Error::invalid(
            "only sandboxes that were made through this API have such settings",
        ));
    };
    let internet = body
        .remove("allow_internet_access")
        .and_then(|value| value.as_bool());
    let update = |record: &mut crate::records::SandboxRecord| {
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
    state.sandboxes.change(sandbox, update).await?;
    Ok(StatusCode::NO_CONTENT)
}
