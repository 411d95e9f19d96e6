//! The small routes: version, and envd's `/init`.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use dorm_proto::boot::PROTOCOL_VERSION;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::body::{self, Body, Failure};
use crate::settings::Settings;

const MAX_INIT: usize = 1 << 20;

#[derive(Serialize)]
struct Version {
    version: &'static str,
    protocol: u32,
}

pub(super) fn version() -> Response<Body> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL_VERSION,
    };
    body::json(StatusCode::OK, &version)
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Init {
    env_vars: BTreeMap<String, String>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    /// Given to a box that was forked from another, with what follows.
    hostname: Option<String>,
    agent_id: String,
    nameservers: Vec<String>,
    /// Base64.
    entropy: Option<String>,
}

pub(super) async fn init(settings: &Settings, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let collected = Limited::new(request.into_body(), MAX_INIT).collect().await;
    let bytes = collected
        .map_err(|e| Failure::bad_request(format!("the body cannot be read: {e}")))?
        .to_bytes();
    let init: Init = if bytes.is_empty() {
        Init::default()
    } else {
        serde_json::from_slice(&bytes)
            .map_err(|e| Failure::bad_request(format!("the body is not what /init takes: {e}")))?
    };
    let entropy = init.entropy.map(|text| BASE64.decode(text)).transpose();
    let entropy = entropy.map_err(|e| Failure::bad_request(format!("the entropy is not base64: {e}")))?;
    if let Some(entropy) = entropy {
        crate::boot::stir(&entropy);
    }
    settings.add_env(init.env_vars);
    if let Some(hostname) = init.hostname.filter(|_| crate::sys::is_init()) {
        crate::boot::apply(&init.agent_id, &hostname, &init.nameservers);
    }
    settings.set_defaults(init.default_user, init.default_workdir);
    Ok(body::empty(StatusCode::NO_CONTENT))
}
