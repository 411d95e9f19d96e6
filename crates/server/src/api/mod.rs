//! HTTP: thin translations between the wire and what the registry, the store and the engine do.
//!
//! Each resource has a file with its handlers and a `router()`; this file puts them together and adds
//! what all requests share: keys, counting, and errors in one form.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use http::StatusCode;
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_swagger_ui::SwaggerUi;

use crate::e2b;

mod agents;
mod auth;
mod drain;
mod errors;
mod events;
mod extract;
mod guest;
mod holds;
mod info;
mod keys;
mod network;
mod ports;
mod sleep;
mod snapshots;
mod state;
mod templates;
#[cfg(test)]
mod tests;
pub mod types;
pub(crate) mod validate;
mod volumes;

pub(crate) use auth::{API_KEY, bearer, secret_in};
pub(crate) use errors::{ApiError, Code};
pub(crate) use extract::{Json, Path, Query};
pub(crate) use network::policy;
pub use state::{AppState, Shared};

#[derive(OpenApi)]
#[openapi(
    info(title = "dorm", description = "Persistent computers for AI agents.\n\n\
        Whatever is sent to `/v1/agents/{agent}/guest/…` reaches the guest in the agent's box, which speaks \
        envd: runs, files, metrics. An agent that does not run is started first."),
    paths(info::healthz, info::metrics),
    modifiers(&Keys),
    security(("key" = []), ("bearer" = []))
)]
struct Document;

struct Keys;

impl utoipa::Modify for Keys {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        let key = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-KEY")));
        let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        components.add_security_scheme("key", key);
        components.add_security_scheme("bearer", bearer);
    }
}

/// Everything that the daemon answers.
pub fn router(state: &AppState) -> Router {
    let (with_key, mut document) = OpenApiRouter::with_openapi(Document::openapi())
        .merge(agents::router())
        .merge(sleep::router())
        .merge(holds::router())
        .merge(network::router())
        .merge(volumes::router())
        .merge(snapshots::router())
        .merge(ports::router())
        .merge(events::router())
        .merge(keys::router())
        .merge(templates::router())
        .merge(info::router())
        .split_for_parts();
    document.info.version = env!("CARGO_PKG_VERSION").to_owned();
    let max_body = usize::try_from(state.config.max_body).unwrap_or(usize::MAX);
    let with_key = with_key
        .route("/v1/agents/{agent}/guest/{*path}", any(guest::to_guest))
        .route("/metrics", axum::routing::get(info::metrics))
        .route_layer(from_fn_with_state(state.clone(), auth::require_key));
    Router::new()
        .merge(with_key)
        .merge(e2b::router(state))
        .route("/healthz", axum::routing::get(info::healthz))
        .merge(SwaggerUi::new("/docs").url("/openapi.json", document))
        .layer(DefaultBodyLimit::max(max_body))
        .method_not_allowed_fallback(no_such_method)
        .fallback(no_such_route)
        .layer(from_fn_with_state(state.clone(), count))
        .layer(from_fn_with_state(state.clone(), crate::proxy::front))
        .layer(from_fn(drain::drain))
        .with_state(state.clone())
}

async fn no_such_route(request: Request) -> Response {
    let path = request.uri().path();
    if e2b::is_path(path) {
        return e2b::unknown(request.method(), path);
    }
    ApiError::new(Code::NotFound, format!("there is nothing at {path}"))
        .hint("/docs shows what there is")
        .into_response()
}

async fn no_such_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    if e2b::is_path(path) {
        return e2b::unknown(method, path);
    }
    ApiError::new(Code::InvalidArgument, format!("{path} does not take {method}"))
        .status(StatusCode::METHOD_NOT_ALLOWED)
        .hint("/docs shows what it takes")
        .into_response()
}

async fn count(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let route: Arc<str> = request
        .extensions()
        .get::<MatchedPath>()
        .map_or("none", MatchedPath::as_str)
        .into();
    let response = next.run(request).await;
    state.metrics.requested(&route, response.status().as_u16());
    response
}
