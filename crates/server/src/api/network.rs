//! `/v1/agents/{agent}/network`.

use axum::Extension;
use axum::extract::State;
use dorm_engine::network::{Block, InvalidTarget, Policy, Target};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult};
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{ErrorBody, Network};
use crate::records::Workspace;

/// Of each list.
const MAX_TARGETS: usize = 1000;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(show, replace))
}

/// What an agent may reach
#[utoipa::path(get, path = "/v1/agents/{agent}/network", tag = "network",
    params(("agent", description = "Name or id")),
    responses((status = 200, body = Network), (status = 404, body = ErrorBody)))]
async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Network>> {
    let agent = state.registry.get(&workspace, &agent)?;
    Ok(Json(on_wire(&agent.network())))
}

/// Replace what an agent may reach
///
/// Holds at once, for a running agent too: connections that are still allowed go on, others are cut.
#[utoipa::path(put, path = "/v1/agents/{agent}/network", tag = "network", request_body = Network,
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Network),
    (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody),
))]
async fn replace(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(network): Json<Network>,
) -> ApiResult<Json<Network>> {
    let agent = state.registry.get(&workspace, &agent)?;
    agent.set_network(policy(&network)?).await?;
    Ok(Json(on_wire(&agent.network())))
}

pub(super) fn on_wire(policy: &Policy) -> Network {
    Network {
        internet: policy.internet,
        allow: policy.allow.iter().map(Target::to_string).collect(),
        deny: policy.deny.iter().map(Block::to_string).collect(),
    }
}

/// What was asked for, if it can be promised.
pub(crate) fn policy(network: &Network) -> ApiResult<Policy> {
    if network.allow.len().max(network.deny.len()) > MAX_TARGETS {
        return Err(ApiError::invalid(format!(
            "a network policy allows and denies at most {MAX_TARGETS} targets each"
        )));
    }
    let invalid = |error: InvalidTarget| ApiError::invalid(error.to_string());
    let allow: Vec<Target> = network
        .allow
        .iter()
        .map(|text| text.parse().map_err(invalid))
        .collect::<ApiResult<_>>()?;
    if let Some(target) = allow
        .iter()
        .find(|target| matches!(target, Target::Block(block) if block.is_out_of_bounds()))
    {
        return Err(ApiError::invalid(format!("{target} cannot be allowed"))
            .hint("private, link-local and reserved addresses are out of bounds for all boxes"));
    }
    let denied = |text: &String| {
        text.parse().map_err(|error| match text.parse::<Target>() {
            Ok(Target::Name(_)) => ApiError::invalid(format!("the name {text:?} cannot be denied")).hint(
                "a denied name would be reachable by its address: deny everything, and allow what is wanted",
            ),
            _ => invalid(error),
        })
    };
    Ok(Policy {
        internet: network.internet,
        allow,
        deny: network.deny.iter().map(denied).collect::<ApiResult<_>>()?,
    })
}
