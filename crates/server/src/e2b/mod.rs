//! The API of E2B, as its SDKs speak it: a translation to dorm's own nouns. A sandbox is an agent with a [`Sandbox`]
//! beside it; a snapshot is one that outlives its agent; a template is a template.
//!
//! What reaches into a sandbox (`envd`, its ports) does not come here, but through the proxy.

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post, put};
use http::{Method, StatusCode};

mod builds;
mod create;
mod errors;
mod extract;
mod fork;
mod history;
mod list;
mod metrics;
mod network;
mod ready;
mod resources;
mod sandboxes;
mod secrets;
mod sleep;
mod snapshots;
mod tags;
mod templates;
mod time;
mod types;
mod view;
mod volume_content;
mod volumes;

pub use builds::Builds;
pub use sandboxes::{NotAdmitted, Sandbox, Sandboxes};

use crate::api::AppState;

pub(crate) fn router(state: &AppState) -> Router<AppState> {
    Router::new()
        .route("/sandboxes", post(create::create).get(list::list_running))
        .route("/v2/sandboxes", post(create::create).get(list::list))
        .route("/sandboxes/metrics", get(metrics::of_several))
        .route("/sandboxes/{id}", get(resources::show).delete(resources::kill))
        .route("/sandboxes/{id}/logs", get(resources::logs))
        .route("/v2/sandboxes/{id}/logs", get(resources::logs))
        .route("/sandboxes/{id}/connect", post(sleep::connect))
        .route("/v2/sandboxes/{id}/connect", post(sleep::connect))
        .route("/sandboxes/{id}/resume", post(sleep::resume))
        .route("/sandboxes/{id}/pause", post(sleep::pause))
        .route("/sandboxes/{id}/timeout", post(sleep::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sleep::refresh))
        .route("/sandboxes/{id}/metrics", get(metrics::of_one))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/fork", post(fork::fork))
        .route("/sandboxes/{id}/network", put(network::replace))
        .route("/snapshots", get(snapshots::list))
        .route("/secrets", post(secrets::create).get(secrets::list))
        .route(
            "/secrets/{secret}",
            get(secrets::show).post(secrets::update).delete(secrets::delete),
        )
        .route("/volumes", post(volumes::create).get(volumes::list))
        .route("/volumes/{id}", get(volumes::show).delete(volumes::delete))
        .route("/templates/{id}", delete(templates::delete))
        .route("/v2/templates", post(builds::request))
        .route("/v3/templates", post(builds::request))
        .route("/templates/{id}/files/{hash}", get(builds::upload_link))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .route("/templates/aliases/{alias}", get(tags::alias))
        .route("/templates/tags", post(tags::assign_all).delete(tags::remove_all))
        .route("/templates/{id}/tags", get(tags::list))
        .route_layer(from_fn_with_state(state.clone(), extract::require_key))
        .merge(with_tokens_of_their_own())
}

/// What is opened by another token than a key.
fn with_tokens_of_their_own() -> Router<AppState> {
    use volume_content::{change, list, make_dir, read, remove, stat, write};
    let file = get(read).put(write).layer(DefaultBodyLimit::disable());
    Router::new()
        .route("/volumecontent/{id}/dir", get(list).post(make_dir))
        .route("/volumecontent/{id}/path", get(stat).patch(change).delete(remove))
        .route("/volumecontent/{id}/file", file)
        .route(
            "/templates/uploads/{token}",
            put(builds::upload).layer(DefaultBodyLimit::disable()),
        )
}

/// Keeps the times of sandboxes, and samples what they use, until the daemon ends. Finishes builds that were left.
pub(crate) fn watch(state: &AppState) {
    state.sandboxes.watch(state.shutdown.clone());
    builds::finish(state);
    let sampler = history::Sampler {
        registry: state.registry.clone(),
        engine: state.engine.clone(),
        homes: state.homes.clone(),
        sandboxes: state.sandboxes.clone(),
    };
    tokio::spawn(sampler.run(state.shutdown.clone()));
}

/// Whether a path that leads nowhere looks as if an E2B SDK had asked for it.
pub(crate) fn is_path(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    let first = parts.next().unwrap_or_default();
    let version = |part: &str| {
        part.strip_prefix('v')
            .and_then(|n| n.parse::<u32>().ok())
            .is_some_and(|n| n > 1)
    };
    let resource = if version(first) {
        parts.next().unwrap_or_default()
    } else {
        first
    };
    matches!(
        resource,
        "sandboxes" | "snapshots" | "templates" | "volumes" | "volumecontent" | "secrets" | "teams"
    )
}

/// For what an SDK asks that this server does not know.
pub(crate) fn unknown(method: &Method, path: &str) -> axum::response::Response {
    use axum::response::IntoResponse as _;
    let message = format!(
        "{method} {path} is not part of the E2B API that this server speaks: that of the Python SDK 2.0 to 2.63 and \
         the JavaScript SDK up to 2.51"
    );
    errors::Error::new(StatusCode::NOT_FOUND, message).into_response()
}
