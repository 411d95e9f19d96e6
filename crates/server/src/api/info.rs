//! What the daemon says about itself.

use std::collections::BTreeMap;

use axum::Extension;
use axum::extract::State;
use axum::response::IntoResponse;
use dorm_proto::boot::PROTOCOL_VERSION;
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::ApiResult;
use super::extract::Json;
use super::state::AppState;
use crate::metrics::Now;
use crate::records::{State as AgentState, Workspace};

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(super) struct Info {
    pub(super) version: String,
    pub(super) guest_protocol: u32,
    pub(super) pool_total: u64,
    pub(super) pool_free: u64,
    /// Records that cannot be read, in words. They concern nobody else.
    pub(super) damage: Vec<String>,
    pub(super) agents: u64,
    pub(super) running: u64,
}

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(info))
}

/// Version, and room in the pool of homes
#[utoipa::path(get, path = "/v1/info", tag = "daemon", responses((status = 200, body = Info)))]
async fn info(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
) -> ApiResult<Json<Info>> {
    let space = state.homes.space().await?;
    let agents = state.registry.list(&workspace);
    Ok(Json(Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        guest_protocol: PROTOCOL_VERSION,
        pool_total: space.total,
        pool_free: space.free,
        damage: state.store.all_damage().await?,
        agents: agents.len() as u64,
        running: agents
            .iter()
            .filter(|agent| agent.state() == AgentState::Running)
            .count() as u64,
    }))
}

/// Whether the daemon answers. Needs no key.
#[utoipa::path(get, path = "/healthz", tag = "daemon", security(()), responses((status = 200, body = str, content_type = "text/plain")))]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// What the daemon counts and measures, for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "daemon", responses((status = 200, body = str, content_type = "text/plain")))]
pub(super) async fn metrics(State(state): State<AppState>) -> ApiResult<impl IntoResponse> {
    let space = state.homes.space().await?;
    let agents = state.registry.all();
    let mut by_state = BTreeMap::<AgentState, usize>::new();
    for agent in &agents {
        *by_state.entry(agent.state()).or_default() += 1;
    }
    let now = Now {
        agents: by_state.into_iter().collect(),
        open_requests: agents.iter().map(|agent| agent.open_requests()).sum(),
        pool_total: space.total,
        pool_free: space.free,
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(CONTENT_TYPE, kind)], state.metrics.render(&now)))
}
