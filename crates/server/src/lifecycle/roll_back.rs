//! Back to a snapshot. The box ends, the home is exchanged in one step, and the memory of the snapshot, if
//! it has any, becomes the agent's own: it is then as if it had been put to disk at that instant.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{EngineError, Id};

use super::decide::{Request, Rest};
use super::transition::Setback;
use super::{Agent, Trouble, images};
use crate::faults::Point;
use crate::records::{ImageRecord, SnapshotKind, SnapshotRecord, now};

const VERB: &str = "be rolled back";

impl Agent {
    /// Returns when it runs again, if it ran or slept before or the snapshot has memory. What was there
    /// before is kept as the snapshot that is returned.
    pub async fn roll_back(self: &Arc<Self>, snapshot: &SnapshotRecord) -> Result<SnapshotRecord, Trouble> {
        let had_memory = self.published().current_box.is_some() || self.current_image().is_some();
        let label = format!("before the rollback to {}", snapshot.id);
        let before = match self.snapshot(&label, SnapshotKind::Full).await {
            Ok(before) => before,
            // Better its files than nothing.
            Err(trouble) if is_about_memory(&trouble) => {
                tracing::warn!(agent = %self.profile.name, reason = %trouble.in_full(), "only its files are kept");
                self.snapshot(&label, SnapshotKind::Files).await?
            }
            Err(trouble) => return Err(trouble),
        };
        self.ask(Request::RollBack {
            snapshot: snapshot.id.clone(),
            kind: snapshot.kind,
        })
        .await?;
        if had_memory || snapshot.kind == SnapshotKind::Full {
            self.ensure_running().await?;
        }
        Ok(before)
    }
}

fn is_about_memory(trouble: &Trouble) -> bool {
    match trouble {
        Trouble::NoImages(_) => true,
        Trouble::Engine { source, .. } => {
            matches!(
                **source,
                EngineError::CannotCheckpoint(_) | EngineError::BadImage(_)
            )
        }
        _ => false,
    }
}

pub(super) async fn roll_back(agent: &Arc<Agent>, snapshot: &Id, kind: SnapshotKind) -> Result<(), Setback> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    let failed = |error| Setback::at(Rest::Failed, Trouble::engine(VERB)(error));
    let fell = |trouble| Setback::at(Rest::Failed, trouble);
    ctx.faults
        .reach(Point::RollBackRecorded)
        .await
        .map_err(|fault| fell(fault.into()))?;
    agent.links.cut().await;
    ctx.engine.stop(id, Duration::ZERO).await.map_err(failed)?;
    // What it was is in a snapshot of its own.
    ctx.store
        .set_image(id, None)
        .await
        .map_err(|error| fell(error.into()))?;
    if let Some(old) = agent.set_image(None) {
        images::discard(agent, &old.id).await;
    }
    let reached = ctx.faults.reach(Point::RollBackBoxGone).await;
    reached.map_err(|fault| fell(fault.into()))?;
    let disk = agent.profile.spec.limits.disk;
    ctx.homes.roll_back(id, snapshot, disk).await.map_err(failed)?;
    let reached = ctx.faults.reach(Point::RollBackHomeBack).await;
    reached.map_err(|fault| fell(fault.into()))?;
    if kind == SnapshotKind::Full {
        adopt_memory(agent, snapshot).await.map_err(fell)?;
    }
    ctx.store
        .move_to_snapshot(id, snapshot)
        .await
        .map_err(|error| fell(error.into()))?;
    agent.set_at_snapshot(Some(snapshot.clone()));
    Ok(())
}

async fn adopt_memory(agent: &Arc<Agent>, snapshot: &Id) -> Result<(), Trouble> {
    let record = agent.find_snapshot(snapshot.as_str()).await?;
    let from = images::path(agent, snapshot);
    let image = inherit(agent, &from, record.size).await?;
    agent.ctx.store.set_image(&agent.profile.id, Some(&image)).await?;
    agent.set_image(Some(image));
    Ok(())
}

/// An image of its own with the content of `from`, valid with the home of this moment.
async fn inherit(agent: &Agent, from: &std::path::Path, size: u64) -> Result<ImageRecord, Trouble> {
    let id = Id::random();
    let to = images::new_path(agent, &id).await.map_err(Trouble::disk(VERB))?;
    images::share(from, &to).await.map_err(Trouble::disk(VERB))?;
    let generation = agent.ctx.homes.generation(&agent.profile.id).await;
    Ok(ImageRecord {
        id,
        generation: generation.map_err(Trouble::engine(VERB))?,
        size,
        made: now(),
        current: true,
        foreign: false,
    })
}
