//! Forks: new agents that begin as another is, or was at a snapshot, each with an identity of its own.
//!
//! Home and image first, then the record, which decides. A fork with memory begins as `hibernated`, and
//! comes up like any other agent that was put to disk; that the image is foreign tells the start to say
//! who it is now.

use std::path::Path;
use std::sync::Arc;

use dorm_engine::network::Policy;
use dorm_engine::{EngineError, Env, Id, Isolation, VolumeMount};
use futures_util::{StreamExt as _, stream};

use super::registry::Context;
use super::{Agent, Registry, Trouble, convert, images, snapshot};
use crate::faults::Point;
use crate::records::{
    ImageRecord, NewAgentRecord, Origin, Reach, SandboxRecord, SnapshotKind, SnapshotRecord, State, Status,
    now,
};

const VERB: &str = "be forked";
const AT_ONCE: usize = 4;

/// In what a fork differs from the agent that it is made of.
#[derive(Debug, Clone)]
pub struct NewFork {
    pub id: Id,
    pub name: String,
    /// Beside what the other has.
    pub env: Env,
    /// That of the other if absent.
    pub reach: Option<Reach>,
    /// That of the other if absent.
    pub network: Option<Policy>,
    /// Those of the other if absent. With others it begins from its files, as the memory is bound to them.
    pub volumes: Option<Vec<VolumeMount>>,
    /// If it is made through the E2B API.
    pub sandbox: Option<SandboxRecord>,
}

impl NewFork {
    pub fn named(name: String) -> Self {
        Self {
            id: Id::random(),
            name,
            env: Env::new(),
            reach: None,
            network: None,
            volumes: None,
            sandbox: None,
        }
    }
}

impl Registry {
    /// One fork of each name. From the snapshot, or from what the agent is now. If one fails, those
    /// that were made are deleted again.
    pub async fn fork(
        &self,
        source: &Arc<Agent>,
        names: Vec<String>,
        from: Option<SnapshotRecord>,
        files_only: bool,
        start: bool,
    ) -> Result<Vec<Arc<Agent>>, Trouble> {
        let kind = if files_only {
            SnapshotKind::Files
        } else {
            SnapshotKind::Full
        };
        let forks = names.into_iter().map(NewFork::named).collect();
        let (ctx, source) = (self.ctx.clone(), source.clone());
        let forked = async move {
            let forks = match from {
                Some(snapshot) => fork_all(&ctx, &source.origin(), &snapshot, kind, forks, start).await,
                None => fork_present(&ctx, &source, forks, kind, start).await?,
            };
            all_or_none(forks).await
        };
        self.ctx.to_the_end(VERB, forked).await
    }

    /// Forks of what the agent is now, each of which may fail by itself.
    pub async fn fork_each(
        &self,
        source: &Arc<Agent>,
        forks: Vec<NewFork>,
        kind: SnapshotKind,
        start: bool,
    ) -> Result<Vec<Result<Arc<Agent>, Trouble>>, Trouble> {
        let (ctx, source) = (self.ctx.clone(), source.clone());
        let forked = async move { fork_present(&ctx, &source, forks, kind, start).await };
        self.ctx.to_the_end(VERB, forked).await
    }

    /// A running agent made of a snapshot that is kept, whether or not there still is the agent that it is of.
    pub async fn fork_kept(&self, snapshot: &SnapshotRecord, fork: NewFork) -> Result<Arc<Agent>, Trouble> {
        let origin = snapshot.origin.clone();
        let origin = origin.ok_or_else(|| Trouble::NoSnapshot(snapshot.id.to_string()))?;
        let (ctx, snapshot) = (self.ctx.clone(), snapshot.clone());
        let forked = async move { fork_one(&ctx, &origin, &snapshot, SnapshotKind::Full, fork, true).await };
        self.ctx.to_the_end(VERB, forked).await
    }
}

async fn all_or_none(forks: Vec<Result<Arc<Agent>, Trouble>>) -> Result<Vec<Arc<Agent>>, Trouble> {
    let mut made = Vec::new();
    let mut first = None;
    for fork in forks {
        match fork {
            Ok(agent) => made.push(agent),
            Err(trouble) => first = first.or(Some(trouble)),
        }
    }
    match first {
        None => Ok(made),
        Some(trouble) => {
            for agent in &made {
                undo(agent).await;
            }
            Err(trouble)
        }
    }
}

async fn fork_present(
    ctx: &Arc<Context>,
    source: &Arc<Agent>,
    forks: Vec<NewFork>,
    kind: SnapshotKind,
    start: bool,
) -> Result<Vec<Result<Arc<Agent>, Trouble>>, Trouble> {
    // Files that go in the midst of it go with the agent.
    let because = |trouble: Trouble| match source.is_gone() || source.state() == State::Deleting {
        true => Trouble::NotFound(source.profile.name.clone()),
        false => trouble,
    };
    let snapshot = source.passing_snapshot(kind).await.map_err(because)?;
    let made = fork_all(ctx, &source.origin(), &snapshot, kind, forks, start).await;
    let made = made.into_iter().map(|fork| fork.map_err(because)).collect();
    if let Err(fault) = ctx.faults.reach(Point::ForkMade).await {
        tracing::warn!(agent = %source.profile.name, %fault, "its forks are made");
    }
    if let Err(trouble) = snapshot::delete(ctx, &snapshot).await {
        tracing::warn!(agent = %source.profile.name, reason = %trouble.in_full(), "a passing snapshot is left");
    }
    Ok(made)
}

