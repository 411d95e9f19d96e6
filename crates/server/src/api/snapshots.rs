//! `/v1/agents/{agent}/snapshots`, `/rollback` and `/fork`.

use axum::Extension;
use axum::extract::State;
use http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::agents;
use super::errors::{ApiError, ApiResult};
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{Agent, ErrorBody, Fork, NewSnapshot, Rollback, RolledBack, Snapshot};
use super::validate;
use crate::lifecycle;
use crate::records::{SnapshotKind, SnapshotRecord, Workspace};

const MAX_LABEL: usize = 200;
const MAX_FORKS: u32 = 1000;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(take, list))
        .routes(routes!(delete))
        .routes(routes!(roll_back))
        .routes(routes!(fork))
}

fn on_wire(agent: &lifecycle::Agent, snapshot: SnapshotRecord) -> Snapshot {
    Snapshot {
        id: snapshot.id,
        agent: agent.profile.name.clone(),
        made: snapshot.made,
        label: snapshot.label,
        kind: snapshot.kind.as_str().to_owned(),
        parent: snapshot.parent,
        isolation: snapshot.isolation,
        size: snapshot.size,
        files: None,
    }
}

/// Take a snapshot of an agent
///
/// Of its files and its memory, at one instant, while it is held still for as long as that takes. An agent
/// that has no memory is snapshotted with its files.
#[utoipa::path(post, path = "/v1/agents/{agent}/snapshots", tag = "snapshots", request_body = Option<NewSnapshot>,
    params(("agent", description = "Name or id")), responses(
    (status = 201, body = Snapshot),
    (status = 404, body = ErrorBody),
    (status = 409, description = "Its memory cannot be saved", body = ErrorBody),
    (status = 507, description = "No space", body = ErrorBody),
))]
async fn take(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(new): Json<NewSnapshot>,
) -> ApiResult<(StatusCode, Json<Snapshot>)> {
    let agent = state.registry.get(&workspace, &agent)?;
    if new.label.len() > MAX_LABEL {
        return Err(ApiError::invalid(format!(
            "the label is longer than {MAX_LABEL} bytes"
        )));
    }
    let kind = if new.files_only {
        SnapshotKind::Files
    } else {
        SnapshotKind::Full
    };
    let snapshot = agent.snapshot(&new.label, kind).await?;
    Ok((StatusCode::CREATED, Json(on_wire(&agent, snapshot))))
}

/// List the snapshots of an agent, oldest first
#[utoipa::path(get, path = "/v1/agents/{agent}/snapshots", tag = "snapshots",
    params(("agent", description = "Name or id")),
    responses((status = 200, body = Vec<Snapshot>), (status = 404, body = ErrorBody)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Vec<Snapshot>>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let on_wire = |(snapshot, written)| Snapshot {
        files: Some(written),
        ..on_wire(&agent, snapshot)
    };
    let snapshots = agent.measured_snapshots().await?;
    Ok(Json(snapshots.into_iter().map(on_wire).collect()))
}

/// Delete a snapshot
#[utoipa::path(delete, path = "/v1/agents/{agent}/snapshots/{snapshot}", tag = "snapshots",
    params(("agent", description = "Name or id"), ("snapshot", description = "Id, or a label that no other has")),
    responses((status = 204), (status = 404, body = ErrorBody),
    (status = 409, description = "Several have the label", body = ErrorBody)))]
async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((agent, snapshot)): Path<(String, String)>,
) -> ApiResult<StatusCode> {
    let agent = state.registry.get(&workspace, &agent)?;
    let snapshot = agent.find_only_snapshot(&snapshot).await?;
    agent.delete_snapshot(&snapshot).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Roll an agent back to a snapshot
///
/// What it is now is snapshotted first. Answers when it runs again, if it ran or slept, or if the snapshot
/// has its memory.
#[utoipa::path(post, path = "/v1/agents/{agent}/rollback", tag = "snapshots", request_body = Rollback,
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = RolledBack),
    (status = 404, body = ErrorBody),
))]
async fn roll_back(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(request): Json<Rollback>,
) -> ApiResult<Json<RolledBack>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let snapshot = agent.find_snapshot(&request.snapshot).await?;
    let back = agent.roll_back(&snapshot).await?;
    Ok(Json(RolledBack {
        before: on_wire(&agent, back.before),
        agent: agents::on_wire(&state, &agent),
        lost: back.lost,
    }))
}

/// Fork an agent
///
/// New agents that begin as this one is, or was at a snapshot: with its files, its memory and its running
/// processes, each with an id, a name and an address of its own. Either all are made or none.
#[utoipa::path(post, path = "/v1/agents/{agent}/fork", tag = "snapshots", request_body = Fork,
    params(("agent", description = "Name or id")), responses(
    (status = 201, body = Vec<Agent>),
    (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody),
    (status = 409, description = "A name is taken, or the memory cannot be saved", body = ErrorBody),
))]
async fn fork(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(request): Json<Fork>,
) -> ApiResult<(StatusCode, Json<Vec<Agent>>)> {
    let agent = state.registry.get(&workspace, &agent)?;
    let names = match request.count {
        None => vec![request.name],
        Some(count @ 1..=MAX_FORKS) => (1..=count).map(|n| format!("{}-{n}", request.name)).collect(),
        Some(count) => {
            return Err(ApiError::invalid(format!("{count} forks are out of range"))
                .hint(format!("from 1 to {MAX_FORKS} at once")));
        }
    };
    for name in &names {
        validate::name("an agent", name)?;
    }
    let from = match &request.from {
        Some(snapshot) => Some(agent.find_snapshot(snapshot).await?),
        None => None,
    };
    let forks = state
        .registry
        .fork(&agent, names, from, request.files_only, request.start)
        .await?;
    let forks = forks.iter().map(|fork| agents::on_wire(&state, fork)).collect();
    Ok((StatusCode::CREATED, Json(forks)))
}
