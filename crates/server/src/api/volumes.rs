//! `/v1/volumes`.

use axum::Extension;
use axum::extract::State;
use http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::ApiResult;
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{ErrorBody, NewVolume, Volume};
use crate::records::{VolumeRecord, Workspace};

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(show, delete))
}

async fn on_wire(state: &AppState, volume: VolumeRecord) -> Volume {
    // One of an earlier daemon may have no limit.
    let usage = state.homes.usage(&volume.id).await.ok();
    Volume {
        used: usage.as_ref().map(|usage| usage.used),
        size: usage.map(|usage| usage.limit).filter(|limit| *limit > 0),
        agents: state.volumes.users(&volume.id),
        id: volume.id,
        name: volume.name,
        created: volume.created,
    }
}

/// Make an empty volume
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = NewVolume, responses(
    (status = 201, body = Volume),
    (status = 400, body = ErrorBody),
    (status = 409, description = "The name is taken", body = ErrorBody),
))]
async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Json(new): Json<NewVolume>,
) -> ApiResult<(StatusCode, Json<Volume>)> {
    let volume = state.volumes.create(&workspace, &new.name, new.size).await?;
    Ok((StatusCode::CREATED, Json(on_wire(&state, volume).await)))
}

/// List volumes, by name
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes", responses((status = 200, body = Vec<Volume>)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
) -> ApiResult<Json<Vec<Volume>>> {
    let volumes = state.volumes.list(&workspace).await?;
    let mut listed = Vec::with_capacity(volumes.len());
    for volume in volumes {
        listed.push(on_wire(&state, volume).await);
    }
    Ok(Json(listed))
}

/// Show a volume
#[utoipa::path(get, path = "/v1/volumes/{volume}", tag = "volumes", params(("volume", description = "Name or id")),
    responses((status = 200, body = Volume), (status = 404, body = ErrorBody)))]
async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(volume): Path<String>,
) -> ApiResult<Json<Volume>> {
    let volume = state.volumes.find(&workspace, &volume).await?;
    Ok(Json(on_wire(&state, volume).await))
}

/// Delete a volume and what is in it
#[utoipa::path(delete, path = "/v1/volumes/{volume}", tag = "volumes", params(("volume", description = "Name or id")),
    responses((status = 204), (status = 404, body = ErrorBody),
    (status = 409, description = "An agent mounts it", body = ErrorBody)))]
async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(volume): Path<String>,
) -> ApiResult<StatusCode> {
    state.volumes.delete(&workspace, &volume).await?;
    Ok(StatusCode::NO_CONTENT)
}
