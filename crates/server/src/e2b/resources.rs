//! One sandbox: what it is, its end, its log.

use axum::Extension;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::errors::{Error, Result};
use super::extract::Path;
use super::time::rfc3339;
use super::types::Detail;
use super::view::find;
use crate::api::AppState;
use crate::lifecycle::Trouble;
use crate::records::Workspace;

const LOG_LINES: u32 = 1000;

pub(super) async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<axum::Json<Detail>> {
    let found = find(&state, &workspace, &id)?;
    Ok(axum::Json(found.detail(&state, &headers)))
}

pub(super) async fn kill(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let found = find(&state, &workspace, &id)?;
    match found.agent.delete().await {
        Ok(()) => {}
        Err(Trouble::NotFound(_)) => return Err(Error::no_sandbox(&id)),
        Err(trouble) => return Err(trouble.into()),
    }
    state.sandboxes.forget(&found.agent.profile.id);
    Ok(StatusCode::NO_CONTENT)
}

/// What happened to it: its transitions.
pub(super) async fn logs(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>> {
    let found = find(&state, &workspace, &id)?;
    let mut events = state.store.events(&found.agent.profile.id, LOG_LINES).await?;
    events.reverse();
    let line = |event: &crate::records::EventRecord| json!({ "timestamp": rfc3339(event.time), "line": format!("{}: {}", event.to, event.reason) });
    let entry = |event: &crate::records::EventRecord| {
        json!({ "timestamp": rfc3339(event.time), "message": format!("{}: {}", event.to, event.reason),
            "level": "info", "fields": {} })
    };
    Ok(axum::Json(json!({
        "logs": events.iter().map(line).collect::<Vec<_>>(),
        "logEntries": events.iter().map(entry).collect::<Vec<_>>(),
    })))
}
