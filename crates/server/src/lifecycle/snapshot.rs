//! Snapshots: a home, and perhaps the memory, at one instant. A live agent is held still for as long as
//! that takes, and goes on.

use std::sync::Arc;

use dorm_engine::{Dumped, EngineError, Id, Kept};

use super::decide::{Request, Rest};
use super::registry::Context;
use super::standby::as_before;
use super::transition::Setback;
use super::{Agent, Registry, Trouble, images, start};
use crate::faults::Point;
use crate::records::{SnapshotKind, SnapshotRecord, State, Status, now};

const VERB: &str = "be snapshotted";
pub(super) const HELD: &str = "held still for a snapshot";

impl Agent {
    /// Returns when the snapshot is on disk, and the agent goes on. One of an agent that has no memory
    /// is of its files.
    pub async fn snapshot(
        self: &Arc<Self>,
        label: &str,
        kind: SnapshotKind,
    ) -> Result<SnapshotRecord, Trouble> {
        let id = Id::random();
        self.ask(Request::Snapshot {
            id: id.clone(),
            label: Some(label.to_owned()),
            kind,
        })
        .await?;
        self.find_snapshot(id.as_str()).await
    }

    /// One that nobody sees: whoever took it deletes it, or the next daemon does.
    pub(super) async fn passing_snapshot(
        self: &Arc<Self>,
        kind: SnapshotKind,
    ) -> Result<SnapshotRecord, Trouble> {
        let id = Id::random();
        self.ask(Request::Snapshot {
            id: id.clone(),
            label: None,
            kind,
        })
        .await?;
        let size = match images::size(self, &id).await {
            Ok(size) => size,
            // It goes with its agent, perhaps.
            Err(error) => {
                discard(self, &id).await;
                return Err(Trouble::disk(VERB)(error));
            }
        };
        Ok(SnapshotRecord {
            id,
            agent: self.profile.id.clone(),
            made: now(),
            label: String::new(),
            kind: match size {
                Some(_) => SnapshotKind::Full,
                None => SnapshotKind::Files,
            },
            parent: None,
            isolation: self.isolation(),
            size: size.unwrap_or_default(),
            origin: None,
        })
    }

    pub async fn snapshots(&self) -> Result<Vec<SnapshotRecord>, Trouble> {
        Ok(self.ctx.store.snapshots_of(&self.profile.id).await?)
    }

    /// The snapshots, and bytes of files that were written since the one before, or else since the template.
    pub async fn measured_snapshots(&self) -> Result<Vec<(SnapshotRecord, u64)>, Trouble> {
        let all = self.snapshots().await?;
        let mut measured = Vec::new();
        for snapshot in &all {
            let parent = snapshot
                .parent
                .as_ref()
                .filter(|id| all.iter().any(|other| other.id == **id));
            let before = parent.unwrap_or(&self.profile.template_id);
            match self.ctx.homes.written_since(&snapshot.id, before).await {
                Ok(written) => measured.push((snapshot.clone(), written)),
                // Deleted meanwhile.
                Err(EngineError::NoHome(_)) => {}
                Err(error) => return Err(Trouble::engine("have its snapshots measured")(error)),
            }
        }
        Ok(measured)
    }

    /// By id, or by label: the newest of that label.
    pub async fn find_snapshot(&self, id_or_label: &str) -> Result<SnapshotRecord, Trouble> {
        let newest = self.matching_snapshots(id_or_label).await?.pop();
        newest.ok_or_else(|| Trouble::NoSnapshot(id_or_label.to_owned()))
    }

    /// By id, or by a label that no other has: for what cannot be undone.
    pub async fn find_only_snapshot(&self, id_or_label: &str) -> Result<SnapshotRecord, Trouble> {
        let mut matching = self.matching_snapshots(id_or_label).await?;
        match (matching.pop(), matching.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(_), false) => Err(Trouble::SameLabel(id_or_label.to_owned())),
            (None, _) => Err(Trouble::NoSnapshot(id_or_label.to_owned())),
        }
    }

    /// The one with the id, or all with the label, the newest last.
    async fn matching_snapshots(&self, id_or_label: &str) -> Result<Vec<SnapshotRecord>, Trouble> {
        let mut all = self.snapshots().await?;
        let by_id = all
            .iter()
            .position(|snapshot| snapshot.id.as_str() == id_or_label);
        if let Some(index) = by_id {
            return Ok(vec![all.swap_remove(index)]);
        }
        all.retain(|snapshot| !id_or_label.is_empty() && snapshot.label == id_or_label);
        Ok(all)
    }

    /// From now on the snapshot outlives the agent.
    pub async fn keep_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
        Ok(self.ctx.store.keep_snapshot(&snapshot.id, &self.origin()).await?)
    }

    pub async fn delete_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
        delete_to_the_end(&self.ctx, snapshot).await
    }
}

