//! Forks: new agents that begin as another is, or was at a snapshot, each with an identity of its own.
//!
//! Home and image first, then the record, which decides. A fork with memory begins as `hibernated`, and
//! comes up like any other agent that was put to disk; that the image is foreign tells the start to say
//! who it is now.

use std::sync::Arc;

use dorm_engine::Id;
use futures_util::{StreamExt as _, stream};

use super::registry::Context;
use super::{Agent, Registry, Trouble, images};
use crate::faults::Point;
use crate::records::{ImageRecord, NewAgentRecord, Reach, SnapshotKind, SnapshotRecord, State, Status, now};

const VERB: &str = "be forked";
const AT_ONCE: usize = 4;

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
        let (snapshot, passing) = match from {
            Some(snapshot) => (snapshot, false),
            None => (source.snapshot("for a fork", kind).await?, true),
        };
        let full = !files_only && snapshot.kind == SnapshotKind::Full;
        let (ctx, snapshot_ref) = (&self.ctx, &snapshot);
        let one = |name: String| async move {
            let made = make(ctx, source, snapshot_ref, name, full).await?;
            if start && let Err(trouble) = made.ensure_running().await {
                undo(&made).await;
                return Err(trouble);
            }
            Ok(made)
        };
        let forks: Vec<Result<_, Trouble>> = stream::iter(names.into_iter().map(one))
            .buffered(AT_ONCE)
            .collect()
            .await;
        if passing && let Err(trouble) = source.delete_snapshot(&snapshot).await {
            tracing::warn!(agent = %source.profile.name, reason = %trouble.in_full(), "a passing snapshot is left");
        }
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
}

async fn undo(agent: &Arc<Agent>) {
    if let Err(error) = agent.delete().await {
        tracing::error!(agent = %agent.profile.name, reason = %error.in_full(), "a fork is left");
    }
}

async fn make(
    ctx: &Arc<Context>,
    source: &Arc<Agent>,
    snapshot: &SnapshotRecord,
    name: String,
    full: bool,
) -> Result<Arc<Agent>, Trouble> {
    let id = Id::random();
    match parts(ctx, source, snapshot, &id, name, full).await {
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
    source: &Arc<Agent>,
    snapshot: &SnapshotRecord,
    id: &Id,
    name: String,
    full: bool,
) -> Result<Arc<Agent>, Trouble> {
    let profile = &source.profile;
    let disk = profile.spec.limits.disk;
    ctx.homes
        .create_from_snapshot(id, &snapshot.id, disk)
        .await
        .map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ForkHomeMade).await?;
    let image = if full {
        Some(inherit(ctx, source, snapshot, id).await?)
    } else {
        None
    };
    ctx.faults.reach(Point::ForkImageMade).await?;
    let state = if full { State::Hibernated } else { State::Stopped };
    let new = NewAgentRecord {
        id: id.clone(),
        workspace: profile.workspace.clone(),
        name,
        template_id: profile.template_id.clone(),
        template_name: profile.template_name.clone(),
        lifetime: profile.lifetime,
        spec: profile.spec.clone(),
        defaults: profile.defaults.clone(),
        status: Status::now(state, format!("forked from {}", profile.name)),
        uid_base: full.then_some(profile.uid_base),
        image,
        reach: Reach::clone(&source.reach()),
    };
    let record = ctx.store.insert_agent(&new, ctx.slots).await?;
    ctx.recorded.send_modify(|count| *count += 1);
    let agent = Agent::new(ctx.clone(), record);
    ctx.enroll(&agent);
    Ok(agent)
}

async fn inherit(
    ctx: &Arc<Context>,
    source: &Arc<Agent>,
    snapshot: &SnapshotRecord,
    id: &Id,
) -> Result<ImageRecord, Trouble> {
    let image = Id::random();
    let to = images::new_path_of(ctx, id, &image)
        .await
        .map_err(Trouble::disk(VERB))?;
    images::share(&images::path(source, &snapshot.id), &to)
        .await
        .map_err(Trouble::disk(VERB))?;
    let generation = ctx.homes.generation(id).await.map_err(Trouble::engine(VERB))?;
    Ok(ImageRecord {
        id: image,
        generation,
        size: snapshot.size,
        made: now(),
        current: true,
        foreign: true,
    })
}
