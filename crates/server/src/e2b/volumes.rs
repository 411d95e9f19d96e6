//! `/volumes`.

use axum::Extension;
use axum::extract::State;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::errors::Result;
use super::extract::{Body, Path};
use crate::api::AppState;
use crate::records::{VolumeRecord, Workspace};

#[derive(Debug, Deserialize)]
pub(super) struct NewVolume {
    name: String,
}

fn with_token(state: &AppState, volume: &VolumeRecord) -> Value {
    json!({
        "volumeID": volume.id,
        "name": volume.name,
        "token": state.tokens.volume(&volume.id),
    })
}

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Body(new): Body<NewVolume>,
) -> Result<(StatusCode, axum::Json<Value>)> {
    let volume = state.volumes.create(&workspace, &new.name, None).await?;
    Ok((StatusCode::CREATED, axum::Json(with_token(&state, &volume))))
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
) -> Result<axum::Json<Vec<Value>>> {
    let volumes = state.volumes.list(&workspace).await?;
    let on_wire = |volume: VolumeRecord| json!({ "volumeID": volume.id, "name": volume.name });
    Ok(axum::Json(volumes.into_iter().map(on_wire).collect()))
}

pub(super) async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>> {
    let volume = state.volumes.find(&workspace, &id).await?;
    Ok(axum::Json(with_token(&state, &volume)))
}

pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    state.volumes.delete(&workspace, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
