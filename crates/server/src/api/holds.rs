//! `/v1/holds` and `/v1/agents/{agent}/holds`.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult, Code};
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{ErrorBody, Hold, NewHold};
use crate::lifecycle::Agent;
use crate::records::{HoldRecord, Workspace};

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(all))
        .routes(routes!(add, list, release_all))
        .routes(routes!(release))
}

fn on_wire(agent: &Agent, hold: HoldRecord) -> Hold {
    Hold {
        id: hold.id,
        agent: agent.profile.name.clone(),
        reason: hold.reason,
        made: hold.made,
        until: hold.until,
    }
}

/// List the holds of all agents
#[utoipa::path(get, path = "/v1/holds", tag = "holds", responses((status = 200, body = Vec<Hold>)))]
async fn all(State(state): State<AppState>, Extension(workspace): Extension<Workspace>) -> Json<Vec<Hold>> {
    let agents = state.registry.list(&workspace);
    let holds = agents
        .iter()
        .flat_map(|agent| agent.holds().into_iter().map(|hold| on_wire(agent, hold)));
    Json(holds.collect())
}

/// Keep an agent from going to sleep by itself, for a time
#[utoipa::path(post, path = "/v1/agents/{agent}/holds", tag = "holds", request_body = NewHold,
    params(("agent", description = "Name or id")), responses(
    (status = 201, body = Hold),
    (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody),
))]
async fn add(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(new): Json<NewHold>,
) -> ApiResult<(StatusCode, Json<Hold>)> {
    let agent = state.registry.get(&workspace, &agent)?;
    if !(0.001..=1e9).contains(&new.seconds) {
        return Err(
            ApiError::invalid(format!("a hold of {} seconds is out of range", new.seconds))
                .hint("from 0.001 to 1000000000 seconds; keep_awake is for good"),
        );
    }
    let hold = agent
        .hold(Duration::from_secs_f64(new.seconds), &new.reason)
        .await?;
    Ok((StatusCode::CREATED, Json(on_wire(&agent, hold))))
}

/// List the holds of an agent
#[utoipa::path(get, path = "/v1/agents/{agent}/holds", tag = "holds",
    params(("agent", description = "Name or id")),
    responses((status = 200, body = Vec<Hold>), (status = 404, body = ErrorBody)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Vec<Hold>>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let holds = agent.holds().into_iter().map(|hold| on_wire(&agent, hold));
    Ok(Json(holds.collect()))
}

/// Release all holds of an agent
#[utoipa::path(delete, path = "/v1/agents/{agent}/holds", tag = "holds",
    params(("agent", description = "Name or id")),
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn release_all(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<StatusCode> {
    state.registry.get(&workspace, &agent)?.release(None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Release a hold
#[utoipa::path(delete, path = "/v1/agents/{agent}/holds/{hold}", tag = "holds",
    params(("agent", description = "Name or id"), ("hold", description = "Id")),
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn release(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((agent, hold)): Path<(String, String)>,
) -> ApiResult<StatusCode> {
    let agent = state.registry.get(&workspace, &agent)?;
    let released = match hold.parse::<Id>() {
        Ok(id) => agent.release(Some(&id)).await?,
        Err(_) => 0,
    };
    match released {
        0 => Err(
            ApiError::new(Code::NotFound, format!("there is no hold {hold:?}"))
                .hint("`dorm holds` shows the holds"),
        ),
        _ => Ok(StatusCode::NO_CONTENT),
    }
}
