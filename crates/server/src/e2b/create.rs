//! `POST /v2/sandboxes` and its older form.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use dorm_engine::Id;
use http::{HeaderMap, StatusCode};

use super::errors::{Error, Result};
use super::extract::Body;
use super::network;
use super::types::{Access, DEFAULT_TIMEOUT, NewSandbox};
use super::view::Found;
use super::{ready, snapshots, tags, time};
use crate::api::{ApiError, AppState, validate};
use crate::lifecycle::{Agent, Creation, NewFork};
use crate::records::{
    AgentSpec, Lifetime, OnTimeout, PauseMode, Reach, SandboxRecord, Sleep, SnapshotRecord, TemplateRecord,
    Workspace, now,
};
use crate::store::StoreError;

const IDEMPOTENCY_KEY: &str = "idempotency-key";
const MAX_METADATA: usize = 64 * 1024;

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    headers: HeaderMap,
    Body(new): Body<NewSandbox>,
) -> Result<(StatusCode, axum::Json<Access>)> {
    let key = idempotency_key(&headers)?;
    let _turn = match &key {
        Some(key) => Some(state.sandboxes.one_by_one(&workspace, key).await),
        None => None,
    };
    let before = key
        .as_ref()
        .and_then(|key| state.sandboxes.made_before(&workspace, key))
        .and_then(|sandbox| Some((state.registry.by_id(&sandbox.id)?, sandbox)));
    let found = match before {
        Some((agent, sandbox)) => Found {
            agent,
            sandbox: Some(sandbox),
        },
        None => make(&state, &workspace, new, key).await?,
    };
    Ok((StatusCode::CREATED, axum::Json(found.access(&state, &headers))))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(key) = headers.get(IDEMPOTENCY_KEY) else {
        return Ok(None);
    };
    match key.to_str() {
        Ok(key) if (1..=255).contains(&key.len()) => Ok(Some(key.to_owned())),
        _ => Err(Error::invalid(
            "an Idempotency-Key is 1 to 255 printable characters",
        )),
    }
}

/// From what a sandbox can be made.
enum Base {
    Template(Box<TemplateRecord>),
    Snapshot(Box<SnapshotRecord>),
}

async fn make(
    state: &AppState,
    workspace: &Workspace,
    new: NewSandbox,
    idempotency: Option<String>,
) -> Result<Found> {
    if new.iam.is_some() {
        return Err(Error::invalid(
            "iam: this server issues no workload tokens; create the sandbox without it",
        ));
    }
    let base = base(state, workspace, &new.template_id).await?;
    let timeout = time::timeout(new.timeout.unwrap_or(DEFAULT_TIMEOUT))?;
    let metadata = new.metadata.unwrap_or_default();
    if serde_json::to_string(&metadata).map_or(usize::MAX, |json| json.len()) > MAX_METADATA {
        return Err(Error::invalid(format!(
            "the metadata is longer than {MAX_METADATA} bytes"
        )));
    }
    let env = new.env_vars.unwrap_or_default();
    validate::env(&env)?;
    if let Some(secret) = crate::secrets::missing(&*state.store, workspace, &env).await? {
        return Err(Error::invalid(format!("envVars: secret {secret:?} not found")));
    }
    let policy = network::Policy::read(new.network.as_ref(), new.allow_internet_access)?;
    let volumes = new.volume_mounts.unwrap_or_default();
    let wanted: Vec<_> = volumes
        .iter()
        .map(|volume| (volume.name.clone(), volume.path.clone()))
        .collect();
    // Held until the sandbox is there.
    let using = state.volumes.mounts(workspace, &wanted).await?;
    let started = now();
    let (template, alias) = match &base {
        Base::Template(template) => {
            let (name, _) = tags::split(&template.name);
            (name.clone(), name)
        }
        Base::Snapshot(snapshot) => (snapshot.id.to_string(), snapshot.label.clone()),
    };
    let record = SandboxRecord {
        template,
        alias: (!alias.is_empty()).then_some(alias),
        metadata,
        started,
        end: Some(started + timeout),
        timeout,
        on_timeout: match (new.auto_pause, new.auto_pause_memory) {
            (false, _) => OnTimeout::Kill,
            (true, Some(false)) => OnTimeout::Pause(PauseMode::Files),
            (true, _) => OnTimeout::Pause(PauseMode::Full),
        },
        auto_resume: new.auto_resume.is_some_and(|auto| auto.enabled),
        paused: None,
        network: new.network,
        allow_internet: new.allow_internet_access,
        volumes,
        idempotency,
    };
    let reach = Reach {
        public: policy.public,
        host: policy.mask_host,
    };
    let id = Id::random();
    let name = name_of(&id);
    let mut ready = None;
    let agent = match base {
        Base::Template(template) => {
            let creation = Creation {
                id,
                workspace: workspace.clone(),
                name,
                template: template.id.to_string(),
                // It outlives its box: what ends it is its time.
                lifetime: Lifetime::Persistent,
                spec: AgentSpec {
                    isolation: state
                        .config
                        .isolation
                        .settle(&*state.engine)
                        .map_err(ApiError::from)?,
                    limits: template.built.limits.of(&state.config.defaults),
                    env,
                    sleep: Sleep::default(),
                    network: policy.egress,
                    volumes: using.mounts.clone(),
                },
                reach,
                start: true,
                sandbox: Some(record.clone()),
            };
            ready = template.defaults.ready;
            state.registry.create(creation).await?
        }
        Base::Snapshot(snapshot) => {
            let fork = NewFork {
                id,
                name,
                env,
                reach: Some(reach),
                network: Some(policy.egress),
                volumes: (!using.mounts.is_empty()).then(|| using.mounts.clone()),
                sandbox: Some(record.clone()),
            };
            state.registry.fork_kept(&snapshot, fork).await?
        }
    };
    let found = known(state, agent, record);
    if let Some(command) = ready {
        ready::wait(state, &found, &command).await?;
    }
    Ok(found)
}

/// Of the agent that is a sandbox.
pub(super) fn name_of(id: &Id) -> String {
    format!("sandbox-{}", &id.as_str()[..8])
}

pub(super) fn known(state: &AppState, agent: Arc<Agent>, record: SandboxRecord) -> Found {
    let sandbox = state.sandboxes.add(&agent, record);
    Found {
        agent,
        sandbox: Some(sandbox),
    }
}

/// By id, name, or `namespace/name:tag`, of a snapshot or a template.
async fn base(state: &AppState, workspace: &Workspace, wanted: &str) -> Result<Base> {
    if wanted.is_empty() {
        return Err(Error::invalid("templateID is missing"));
    }
    let plain = snapshots::plain_name(wanted);
    if let Some(snapshot) = snapshots::find(state, workspace, plain).await? {
        return Ok(Base::Snapshot(Box::new(snapshot)));
    }
    let named = tags::of(wanted)?;
    match state.store.template_by_name_or_id(workspace, &named).await {
        Ok(template) => Ok(Base::Template(Box::new(template))),
        Err(StoreError::NotFound { .. }) => Err(Error::new(
            StatusCode::NOT_FOUND,
            format!(
                "template {wanted:?} not found; `dorm template ls` shows what there is, `dorm template build` makes one"
            ),
        )),
        Err(error) => Err(error.into()),
    }
}