impl Registry {
    /// Of an agent that may be gone.
    pub async fn delete_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
        delete_to_the_end(&self.ctx, snapshot).await
    }
}

const DELETE: &str = "have a snapshot deleted";

async fn delete_to_the_end(ctx: &Arc<Context>, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
    let (here, snapshot) = (ctx.clone(), snapshot.clone());
    let deleted = async move { delete(&here, &snapshot).await };
    ctx.to_the_end(DELETE, deleted).await
}

/// The record first: what is left after a crash is removed by the next daemon.
pub(super) async fn delete(ctx: &Arc<Context>, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
    ctx.store.delete_snapshot(&snapshot.id).await?;
    ctx.faults.reach(Point::SnapshotForgotten).await?;
    images::discard_of(ctx, &snapshot.agent, &snapshot.id).await;
    ctx.faults.reach(Point::SnapshotImageGone).await?;
    let gone = ctx.homes.delete_snapshot(&snapshot.id).await;
    gone.map_err(Trouble::engine(DELETE))
}

/// Takes the snapshot; the agent is afterwards as it was.
pub(super) async fn take(
    agent: &Arc<Agent>,
    from: Rest,
    id: &Id,
    label: Option<&str>,
    kind: SnapshotKind,
) -> Result<(), Setback> {
    let taken = match from {
        Rest::Running => live(agent, id, label, kind).await,
        Rest::Standby => {
            agent.cut_links_for_image().await;
            whole(agent, id, label, kind, true).await
        }
        Rest::Failed => match start::see_writes(agent).await {
            Ok(()) => whole(agent, id, label, kind, false).await,
            Err(trouble) => Err(trouble),
        },
        Rest::Hibernated | Rest::Stopped => whole(agent, id, label, kind, false).await,
    };
    if let Err(trouble) = taken {
        discard(agent, id).await;
        return Err(as_before(agent, from, trouble).await);
    }
    Ok(())
}

/// Takes the snapshot of an agent that stays as it is then: one that runs is held still, and nobody lets it go on.
pub(super) async fn take_the_last(
    agent: &Arc<Agent>,
    from: Rest,
    id: &Id,
    label: &str,
    kind: SnapshotKind,
) -> Result<(), Trouble> {
    let taken = async {
        let has_box = match from {
            Rest::Running | Rest::Standby => true,
            Rest::Hibernated | Rest::Stopped | Rest::Failed => false,
        };
        if has_box {
            hold(agent, kind).await?;
        }
        whole(agent, id, Some(label), kind, has_box).await
    };
    let taken = taken.await;
    if taken.is_err() {
        discard(agent, id).await;
    }
    taken
}

async fn live(agent: &Arc<Agent>, id: &Id, label: Option<&str>, kind: SnapshotKind) -> Result<(), Trouble> {
    let running = agent.published().status;
    agent.publish(Status::now(State::Freezing, HELD));
    hold(agent, kind).await?;
    let memory = keep(agent, id, kind, true).await?;
    agent
        .ctx
        .engine
        .thaw(&agent.profile.id)
        .await
        .map_err(Trouble::engine("go on after its snapshot"))?;
    // It goes on while its memory goes to disk.
    agent.publish(running);
    agent.ctx.faults.reach(Point::SnapshotThawed).await?;
    record(agent, id, label, kind, memory.seal().await?).await
}

async fn hold(agent: &Arc<Agent>, kind: SnapshotKind) -> Result<(), Trouble> {
    if kind == SnapshotKind::Full {
        agent.can_save().map_err(Trouble::NoImages)?;
        agent.cut_links_for_image().await;
    }
    let frozen = agent.ctx.engine.freeze(&agent.profile.id).await;
    frozen.map_err(Trouble::engine(VERB))
}

