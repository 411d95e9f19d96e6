//! `POST /sandboxes/{id}/fork`.

use axum::Extension;
use axum::extract::State;
use dorm_engine::{Env, Id};
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::create::{known, name_of};
use super::errors::{Error, Result};
use super::extract::{Body, Path};
use super::time;
use super::types::{DEFAULT_TIMEOUT, Fork};
use super::view::find;
use crate::api::AppState;
use crate::lifecycle::NewFork;
use crate::records::{SandboxRecord, SnapshotKind, Workspace, now};

const MAX_FORKS: u32 = 100;

/// As many as are asked for, each with its own fortune.
pub(super) async fn fork(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<Fork>,
) -> Result<(StatusCode, axum::Json<Vec<Value>>)> {
    let found = find(&state, &workspace, &id)?;
    let count = body.count.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&count) {
        return Err(Error::invalid(format!(
            "{count} forks are out of range: from 1 to {MAX_FORKS}"
        )));
    }
    let timeout = time::timeout(body.timeout.unwrap_or(DEFAULT_TIMEOUT))?;
    let started = now();
    let record = SandboxRecord {
        started,
        end: Some(started + timeout),
        timeout,
        paused: None,
        idempotency: None,
        ..found.record()
    };
    let one = |_| {
        let id = Id::random();
        NewFork {
            name: name_of(&id),
            id,
            env: Env::new(),
            reach: None,
            network: None,
            volumes: None,
            sandbox: Some(record.clone()),
        }
    };
    let forks = (0..count).map(one).collect();
    let forks = state
        .registry
        .fork_each(&found.agent, forks, SnapshotKind::Full, true)
        .await?;
    let on_wire = |fork| match fork {
        Ok(agent) => {
            let fork = known(&state, agent, record.clone());
            json!({ "sandbox": fork.access(&state, &headers) })
        }
        Err(trouble) => json!({ "error": Error::from(trouble).to_json() }),
    };
    Ok((
        StatusCode::CREATED,
        axum::Json(forks.into_iter().map(on_wire).collect()),
    ))
}
