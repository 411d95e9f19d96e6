//! Back to a snapshot. What the agent is now is kept first, while it is held still, and nothing of it goes on after that. The home and
//! memory to go back to are made ready beside the present ones. Then the box ends, the home is exchanged in one step, and
//! the memory of the snapshot, if it has any, becomes the agent's own: it is then as if it had been put to disk at that
//! instant.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::Id;

use super::decide::{Request, Rest};
use super::standby::as_before;
use super::transition::Setback;
use super::{Agent, Trouble, images, snapshot};
use crate::faults::Point;
use crate::records::{ImageRecord, SnapshotKind, SnapshotRecord, now};

const VERB: &str = "be rolled back";

/// What a rollback has left of what was there before it.
#[derive(Debug)]
pub struct RolledBack {
    pub before: SnapshotRecord,
    /// What memory is lost, and why: that of before, which could not be saved, or that of the snapshot, which could not be brought back.
    pub lost: Option<String>,
}

impl Agent {
    /// Returns when it runs again, if it ran or slept before or the snapshot has memory.
    pub async fn roll_back(self: &Arc<Self>, snapshot: &SnapshotRecord) -> Result<RolledBack, Trouble> {
        self.can_go_on_from(snapshot)?;
        if snapshot.kind == SnapshotKind::Full {
            // Its memory could not be brought back, and what is there now would be gone.
            self.can_save().map_err(Trouble::NoImages)?;
        }
        let (agent, snapshot) = (Arc::clone(self), snapshot.clone());
        let rolled_back = async move {
            let had_memory = agent.published().current_box.is_some() || agent.current_image().is_some();
            let (before, known) = (Id::random(), agent.setback());
            let request = Request::RollBack {
                snapshot: snapshot.id.clone(),
                kind: snapshot.kind,
                before: before.clone(),
            };
            agent.ask(request).await?;
            if had_memory || snapshot.kind == SnapshotKind::Full {
                agent.ensure_running().await?;
            }
            let before = agent.find_snapshot(before.as_str()).await?;
            let lost = agent.setback().filter(|setback| known.as_ref() != Some(setback));
            let lost = lost.map(|setback| setback.what);
            Ok(RolledBack { before, lost })
        };
        self.ctx.to_the_end(VERB, rolled_back).await
    }
}

/// Keeps what the agent is, which stays still from then on.
pub(super) async fn keep_present(
    agent: &Arc<Agent>,
    from: Rest,
    snapshot: &Id,
    before: &Id,
) -> Result<(), Setback> {
    let label = format!("before the rollback to {snapshot}");
    let kept = match snapshot::take_the_last(agent, from, before, &label, SnapshotKind::Full).await {
        // Better its files than nothing.
        Err(trouble) if trouble.is_about_memory() => {
            let why = trouble.in_full();
            let what = format!("what was in its memory before the rollback is lost: {why}");
            agent.note_setback(what).await;
            snapshot::take_the_last(agent, from, before, &label, SnapshotKind::Files).await
        }
        kept => kept,
    };
    match kept {
        Ok(()) => Ok(()),
        Err(trouble) => Err(as_before(agent, from, trouble).await),
    }
}

pub(super) async fn roll_back(
    agent: &Arc<Agent>,
    from: Rest,
    snapshot: &Id,
    kind: SnapshotKind,
) -> Result<(), Setback> {
    let memory = match stage(agent, snapshot, kind).await {
        Ok(memory) => memory,
        Err(trouble) => return Err(as_before(agent, from, trouble).await),
    };
    match exchange(agent, snapshot, memory.as_ref()).await {
        Ok(()) => Ok(()),
        Err(trouble) => {
            let recorded = agent.image().map(|image| image.id);
            if let Some(Staged { id, .. }) = memory
                && recorded != Some(id.clone())
            {
                images::discard(agent, &id).await;
            }
            Err(Setback::at(Rest::Failed, trouble))
        }
    }
}

/// The memory of the snapshot as an image of the agent, which nothing speaks of yet.
struct Staged {
    id: Id,
    size: u64,
}

/// All that takes room on the disk, beside what is there. If it fails, nothing has happened.
async fn stage(agent: &Arc<Agent>, snapshot: &Id, kind: SnapshotKind) -> Result<Option<Staged>, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    let mut memory = None;
    let staged = async {
        ctx.faults.reach(Point::RollBackRecorded).await?;
        let disk = agent.profile.spec.limits.disk;
        let copied = ctx.homes.stage(id, snapshot, disk).await;
        copied.map_err(Trouble::engine(VERB))?;
        if kind == SnapshotKind::Full {
            memory = Some(share(agent, snapshot).await?);
        }
        ctx.faults.reach(Point::RollBackStaged).await?;
        // What it was is in a snapshot of its own.
        ctx.store.set_image(id, None).await?;
        Ok(())
    };
    let staged = staged.await;
    if let Err(trouble) = staged {
        if let Some(Staged { id, .. }) = &memory {
            images::discard(agent, id).await;
        }
        ctx.homes.unstage(id).await;
        return Err(trouble);
    }
    if let Some(old) = agent.set_image(None) {
        images::discard(agent, &old.id).await;
    }
    Ok(memory)
}

async fn share(agent: &Arc<Agent>, snapshot: &Id) -> Result<Staged, Trouble> {
    let found = agent.find_snapshot(snapshot.as_str()).await?;
    agent.can_go_on_from(&found)?;
    let size = found.size;
    let id = Id::random();
    let to = images::new_path(agent, &id).await.map_err(Trouble::disk(VERB))?;
    let shared = images::share(&images::path(agent, snapshot), &to).await;
    shared.map_err(Trouble::disk(VERB))?;
    Ok(Staged { id, size })
}

async fn exchange(agent: &Arc<Agent>, snapshot: &Id, memory: Option<&Staged>) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    agent.cut_links().await;
    let stopped = ctx.engine.stop(id, Duration::ZERO).await;
    stopped.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::RollBackBoxGone).await?;
    let exchanged = ctx.homes.exchange(id).await;
    let generation = exchanged.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::RollBackHomeBack).await?;
    let image = memory.map(|memory| adopted(memory, generation));
    ctx.store.move_to_snapshot(id, snapshot, image.as_ref()).await?;
    agent.set_image(image);
    ctx.faults.reach(Point::RollBackMoved).await?;
    Ok(())
}

/// The image as the agent's own, valid with the home of this generation.
fn adopted(memory: &Staged, generation: u64) -> ImageRecord {
    ImageRecord {
        id: memory.id.clone(),
        generation,
        size: memory.size,
        made: now(),
        current: true,
        // It may be of a time before the agent was told who it is, and must not draw the same random numbers again.
        foreign: true,
        cpu_usec: None,
    }
}
