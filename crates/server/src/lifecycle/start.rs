//! `starting` and `waking`: from files, or from a memory image, to a guest that answers.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{BootConfig, BoxRecord, EngineError};

use super::decide::Rest;
use super::transition::Setback;
use super::{Agent, Trouble, images};
use crate::faults::{Injected, Point};
use crate::guest_client::GuestClient;
use crate::records::ImageRecord;

/// How long the guest of a fork may take to hear who it is, in emulation too. Root in its box can make it wait for ever.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(60);

/// A box that answers.
pub(super) struct Up {
    pub(super) record: BoxRecord,
    /// How it came up, in words.
    pub(super) how: String,
}

/// With its memory if there is an image of it, and from its files otherwise.
pub(super) async fn bring_up(agent: &Arc<Agent>, from: Rest) -> Result<Up, Setback> {
    let up = bring_up_or_not(agent, from).await;
    up.map_err(|trouble| match trouble {
        // Nothing has changed: it is as asleep as before.
        Trouble::CannotWake(_) => Setback::at(from, trouble),
        // Its memory is on disk still, or it has none.
        _ if trouble.is_no_space() => Setback::at(from, trouble),
        trouble => trouble.into(),
    })
}

async fn bring_up_or_not(agent: &Arc<Agent>, from: Rest) -> Result<Up, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::StartRecorded).await?;
    if let Some(damage) = &agent.profile.damage {
        return Err(Trouble::Damaged(format!("its record is damaged: {damage}")));
    }
    if let Some(up) = seen_again(agent).await? {
        return Ok(up);
    }
    if from == Rest::Failed {
        // A stop may have failed half-way.
        ctx.engine.sweep(id).await.map_err(Trouble::engine("start"))?;
        if agent.current_image().is_some() {
            see_writes(agent).await?;
        }
    }
    let up = match agent.current_image() {
        Some(image) => wake(agent, &image).await?,
        None => Up {
            record: from_files(agent).await?,
            how: "started".to_owned(),
        },
    };
    if let Err(fault) = ctx.faults.reach(Point::StartBoxUp).await {
        let _ = ctx.engine.sweep(id).await;
        return Err(fault.into());
    }
    Ok(up)
}

/// The box of an earlier daemon, if it could not be looked at and can be now.
async fn seen_again(agent: &Arc<Agent>) -> Result<Option<Up>, Trouble> {
    let (engine, id) = (&agent.ctx.engine, &agent.profile.id);
    let Some(record) = agent.unseen_box() else {
        return Ok(None);
    };
    let failed = || Trouble::engine("be adopted");
    let there = engine.adopt(&agent.box_spec(), &record).await.map_err(failed())?;
    agent.set_unseen_box(None);
    if !there {
        return Ok(None);
    }
    engine.thaw(id).await.map_err(failed())?;
    let how = "found again, and went on".to_owned();
    Ok(Some(Up { record, how }))
}

async fn from_files(agent: &Arc<Agent>) -> Result<BoxRecord, Trouble> {
    let started = agent.with_box_spec(async |spec| agent.ctx.engine.start(&spec).await);
    let record = started.await?.map_err(Trouble::engine("start"))?;
    agent.note_start();
    Ok(record)
}

