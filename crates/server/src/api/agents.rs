//! `/v1/agents`.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use dorm_engine::{BoxStats, HomeUsage, Id};
use futures_util::{StreamExt as _, stream};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{ApiError, ApiResult};
use super::extract::{Json, Path, Query};
use super::state::AppState;
use super::types::{self, Agent, AgentChange, ErrorBody, NewAgent, Stats, StopRequest};
use super::{network, validate};
use crate::lifecycle::{self, Creation};
use crate::records::{Lifetime, Reach, State as AgentState, Workspace};

/// An agent of a request that names none is made from this template.
const DEFAULT_TEMPLATE: &str = "base";
const MEASURED_AT_ONCE: usize = 16;

pub(super) fn router() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(show, change, delete))
        .routes(routes!(start))
        .routes(routes!(stop))
        .routes(routes!(stats))
}

/// Create an agent
#[utoipa::path(post, path = "/v1/agents", tag = "agents", request_body = NewAgent, responses(
    (status = 201, body = Agent),
    (status = 400, body = ErrorBody),
    (status = 404, description = "No such template", body = ErrorBody),
    (status = 409, description = "The name is taken", body = ErrorBody),
    (status = 507, description = "No space", body = ErrorBody),
))]
async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Json(new): Json<NewAgent>,
) -> ApiResult<(StatusCode, Json<Agent>)> {
    let template = new
        .template
        .clone()
        .unwrap_or_else(|| DEFAULT_TEMPLATE.to_owned());
    let defaults = match state.store.template_by_name_or_id(&workspace, &template).await {
        Ok(found) => found.built.limits.of(&state.config.defaults),
        // That it is not there is told once the rest of the request is known to be right.
        Err(_) => state.config.defaults.clone(),
    };
    let mut spec = validate::spec(&new, &defaults)?;
    let isolation = new.isolation.unwrap_or(state.config.isolation);
    spec.isolation = isolation.settle(&*state.engine)?;
    let wanted: Vec<_> = new
        .volumes
        .into_iter()
        .map(|mount| (mount.volume, mount.path))
        .collect();
    // Held until the agent is there.
    let using = state.volumes.mounts(&workspace, &wanted).await?;
    spec.volumes.clone_from(&using.mounts);
    let creation = Creation {
        id: Id::random(),
        workspace,
        spec,
        name: new.name,
        template,
        lifetime: match new.lifetime {
            Some(types::Lifetime::Ephemeral) => Lifetime::Ephemeral,
            Some(types::Lifetime::Persistent) | None => Lifetime::Persistent,
        },
        reach: Reach {
            public: new.public,
            ..Reach::default()
        },
        start: new.start,
        sandbox: None,
    };
    let agent = state.registry.create(creation).await?;
    Ok((StatusCode::CREATED, Json(in_full(&state, &agent))))
}

/// List agents, by name
#[utoipa::path(get, path = "/v1/agents", tag = "agents", params(ListQuery),
    responses((status = 200, body = Vec<Agent>)))]
async fn list(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Query(query): Query<ListQuery>,
) -> ApiResult<Json<Vec<Agent>>> {
    let agents = state.registry.list(&workspace);
    if !query.usage {
        return Ok(Json(agents.iter().map(|agent| on_wire(&state, agent)).collect()));
    }
    let measured = agents.into_iter().map(|agent| measured(&state, agent));
    Ok(Json(
        stream::iter(measured).buffered(MEASURED_AT_ONCE).collect().await,
    ))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    /// Say what each holds of memory and disk, too.
    #[serde(default)]
    usage: bool,
}

async fn measured(state: &AppState, agent: Arc<lifecycle::Agent>) -> Agent {
    let id = &agent.profile.id;
    let mut on_wire = on_wire(state, &agent);
    let memory = match agent.published().current_box {
        Some(_) => state.engine.stats(id).await.map(|stats| stats.memory_bytes).ok(),
        None => Some(0),
    };
    let files = state.homes.usage(id).await.map(|usage| usage.used).ok();
    let saved = agent.memory_on_disk().await;
    on_wire.memory_used = memory;
    on_wire.disk_used = files.map(|files| files + saved);
    on_wire
}

/// Show an agent
#[utoipa::path(get, path = "/v1/agents/{agent}", tag = "agents", params(("agent", description = "Name or id")),
    responses((status = 200, body = Agent), (status = 404, body = ErrorBody)))]
async fn show(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    Ok(Json(in_full(&state, &agent)))
}

/// Change an agent
///
/// What is absent stays as it is. When it goes to sleep by itself changes at once, in any state, and it is neither woken nor
/// restarted for that.
///
/// It keeps its files. For another isolation it is stopped, so that what is in its memory is lost, and started again if it ran or
/// slept; the answer comes then. If it cannot be, it is as it was, but for its memory.
#[utoipa::path(patch, path = "/v1/agents/{agent}", tag = "agents", request_body = AgentChange,
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 400, body = ErrorBody),
    (status = 404, body = ErrorBody),
    (status = 409, description = "It is ephemeral and was to have another isolation, or is being deleted", body = ErrorBody),
    (status = 503, description = "Such agents cannot be run here", body = ErrorBody),
    (status = 507, description = "No space", body = ErrorBody),
))]
async fn change(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(change): Json<AgentChange>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let sleep = validate::sleep_change(&change)?;
    // First, as it is what may fail.
    if let Some(isolation) = change.isolation {
        agent.set_isolation(isolation.settle(&*state.engine)?).await?;
    }
    agent.set_sleep(sleep).await?;
    Ok(Json(in_full(&state, &agent)))
}