/// Of an agent that stands still anyway.
async fn whole(
    agent: &Arc<Agent>,
    id: &Id,
    label: Option<&str>,
    kind: SnapshotKind,
    has_box: bool,
) -> Result<(), Trouble> {
    let has_memory = has_box || agent.current_image().is_some();
    let kind = if has_memory { kind } else { SnapshotKind::Files };
    let memory = keep(agent, id, kind, has_box).await?;
    let size = memory.seal().await?;
    if agent.current_image().is_none() {
        // The image is the snapshot's, as is the copy of the home that it needs.
        let image = images::path(agent, id);
        agent.ctx.engine.release(&agent.profile.id, &image).await;
    }
    record(agent, id, label, kind, size).await
}

/// The memory of a snapshot.
enum Memory {
    /// An image of this size, or none.
    Kept(u64),
    Written(Dumped),
}

impl Memory {
    /// Gives the size of the image once it is on disk.
    async fn seal(self) -> Result<u64, Trouble> {
        match self {
            Self::Kept(size) => Ok(size),
            Self::Written(dumped) => Ok(dumped.seal().await.map_err(Trouble::engine(VERB))?.size),
        }
    }
}

/// The memory and the home, of one instant.
async fn keep(agent: &Arc<Agent>, id: &Id, kind: SnapshotKind, has_box: bool) -> Result<Memory, Trouble> {
    let ctx = &agent.ctx;
    ctx.faults.reach(Point::SnapshotFrozen).await?;
    let memory = match kind {
        SnapshotKind::Files => Memory::Kept(0),
        SnapshotKind::Full => memory(agent, id, has_box).await?,
    };
    ctx.faults.reach(Point::SnapshotImageMade).await?;
    // Old or not, it may have names in the home.
    let image = agent.image().map(|image| images::path(agent, &image.id));
    let kept = match kind {
        SnapshotKind::Full => Kept::Memory,
        SnapshotKind::Files => Kept::Files(image.as_deref()),
    };
    let kept = ctx.homes.snapshot(&agent.profile.id, id, kept).await;
    kept.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::SnapshotHomeKept).await?;
    Ok(memory)
}

async fn memory(agent: &Arc<Agent>, id: &Id, has_box: bool) -> Result<Memory, Trouble> {
    let ctx = &agent.ctx;
    let path = images::new_path(agent, id).await.map_err(Trouble::disk(VERB))?;
    match agent.current_image() {
        // It is on disk already, and is never written to again.
        Some(image) => {
            let as_saved = start::is_as_saved(agent, &image).await;
            if !as_saved.map_err(Trouble::engine(VERB))? {
                let why = "its files have changed since its memory was saved".to_owned();
                return Err(Trouble::engine(VERB)(EngineError::BadImage(why)));
            }
            images::share(&images::path(agent, &image.id), &path)
                .await
                .map_err(Trouble::disk(VERB))?;
            Ok(Memory::Kept(image.size))
        }
        None if has_box => {
            agent.can_save().map_err(Trouble::NoImages)?;
            let dumped = ctx.engine.dump(&agent.profile.id, &path).await;
            Ok(Memory::Written(dumped.map_err(Trouble::engine(VERB))?))
        }
        None => Ok(Memory::Kept(0)),
    }
}

async fn record(
    agent: &Arc<Agent>,
    id: &Id,
    label: Option<&str>,
    kind: SnapshotKind,
    size: u64,
) -> Result<(), Trouble> {
    agent.ctx.faults.reach(Point::SnapshotSealed).await?;
    let Some(label) = label else {
        return Ok(());
    };
    let record = SnapshotRecord {
        id: id.clone(),
        agent: agent.profile.id.clone(),
        made: now(),
        label: label.to_owned(),
        kind,
        parent: None,
        isolation: agent.isolation(),
        size,
        origin: None,
    };
    agent.ctx.store.insert_snapshot(&record).await?;
    agent.ctx.faults.reach(Point::SnapshotRecorded).await?;
    Ok(())
}

/// What there may be of a snapshot that was not taken.
async fn discard(agent: &Arc<Agent>, id: &Id) {
    images::discard(agent, id).await;
    if let Err(error) = agent.ctx.store.delete_snapshot(id).await {
        tracing::error!(agent = %agent.profile.name, %error, "a snapshot that was not taken is recorded");
        return;
    }
    if let Err(error) = agent.ctx.homes.delete_snapshot(id).await {
        tracing::warn!(agent = %agent.profile.name, %error, "a snapshot that was not taken is left");
    }
}