async fn wake(agent: &Arc<Agent>, image: &ImageRecord) -> Result<Up, Trouble> {
    let ctx = &agent.ctx;
    let why = match restore(agent, image).await {
        Ok(record) => {
            return Ok(Up {
                record,
                how: "woken from disk".to_owned(),
            });
        }
        Err(Unrestored::NotNow(trouble)) => {
            let swept = ctx.engine.sweep(&agent.profile.id).await;
            swept.map_err(Trouble::engine("wake"))?;
            see_writes(agent).await?;
            return Err(trouble);
        }
        Err(Unrestored::Broken(fault)) => {
            let _ = ctx.engine.sweep(&agent.profile.id).await;
            see_writes(agent).await?;
            return Err(fault.into());
        }
        Err(Unrestored::Never(why)) => why,
    };
    ctx.faults.reach(Point::WakeRefused).await?;
    let loss = format!("its memory is lost, and it was started from its files: {why}");
    tracing::error!(agent = %agent.profile.name, reason = %loss, "a memory image cannot be used");
    // Nothing of a restore that failed may be left when the files are used.
    ctx.engine
        .sweep(&agent.profile.id)
        .await
        .map_err(Trouble::engine("wake"))?;
    // The image first: one that has no record would be removed after a crash, and one that is missed is spoken of.
    images::set_aside(agent, &image.id).await;
    if let Err(error) = ctx.engine.set_memory_aside(&agent.profile.id).await {
        tracing::warn!(agent = %agent.profile.name, %error, "a memory that cannot be used is not kept");
    }
    ctx.faults.reach(Point::WakeSetAside).await?;
    agent.note_setback(loss.clone()).await;
    ctx.store.set_image(&agent.profile.id, None).await?;
    agent.set_image(None);
    Ok(Up {
        record: from_files(agent).await?,
        how: loss,
    })
}

/// A box that is gone may have run since the image was made, and written to its home. Whoever would use the image has to see that, and sees
/// what is on disk.
pub(super) async fn see_writes(agent: &Agent) -> Result<(), Trouble> {
    let generation = agent.ctx.homes.generation(&agent.profile.id).await;
    generation
        .map(|_| ())
        .map_err(Trouble::engine("be found as it was"))
}

/// Why a memory image was not brought back, in words.
enum Unrestored {
    /// This image will not be.
    Never(String),
    /// Something is wrong with this machine, and not with the image.
    NotNow(Trouble),
    Broken(Injected),
}

async fn restore(agent: &Arc<Agent>, image: &ImageRecord) -> Result<BoxRecord, Unrestored> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    // What is wrong with the image is all that can be held against it; whatever else goes wrong may go well the next time.
    let in_full = |error: EngineError| match error {
        EngineError::BadImage(_) => Unrestored::Never(dorm_engine::chain(&error)),
        error if error.is_no_space() => Unrestored::NotNow(Trouble::engine("wake")(error)),
        error => Unrestored::NotNow(Trouble::CannotWake(dorm_engine::chain(&error))),
    };
    let not_now = |why: String| Unrestored::NotNow(Trouble::CannotWake(why));
    let path = images::path(agent, &image.id);
    let unchanged = ctx.homes.is_unchanged(id, image.generation).await;
    if !unchanged.map_err(in_full)? && !ctx.engine.is_untouched(&path) {
        let changed = "its files have changed since its memory was saved";
        return Err(Unrestored::Never(changed.to_owned()));
    }
    let begun = ctx.faults.reach(Point::WakeBegun).await;
    begun.map_err(Unrestored::Broken)?;
    let restored = agent.with_box_spec(async |spec| (ctx.engine.restore(&spec, &path).await, spec.boot));
    let restored = restored.await;
    let (record, boot) = restored.map_err(|error| not_now(super::in_full(&error)))?;
    let record = record.map_err(|error| match agent.can_save() {
        Ok(()) => in_full(error),
        Err(reason) => not_now(reason),
    })?;
    let reached = ctx.faults.reach(Point::WakeRestored).await;
    reached.map_err(Unrestored::Broken)?;
    if image.foreign {
        introduce(agent, &boot).await.map_err(not_now)?;
    }
    Ok(record)
}

/// Tells a guest that has the memory of another who it is now.
pub(super) async fn introduce(agent: &Arc<Agent>, boot: &BootConfig) -> Result<(), String> {
    let guest = GuestClient::new(agent.ctx.engine.clone(), agent.profile.id.clone());
    let why = match tokio::time::timeout(INTRODUCED_WITHIN, guest.introduce(boot)).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => super::in_full(&error),
        Err(_) => "its guest does not answer".to_owned(),
    };
    Err(format!("it could not be told who it is: {why}"))
}
