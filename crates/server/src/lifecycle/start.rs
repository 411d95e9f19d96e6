//! `starting` and `waking`: from files, or from a memory image, to a guest that answers.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{BootConfig, BoxRecord, EngineError};

use super::decide::Rest;
use super::transition::Setback;
use super::{Agent, Trouble, convert, images, watcher};
use crate::faults::{Injected, Point};
use crate::guest_client::GuestClient;
use crate::records::{ImageRecord, State};

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
        _ if trouble.is_no_space() => match from {
            // It had memory, and has files alone now.
            Rest::Hibernated if agent.current_image().is_none() => Setback::at(Rest::Stopped, trouble),
            // Its memory is on disk still, or it had none.
            _ => Setback::at(from, trouble),
        },
        trouble => trouble.into(),
    })
}

async fn bring_up_or_not(agent: &Arc<Agent>, from: Rest) -> Result<Up, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::StartRecorded).await?;
    if let Some(damage) = &agent.profile.damage {
        return Err(Trouble::Damaged(format!("its record is damaged: {damage}")));
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
        None => from_files(agent, "started").await?,
    };
    if let Err(fault) = ctx.faults.reach(Point::StartBoxUp).await {
        let _ = ctx.engine.sweep(id).await;
        return Err(fault.into());
    }
    Ok(up)
}

/// Whether the box of an earlier daemon, which could not be looked at, is there and goes on. Nothing is recorded before that is known.
pub(super) async fn is_seen_again(agent: &Arc<Agent>) -> Result<bool, Trouble> {
    let engine = &agent.ctx.engine;
    let Some(record) = agent.unseen_box() else {
        return Ok(false);
    };
    let failed = || Trouble::engine("be adopted");
    if !engine.adopt(&agent.box_spec(), &record).await.map_err(failed())? {
        agent.set_unseen_box(None);
        return Ok(false);
    }
    engine.thaw(&agent.profile.id).await.map_err(failed())?;
    agent.set_unseen_box(None);
    agent.now_differs_from_image();
    let generation = agent.publish_box(agent.published().status, record);
    watcher::spawn(agent, generation);
    let found = agent.record_state(State::Running, "found again, and goes on");
    found.await.map(|()| true)
}

async fn from_files(agent: &Arc<Agent>, how: &str) -> Result<Up, Trouble> {
    let started = agent.with_box_spec(async |spec| {
        // It may have been given another isolation, or another home.
        let left_out = convert::into_form(agent, &spec).await?;
        let record = agent.ctx.engine.start(&spec).await?;
        Ok(Up {
            record,
            how: format!("{how}{left_out}"),
        })
    });
    let up = started.await?.map_err(Trouble::engine("start"))?;
    agent.note_start();
    Ok(up)
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
        Err(Unrestored::Untold(why)) => {
            let swept = ctx.engine.sweep(&agent.profile.id).await;
            swept.map_err(Trouble::engine("wake"))?;
            see_writes(agent).await?;
            if is_as_saved(agent, image).await.map_err(Trouble::engine("wake"))? {
                return Err(Trouble::CannotWake(why));
            }
            why
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
    let forgotten = ctx.store.set_image(&agent.profile.id, None).await;
    // Recorded or not, there is none.
    agent.set_image(None);
    let started = match forgotten {
        Ok(()) => from_files(agent, &loss).await,
        Err(error) => Err(error.into()),
    };
    match started {
        Ok(up) => Ok(up),
        Err(trouble) => {
            let source = Arc::new(trouble);
            let lost = Trouble::MemoryLost { why, source };
            agent.note_setback(lost.in_full()).await;
            Err(lost)
        }
    }
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
    /// It has gone on, and could not be told who it is.
    Untold(String),
    Broken(Injected),
}

/// Whether the home is the one that belongs to the image.
pub(super) async fn is_as_saved(agent: &Agent, image: &ImageRecord) -> Result<bool, EngineError> {
    let unchanged = agent.ctx.homes.is_unchanged(&agent.profile.id, image.generation);
    Ok(unchanged.await? || agent.ctx.engine.is_untouched(&images::path(agent, &image.id)))
}

async fn restore(agent: &Arc<Agent>, image: &ImageRecord) -> Result<BoxRecord, Unrestored> {
    let ctx = &agent.ctx;
    // What is wrong with the image is all that can be held against it; whatever else goes wrong may go well the next time.
    let in_full = |error: EngineError| match error {
        EngineError::BadImage(_) => Unrestored::Never(dorm_engine::chain(&error)),
        error if error.is_no_space() => Unrestored::NotNow(Trouble::engine("wake")(error)),
        error => Unrestored::NotNow(Trouble::CannotWake(dorm_engine::chain(&error))),
    };
    let not_now = |why: String| Unrestored::NotNow(Trouble::CannotWake(why));
    let path = images::path(agent, &image.id);
    if !is_as_saved(agent, image).await.map_err(in_full)? {
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
        introduce(agent, &boot).await.map_err(Unrestored::Untold)?;
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