async fn fork_all(
    ctx: &Arc<Context>,
    origin: &Origin,
    snapshot: &SnapshotRecord,
    kind: SnapshotKind,
    forks: Vec<NewFork>,
    start: bool,
) -> Vec<Result<Arc<Agent>, Trouble>> {
    let forks = forks
        .into_iter()
        .map(|fork| fork_one(ctx, origin, snapshot, kind, fork, start));
    stream::iter(forks).buffered(AT_ONCE).collect().await
}

async fn fork_one(
    ctx: &Arc<Context>,
    origin: &Origin,
    snapshot: &SnapshotRecord,
    kind: SnapshotKind,
    fork: NewFork,
    start: bool,
) -> Result<Arc<Agent>, Trouble> {
    if ctx.is_closed() {
        return Err(Trouble::ShuttingDown);
    }
    let same_volumes = fork
        .volumes
        .as_ref()
        .is_none_or(|volumes| *volumes == origin.spec.volumes);
    let full = kind == SnapshotKind::Full && snapshot.kind == SnapshotKind::Full && same_volumes;
    if full {
        convert::can_go_on(origin.spec.isolation, snapshot)?;
    }
    let made = make(ctx, origin, snapshot, fork, full).await?;
    if start && let Err(trouble) = come_up(&made).await {
        undo(&made).await;
        return Err(trouble);
    }
    Ok(made)
}

/// A fork that lost the memory it was to have is not one.
async fn come_up(fork: &Arc<Agent>) -> Result<(), Trouble> {
    fork.ensure_running().await?;
    match fork.setback() {
        None => Ok(()),
        Some(setback) => Err(Trouble::engine(VERB)(EngineError::BadImage(setback.what))),
    }
}

async fn undo(agent: &Arc<Agent>) {
    let undone = match agent.delete().await {
        // The next daemon does.
        Err(Trouble::ShuttingDown) => {
            let why = "the daemon ended while it was forked";
            agent.record_state(State::Deleting, why).await
        }
        deleted => deleted,
    };
    if let Err(error) = undone {
        tracing::error!(agent = %agent.profile.name, reason = %error.in_full(), "a fork is left");
    }
}

async fn make(
    ctx: &Arc<Context>,
    origin: &Origin,
    snapshot: &SnapshotRecord,
    fork: NewFork,
    full: bool,
) -> Result<Arc<Agent>, Trouble> {
    let id = fork.id.clone();
    match parts(ctx, origin, snapshot, fork, full).await {
        Ok(agent) => Ok(agent),
        Err(trouble) => {
            images::remove_of(ctx, &id).await;
            if let Err(error) = ctx.homes.delete(&id).await {
                tracing::error!(%id, %error, "the home of a fork that was not made is left");
            }
            Err(trouble)
        }
    }
}

async fn parts(
    ctx: &Arc<Context>,
    origin: &Origin,
    snapshot: &SnapshotRecord,
    fork: NewFork,
    full: bool,
) -> Result<Arc<Agent>, Trouble> {
    let disk = origin.spec.limits.disk;
    let made = ctx.homes.create_from_snapshot(&fork.id, &snapshot.id, disk).await;
    let generation = made.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ForkHomeMade).await?;
    let memory = images::path_of(ctx, &origin.agent, &snapshot.id);
    let image = if full {
        Some(inherit(ctx, &memory, snapshot.size, &fork.id, generation).await?)
    } else {
        ctx.engine.release(&fork.id, &memory).await;
        let left_out = ctx.engine.leave_memory_out(&fork.id).await;
        left_out.map_err(Trouble::engine(VERB))?;
        None
    };
    ctx.faults.reach(Point::ForkImageMade).await?;
    let state = if full { State::Hibernated } else { State::Stopped };
    let mut spec = origin.spec.clone();
    spec.env.extend(fork.env);
    spec.network = fork.network.unwrap_or(spec.network);
    spec.volumes = fork.volumes.unwrap_or(spec.volumes);
    let new = NewAgentRecord {
        id: fork.id,
        workspace: origin.workspace.clone(),
        name: fork.name,
        template_id: origin.template_id.clone(),
        template_name: origin.template_name.clone(),
        lifetime: origin.lifetime,
        spec,
        defaults: origin.defaults.clone(),
        status: Status::now(state, format!("forked from {}", origin.name)),
        // An image of processes is bound to their ids on the host; of a machine's there are none.
        uid_base: (full && origin.spec.isolation != Isolation::Vm).then_some(origin.uid_base),
        image,
        reach: fork.reach.unwrap_or_else(|| origin.reach.clone()),
        sandbox: fork.sandbox,
    };
    let record = ctx.store.insert_agent(&new, ctx.slots).await?;
    ctx.recorded.send_modify(|count| *count += 1);
    if let Err(fault) = ctx.faults.reach(Point::ForkRecorded).await {
        ctx.store.delete_agent(&new.id).await?;
        return Err(fault.into());
    }
    let agent = Agent::new(ctx.clone(), record);
    ctx.enroll(&agent);
    Ok(agent)
}

async fn inherit(
    ctx: &Arc<Context>,
    memory: &Path,
    size: u64,
    id: &Id,
    generation: u64,
) -> Result<ImageRecord, Trouble> {
    let image = Id::random();
    let to = images::new_path_of(ctx, id, &image)
        .await
        .map_err(Trouble::disk(VERB))?;
    images::share(memory, &to).await.map_err(Trouble::disk(VERB))?;
    Ok(ImageRecord {
        id: image,
        generation,
        size,
        made: now(),
        current: true,
        foreign: true,
        cpu_usec: None,
    })
}