/// Delete an agent, its box and its home
#[utoipa::path(delete, path = "/v1/agents/{agent}", tag = "agents", params(("agent", description = "Name or id")),
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn delete(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<StatusCode> {
    state.registry.get(&workspace, &agent)?.delete().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Start an agent
///
/// Answers when its guest does. A running agent is left as it is; a failed one is tried again.
#[utoipa::path(post, path = "/v1/agents/{agent}/start", tag = "agents",
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 404, body = ErrorBody),
    (status = 409, description = "It is being deleted", body = ErrorBody),
    (status = 500, description = "It did not start; the message says why", body = ErrorBody),
))]
async fn start(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    agent.start().await?;
    Ok(Json(on_wire(&state, &agent)))
}

/// Stop an agent
///
/// Answers when nothing of its box is left. An ephemeral agent is deleted.
#[utoipa::path(post, path = "/v1/agents/{agent}/stop", tag = "agents", request_body = Option<StopRequest>,
    params(("agent", description = "Name or id")), responses(
    (status = 200, body = Agent),
    (status = 404, body = ErrorBody),
    (status = 409, description = "It is being deleted", body = ErrorBody),
))]
async fn stop(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
    Json(request): Json<StopRequest>,
) -> ApiResult<Json<Agent>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let invalid = |_| ApiError::invalid("grace is no length of time").hint("seconds, 0 or more, as a number");
    let grace = request
        .grace
        .map(Duration::try_from_secs_f64)
        .transpose()
        .map_err(invalid)?;
    agent.stop(grace).await?;
    Ok(Json(on_wire(&state, &agent)))
}

/// What an agent uses now
#[utoipa::path(get, path = "/v1/agents/{agent}/stats", tag = "agents",
    params(("agent", description = "Name or id")),
    responses((status = 200, body = Stats), (status = 404, body = ErrorBody)))]
async fn stats(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path(agent): Path<String>,
) -> ApiResult<Json<Stats>> {
    let agent = state.registry.get(&workspace, &agent)?;
    let (id, published) = (&agent.profile.id, agent.published());
    let limits = &agent.profile.spec.limits;
    let used = match published.current_box {
        // It may end at any moment, and then uses nothing.
        Some(_) => state.engine.stats(id).await.unwrap_or_default(),
        None => BoxStats::default(),
    };
    let nothing = HomeUsage {
        used: 0,
        limit: limits.disk,
    };
    let home = state.homes.usage(id).await.unwrap_or(nothing);
    Ok(Json(Stats {
        id: id.clone(),
        name: agent.profile.name.clone(),
        state: published.status.state.as_str().to_owned(),
        cpu_seconds: used.cpu_usec as f64 / 1e6,
        cpus: f64::from(limits.cpu_millis) / 1000.0,
        memory_used: used.memory_bytes,
        memory_peak: used.memory_peak_bytes,
        memory_limit: limits.memory,
        pids: used.pids,
        pids_limit: limits.pids,
        disk_used: home.used,
        disk_limit: home.limit,
        oom_kills: used.oom_kills,
        forks_refused: used.forks_refused,
    }))
}

/// All there is to say of it.
fn in_full(state: &AppState, agent: &Arc<lifecycle::Agent>) -> Agent {
    let about = state.engine.about(agent.isolation());
    Agent {
        runs_on: Some(types::RunsOn {
            engine: about.engine,
            accelerator: about.accelerator,
            slow: about.slow,
            files: about.files_by,
            memory: about.memory_by,
        }),
        ..on_wire(state, agent)
    }
}

pub(super) fn on_wire(state: &AppState, agent: &Arc<lifecycle::Agent>) -> Agent {
    let (profile, published) = (&agent.profile, agent.published());
    let (limits, sleep) = (&profile.spec.limits, agent.sleep());
    let seconds = |millis: u64| millis as f64 / 1000.0;
    let image = agent.image();
    let address = || state.config.network_range.address_of(profile.slot);
    Agent {
        id: profile.id.clone(),
        name: profile.name.clone(),
        template: profile.template_name.clone(),
        lifetime: match profile.lifetime {
            Lifetime::Persistent => types::Lifetime::Persistent,
            Lifetime::Ephemeral => types::Lifetime::Ephemeral,
        },
        isolation: agent.isolation(),
        runs_on: None,
        state: published.status.state.as_str().to_owned(),
        reason: published.status.reason,
        since: published.status.since,
        created: profile.created,
        cpus: f64::from(limits.cpu_millis) / 1000.0,
        memory: limits.memory,
        disk: limits.disk,
        pids: limits.pids,
        env: profile.spec.env.clone(),
        address: published
            .current_box
            .as_ref()
            .and_then(|_| address())
            .map(|address| address.to_string()),
        pid: published.current_box.map(|record| record.pid),
        idle: (published.status.state == AgentState::Running).then(|| match agent.open_requests() {
            0 => agent.quiet_since().elapsed().as_secs_f64(),
            _ => 0.0,
        }),
        standby_after: sleep.standby_after.map(seconds),
        durable_after: sleep.durable_after.map(seconds),
        hibernate_after: sleep.hibernate_after.map(seconds),
        keep_awake: sleep.keep_awake,
        public: agent.reach().public,
        network: network::on_wire(&agent.network()),
        volumes: profile
            .spec
            .volumes
            .iter()
            .map(|mount| types::VolumeMount {
                volume: mount.volume.to_string(),
                path: mount.path.clone(),
            })
            .collect(),
        durable: image.as_ref().is_some_and(|image| image.current),
        image_size: image.map(|image| image.size),
        memory_used: None,
        disk_used: None,
    }
}
