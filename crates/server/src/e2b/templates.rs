//! Templates. A snapshot is one, too.

use axum::Extension;
use axum::extract::State;
use http::StatusCode;

use super::errors::Result;
use super::extract::Path;
use super::{snapshots, tags};
use crate::api::AppState;
use crate::records::{TemplateRecord, Workspace};

/// With all its tags, unless it is one that is named.
pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    if let Some(done) = snapshots::delete(&state, &workspace, &id).await? {
        return Ok(done);
    }
    let (name, tag) = tags::split(&id);
    let all = state.store.list_templates(&workspace).await?;
    let tagged = |found: &TemplateRecord| tag.is_none() && tags::split(&found.name).0 == name;
    let named = tags::of(&id)?;
    let mut unwanted: Vec<&str> = all
        .iter()
        .filter(|found| tagged(found) || found.name == named || found.id.as_str() == named)
        .map(|found| found.id.as_str())
        .collect();
    if unwanted.is_empty() {
        unwanted.push(&named);
    }
    for one in unwanted {
        let deleted = state.templates.delete(&workspace, one).await;
        deleted.map_err(crate::api::ApiError::from)?;
    }
    Ok(StatusCode::NO_CONTENT)
}
