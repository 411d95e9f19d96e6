//! `/v1/agents/{agent}/pause`, `/hibernate`, `/wake` and `/why`.

use axum::Extension;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::agents::on_wire;
use super::errors::ApiResult;
use super::extract::{Json, Path};
use super::state::AppState;
use super::types::{Agent, ErrorBody, NextState, Setback, SleepTimes, Why};
use crate::lifecycle::why;
use crate::records::Workspace;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(pause))
        .routes(routes!(hibernate))
        .routes(routes!(wake))
        .routes(routes!(show_why))
}

/// Put an agent to standby
///
/// Answers when its processes are frozen. Its memory stays in RAM, and whatever reaches for it wakes it.
#[utoipa::path(post, path = "/v1/agents/{agent}/pause", tag = "agents",
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 404, body = ErrorBody),
    (status = 409, description = "It does not run", body = ErrorBody),
))]
async fn pause(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    agent.pause().await?;
    Ok(Json(on_wire(&state, &agent)))
}

/// Put an agent to disk
///
/// Answers when its memory is on disk for good and its processes are gone. Open streams are cut; the runs
/// go on when it wakes. If its memory cannot be saved, it goes on as it was.
#[utoipa::path(post, path = "/v1/agents/{agent}/hibernate", tag = "agents",
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 404, body = ErrorBody),
    (status = 409, description = "It does not run, or its memory cannot be saved", body = ErrorBody),
))]
async fn hibernate(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    agent.hibernate("asked to hibernate").await?;
    Ok(Json(on_wire(&state, &agent)))
}

/// Wake an agent
///
/// From standby, from disk, or from its files. Answers when its guest does.
#[utoipa::path(post, path = "/v1/agents/{agent}/wake", tag = "agents",
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 404, body = ErrorBody),
    (status = 500, description = "It did not wake; the message says why", body = ErrorBody),
))]
async fn wake(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    agent.start().await?;
    Ok(Json(on_wire(&state, &agent)))
}

/// Why an agent is as it is
///
/// What keeps it awake, or since when and why it sleeps; what will happen next; what of it outlives a crash.
#[utoipa::path(get, path = "/v1/agents/{agent}/why", tag = "agents",
    params(("agent", description = "Name or id")),
    responses((status = 200, body = Why), (status = 404, body = ErrorBody)))]
async fn show_why(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Why>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let why = why::why(&agent, &state.config.standby);
    Ok(Json(Why {
        id: agent.profile.id.clone(),
        name: agent.profile.name.clone(),
        state: why.status.state.as_str().to_owned(),
        reason: why.status.reason,
        since: why.status.since,
        because: why.because,
        next: why.next.map(|next| NextState {
            state: next.state.to_owned(),
            at: next.at,
        }),
        sleep: SleepTimes {
            standby_after: why.times.standby.map(|time| time.as_secs_f64()),
            durable_after: why.times.durable.map(|time| time.as_secs_f64()),
            hibernate_after: why.times.hibernate.map(|time| time.as_secs_f64()),
        },
        files: why.files,
        memory: why.memory,
        setback: why.setback.map(|note| Setback {
            time: note.time,
            what: note.what,
        }),
        no_images: agent.can_save().err(),
    }))
}
