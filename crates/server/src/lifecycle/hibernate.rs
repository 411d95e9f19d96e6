//! `hibernating`: from a box to an image of its memory, without anything being let go before the image
//! is whole, on disk and recorded.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{Dumped, Id, MemoryImage};
use tokio::time::Instant;

use super::agent::Unsavable;
use super::decide::Rest;
use super::lag::catch_up;
use super::transition::Setback;
use super::{Agent, Trouble, images, standby};
use crate::faults::Point;
use crate::records::{ImageRecord, now};

/// How long a disk that is full is left alone.
const ROOM: Duration = Duration::from_secs(60);
/// And how long a box is that could not be saved for another reason that may pass. CRIU may have taken minutes to come to that.
const OTHERWISE: Duration = Duration::from_secs(300);

pub(super) async fn hibernate(agent: &Arc<Agent>, from: Rest) -> Result<(), Setback> {
    let ctx = &agent.ctx;
    if let Err(trouble) = save(agent).await {
        return Err(standby::as_before(agent, from, trouble).await);
    }
    // Frozen still, and its memory is on disk: nothing is lost with the processes.
    agent.cut_links().await;
    let stopped = ctx.engine.stop(&agent.profile.id, Duration::ZERO).await;
    stopped.map_err(|error| Setback::at(Rest::Failed, Trouble::engine("be put to disk")(error)))?;
    let gone = ctx.faults.reach(Point::HibernateBoxGone).await;
    gone.map_err(|fault| Setback::at(Rest::Failed, fault.into()))?;
    Ok(())
}

/// Up to the point of no return.
async fn save(agent: &Arc<Agent>) -> Result<(), Trouble> {
    agent.ctx.faults.reach(Point::HibernateRecorded).await?;
    agent.port_links.answered().await;
    if agent.current_image().is_none() {
        keep(agent, Awaited::Waits).await?;
    }
    agent.ctx.faults.reach(Point::HibernateImageRecorded).await?;
    Ok(())
}

/// The memory of a box in standby goes to disk; the box stays as it is. Whoever reaches for it meanwhile waits for the memory to be
/// read, and not for the disk.
pub(super) async fn make_durable(agent: &Arc<Agent>) -> Result<(), Setback> {
    if agent.current_image().is_some() {
        return Ok(());
    }
    let kept = async {
        // The record must say `standby` before it says that the memory is on disk.
        if let Err(error) = catch_up(agent).await {
            agent.set_unsavable(Unsavable::Until(Instant::now() + ROOM));
            return Err(error.into());
        }
        keep(agent, Awaited::Goes).await
    };
    match kept.await {
        Ok(()) => Ok(()),
        Err(trouble) => Err(standby::as_before(agent, Rest::Standby, trouble).await),
    }
}

/// Whoever wants the agent to run while its memory goes to disk.
#[derive(Clone, Copy)]
enum Awaited {
    Waits,
    /// What was read of its memory is given up for that.
    Goes,
}

/// Freezes the box and writes its memory, with the generation of the home at the same instant.
async fn keep(agent: &Arc<Agent>, awaited: Awaited) -> Result<(), Trouble> {
    let kept = write(agent, awaited).await;
    if let Err(trouble) = &kept
        && !matches!(trouble, Trouble::InUse)
    {
        let what = format!("its memory could not be saved: {}", trouble.in_full());
        agent.note_setback(what).await;
        agent.set_unsavable(if trouble.is_about_memory() {
            Unsavable::AsItIs
        } else if trouble.is_no_space() {
            Unsavable::Until(Instant::now() + ROOM)
        } else {
            Unsavable::Until(Instant::now() + OTHERWISE)
        });
    }
    kept
}

const VERB: &str = "have its memory saved";

async fn write(agent: &Arc<Agent>, awaited: Awaited) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    agent.can_save().map_err(Trouble::NoImages)?;
    agent.cut_links_for_image().await;
    ctx.engine.freeze(id).await.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ImageFrozen).await?;
    let image = Id::random();
    let path = images::new_path(agent, &image)
        .await
        .map_err(Trouble::disk(VERB))?;
    let dumped = ctx.engine.dump(id, &path).await;
    let dumped = dumped.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ImageRead).await?;
    let made = match awaited {
        Awaited::Waits => dumped.seal().await.map_err(Trouble::engine(VERB))?,
        Awaited::Goes => seal_unless_awaited(agent, &image, dumped).await?,
    };
    // After the image, which may leave names in the home for files that have lost theirs.
    let generation = ctx.homes.generation(id).await;
    let generation = match generation.map_err(Trouble::engine(VERB)) {
        Ok(generation) => generation,
        Err(trouble) => {
            images::discard(agent, &image).await;
            return Err(trouble);
        }
    };
    let record = ImageRecord {
        id: image.clone(),
        generation,
        size: made.size,
        made: now(),
        current: true,
        foreign: false,
        cpu_usec: ctx.engine.stats(id).await.ok().map(|stats| stats.cpu_usec),
    };
    let recorded = match ctx.faults.reach(Point::ImageMade).await {
        Ok(()) => ctx
            .store
            .set_image(id, Some(&record))
            .await
            .map_err(Trouble::from),
        Err(fault) => Err(fault.into()),
    };
    if let Err(trouble) = recorded {
        images::discard(agent, &image).await;
        return Err(trouble);
    }
    let old = agent.set_image(Some(record));
    let reached = ctx.faults.reach(Point::ImageRecorded).await;
    if let Some(old) = old {
        images::discard(agent, &old.id).await;
    }
    Ok(reached?)
}

/// Names that the image has left in the home go when the box goes on.
async fn seal_unless_awaited(agent: &Arc<Agent>, image: &Id, dumped: Dumped) -> Result<MemoryImage, Trouble> {
    let (ctx, id, image) = (agent.ctx.clone(), agent.profile.id.clone(), image.clone());
    let mut published = agent.subscribe();
    if published.borrow_and_update().awaited {
        agent.ctx.tasks.spawn(async move {
            // That is as many files as there is memory.
            let _ = tokio::task::spawn_blocking(move || drop(dumped)).await;
            images::discard_of(&ctx, &id, &image).await;
        });
        return Err(Trouble::InUse);
    }
    let mut sealing = agent.ctx.tasks.spawn(dumped.seal());
    tokio::select! {
        sealed = &mut sealing => match sealed {
            Ok(sealed) => sealed.map_err(Trouble::engine(VERB)),
            Err(bug) => Err(Trouble::Bug { verb: VERB, reason: bug.to_string() }),
        },
        _ = published.wait_for(|now| now.awaited) => {
            agent.ctx.tasks.spawn(async move {
                let _ = sealing.await;
                images::discard_of(&ctx, &id, &image).await;
            });
            Err(Trouble::InUse)
        }
    }
}
