//! Pause, resume, connect, and the end of a sandbox's time.

use axum::Extension;
use axum::extract::State;
use http::{HeaderMap, StatusCode};

use super::errors::{Error, Result};
use super::extract::{Body, Path};
use super::types::{Access, Connect, DEFAULT_TIMEOUT, Pause, Refresh, Timeout};
use super::view::{Found, find};
use super::{sandboxes, time};
use crate::api::AppState;
use crate::guest_client::GuestClient;
use crate::records::{OnTimeout, PauseMode, Workspace};

const HEALTH: std::time::Duration = std::time::Duration::from_secs(5);

/// Wakes it if it is paused; 201 says that it was.
pub(super) async fn connect(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<Connect>,
) -> Result<(StatusCode, axum::Json<Access>)> {
    let found = find(&state, &workspace, &id)?;
    let timeout = time::timeout(body.timeout.unwrap_or(DEFAULT_TIMEOUT))?;
    let resumed = resume_it(&state, &found, timeout, body.memory.unwrap_or(true)).await?;
    let status = if resumed {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, axum::Json(found.access(&state, &headers))))
}

/// Of SDKs before `connect`: one that runs is a conflict.
pub(super) async fn resume(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<Connect>,
) -> Result<(StatusCode, axum::Json<Access>)> {
    let found = find(&state, &workspace, &id)?;
    if found.record().paused.is_none() {
        return Err(Error::new(
            StatusCode::CONFLICT,
            format!("sandbox {id} runs already"),
        ));
    }
    let timeout = time::timeout(body.timeout.unwrap_or(DEFAULT_TIMEOUT))?;
    resume_it(&state, &found, timeout, true).await?;
    if let (Some(sandbox), Some(true)) = (&found.sandbox, body.auto_pause) {
        let pause = OnTimeout::Pause(PauseMode::Full);
        state
            .sandboxes
            .change(sandbox, |record| record.on_timeout = pause)
            .await?;
    }
    Ok((StatusCode::CREATED, axum::Json(found.access(&state, &headers))))
}

async fn resume_it(state: &AppState, found: &Found, timeout: i64, memory: bool) -> Result<bool> {
    match &found.sandbox {
        Some(sandbox) => Ok(state
            .sandboxes
            .resume(&found.agent, sandbox, timeout, memory)
            .await?),
        None => {
            let slept = found.record().paused.is_some();
            found.agent.ensure_running().await?;
            Ok(slept)
        }
    }
}

pub(super) async fn pause(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(body): Body<Pause>,
) -> Result<StatusCode> {
    let found = find(&state, &workspace, &id)?;
    let mode = match body.memory {
        Some(false) => PauseMode::Files,
        Some(true) | None => PauseMode::Full,
    };
    if body.require_healthy_guest && found.record().paused.is_none() {
        healthy(&state, &found).await?;
    }
    let paused = match &found.sandbox {
        Some(sandbox) => state.sandboxes.pause(&found.agent, sandbox, mode).await?,
        None if found.record().paused.is_some() => false,
        None => {
            match mode {
                PauseMode::Full => found.agent.hibernate("paused").await?,
                PauseMode::Files => found.agent.stop(None).await?,
            }
            true
        }
    };
    if paused {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Error::new(
        StatusCode::CONFLICT,
        format!("sandbox {id} is paused already"),
    ))
}

/// Its guest answers.
async fn healthy(state: &AppState, found: &Found) -> Result<()> {
    let id = &found.agent.profile.id;
    let busy = |why: String| {
        Error::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("the guest of sandbox {id} does not answer: {why}; it was left running"),
        )
    };
    let _open = found.agent.open_request();
    found.agent.ensure_running().await?;
    let guest = GuestClient::new(state.engine.clone(), id.clone());
    match tokio::time::timeout(HEALTH, guest.runs()).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(busy(dorm_engine::chain(&error))),
        Err(_) => Err(busy(format!("nothing for {} seconds", HEALTH.as_secs()))),
    }
}

/// From now on; 0 is the end.
pub(super) async fn set_timeout(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(body): Body<Timeout>,
) -> Result<StatusCode> {
    let timeout = time::timeout(body.timeout)?;
    extend(&state, &workspace, &id, timeout, false).await
}

/// For at least this long from now on.
pub(super) async fn refresh(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(id): Path<String>,
    Body(body): Body<Refresh>,
) -> Result<StatusCode> {
    let timeout = time::timeout(body.duration.unwrap_or(DEFAULT_TIMEOUT))?;
    extend(&state, &workspace, &id, timeout, true).await
}

async fn extend(
    state: &AppState,
    workspace: &Workspace,
    id: &str,
    timeout: i64,
    only_extend: bool,
) -> Result<StatusCode> {
    let found = find(state, workspace, id)?;
    let Some(sandbox) = &found.sandbox else {
        return Err(Error::invalid(format!(
            "{} was not made through this API, and lives until it is deleted: it has no timeout",
            found.agent.profile.name
        )));
    };
    if !state.sandboxes.set_end(sandbox, timeout, only_extend).await? {
        // Old SDKs try this first, and resume it if it is not there.
        return Err(Error::new(
            StatusCode::NOT_FOUND,
            format!("sandbox {id} is paused, and its time does not run"),
        ));
    }
    if timeout == 0 && !only_extend {
        // To its end, also if whoever asked goes away.
        let _ = tokio::spawn(sandboxes::expire(state.sandboxes.clone(), sandbox.id.clone())).await;
    }
    Ok(StatusCode::NO_CONTENT)
}
