//! Templates. A snapshot is one, too.

use axum::Extension;
use axum::extract::State;
use http::StatusCode;

use super::errors::Result;
use super::extract::Path;
use super::snapshots;
use crate::api::AppState;
use crate::records::Workspace;

pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    if let Some(done) = snapshots::delete(&state, &workspace, &id).await? {
        return Ok(done);
    }
    let deleted = state
        .templates
        .delete(&workspace, snapshots::plain_name(&id))
        .await;
    deleted.map_err(crate::api::ApiError::from)?;
    Ok(StatusCode::NO_CONTENT)
}
