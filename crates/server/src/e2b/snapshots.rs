//! Snapshots that outlive their sandbox, and are templates for others.

use axum::Extension;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::errors::{Error, Result};
use super::extract::{Body, Path, Query};
use super::list::page;
use super::types::{NewSnapshot, Snapshot};
use super::view::find as find_sandbox;
use crate::api::AppState;
use crate::records::{SnapshotKind, SnapshotRecord, Workspace};

const MAX_NAME: usize = 128;

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(body): Body<NewSnapshot>,
) -> Result<(StatusCode, axum::Json<Snapshot>)> {
    let found = find_sandbox(&state, &workspace, &id)?;
    let name = body.name.unwrap_or_default();
    let name = plain_name(&name);
    if name.len() > MAX_NAME || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(Error::invalid(format!(
            "a snapshot's name is at most {MAX_NAME} bytes, without spaces"
        )));
    }
    let kind = match body.memory {
        Some(false) => SnapshotKind::Files,
        Some(true) | None => SnapshotKind::Full,
    };
    let snapshot = found.agent.snapshot(name, kind).await?;
    found.agent.keep_snapshot(&snapshot).await?;
    Ok((StatusCode::CREATED, axum::Json(on_wire(&snapshot))))
}

fn on_wire(snapshot: &SnapshotRecord) -> Snapshot {
    let name = Some(snapshot.label.clone()).filter(|name| !name.is_empty());
    Snapshot {
        snapshot_id: snapshot.id.to_string(),
        names: name.into_iter().collect(),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListQuery {
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    name: Option<String>,
    limit: Option<usize>,
    next_token: Option<String>,
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<ListQuery>,
) -> Result<(HeaderMap, axum::Json<Vec<Snapshot>>)> {
    let of = |snapshot: &SnapshotRecord| {
        query
            .sandbox_id
            .as_ref()
            .is_none_or(|id| snapshot.agent.as_str() == id)
    };
    let named = |snapshot: &SnapshotRecord| {
        let fits =
            |name: &String| snapshot.label == plain_name(name) || snapshot.id.as_str() == plain_name(name);
        query.name.as_ref().is_none_or(fits)
    };
    let all = kept(&state, &workspace).await?;
    let all = all.into_iter().filter(|one| of(one) && named(one)).collect();
    let place = |snapshot: &SnapshotRecord| (snapshot.made, snapshot.id.to_string());
    let (page, headers) = page(all, query.limit, query.next_token.as_deref(), place, true)?;
    Ok((headers, axum::Json(page.iter().map(on_wire).collect())))
}

/// Of a workspace, oldest first.
async fn kept(state: &AppState, workspace: &Workspace) -> Result<Vec<SnapshotRecord>> {
    let mut all = state.store.snapshots().await?;
    all.retain(|one| {
        one.origin
            .as_ref()
            .is_some_and(|origin| origin.workspace == *workspace)
    });
    Ok(all)
}

/// By id, or the newest of that name.
pub(super) async fn find(
    state: &AppState,
    workspace: &Workspace,
    wanted: &str,
) -> Result<Option<SnapshotRecord>> {
    let all = kept(state, workspace).await?;
    let by_id = all.iter().find(|one| one.id.as_str() == wanted);
    let by_name = || {
        all.iter()
            .rfind(|one| !one.label.is_empty() && one.label == wanted)
    };
    Ok(by_id.or_else(by_name).cloned())
}

/// Without namespace and tag.
pub(super) fn plain_name(name: &str) -> &str {
    let name = name.rsplit_once('/').map_or(name, |(_, name)| name);
    name.split_once(':').map_or(name, |(name, _)| name)
}

pub(super) async fn delete(
    state: &AppState,
    workspace: &Workspace,
    wanted: &str,
) -> Result<Option<StatusCode>> {
    let Some(snapshot) = find(state, workspace, plain_name(wanted)).await? else {
        return Ok(None);
    };
    state.registry.delete_snapshot(&snapshot).await?;
    Ok(Some(StatusCode::NO_CONTENT))
}
