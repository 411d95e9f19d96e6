//! `/v1/agents/{agent}/ports`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use dorm_engine::EngineError;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult};
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{ErrorBody, Port, PortUrl};
use crate::lifecycle::Agent;
use crate::proxy::BROWSER_TOKEN;
use crate::records::{State as AgentState, Workspace};

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

/// The ports that something in the agent's box listens on
///
/// An agent whose memory is on disk is woken; one that is stopped has none.
#[utoipa::path(get, path = "/v1/agents/{agent}/ports", tag = "ports", params(("agent", description = "Name or id")),
    responses((status = 200, body = Vec<Port>), (status = 404, body = ErrorBody)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Vec<Port>>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let _open = agent.open_request();
    if agent.state() == AgentState::Hibernated {
        agent.ensure_running().await?;
    }
    Ok(Json(open_ports(&state, &agent).await?))
}

async fn open_ports(state: &AppState, agent: &Arc<Agent>) -> ApiResult<Vec<Port>> {
    let id = &agent.profile.id;
    let found = match state.engine.listening(id).await {
        Err(EngineError::NotRunning(_)) => Vec::new(),
        found => found?,
    };
    let mut ports = BTreeMap::<u16, Vec<String>>::new();
    for one in found {
        ports.entry(one.port).or_default().push(one.address.to_string());
    }
    let ports = ports.into_iter().map(|(port, addresses)| Port {
        port,
        addresses,
        url: state.names.url(id, port),
    });
    Ok(ports.collect())
}

/// Where a port of an agent is reached
///
/// Whether or not something listens there.
#[utoipa::path(get, path = "/v1/agents/{agent}/ports/{port}", tag = "ports",
    params(("agent", description = "Name or id"), ("port", description = "1 to 65535")), responses(
    (status = 200, body = PortUrl),
    (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody),
))]
async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((agent, port)): Path<(String, String)>,
) -> ApiResult<Json<PortUrl>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let invalid = || ApiError::invalid(format!("{port:?} is no port")).hint("a number from 1 to 65535");
    let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(invalid)?;
    let (id, public) = (&agent.profile.id, agent.reach().public);
    let url = state.names.url(id, port);
    let token = state.tokens.traffic(id);
    Ok(Json(PortUrl {
        port,
        public,
        link: format!("{url}/?{BROWSER_TOKEN}={token}"),
        url,
        token,
    }))
}
