//! Once, when the daemon starts: makes records, boxes and homes agree again.
//!
//! What the store says is compared with what is on this machine. Boxes that go on running are adopted;
//! transitions that an earlier daemon did not finish are finished or undone; boxes and homes without a
//! record are removed. Trouble with one agent makes that agent `failed`, and never keeps the daemon
//! from starting.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};

use dorm_engine::{BoxRecord, EngineError, Id};
use futures_util::{StreamExt as _, stream};

use super::decide::{Rest, Transition};
use super::lag::record_awake_later;
use super::registry::{BOX_LEFT, Context};
use super::{Agent, Trouble, driver, go_on, images, start, watcher};
use crate::records::{AgentRecord, BoxChange, Change, HoldRecord, ImageChange, Lifetime, State, Status, now};
use crate::store::StoreError;

const AT_ONCE: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("the records could not be read")]
    Store(#[from] StoreError),
    #[error("what is on this machine could not be listed")]
    Engine(#[from] EngineError),
}

/// What there is on this machine.
struct Found {
    boxes: HashSet<Id>,
    homes: HashSet<Id>,
    holds: HashMap<Id, Vec<HoldRecord>>,
    /// Whether a record cannot be read, so that nothing is known of what seems to have none.
    damaged: bool,
}

/// What to do about an agent that an earlier daemon left in some state.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// It rests, and has no box.
    Keep,
    /// Its box may be there still; `gone` is for the case that it is not.
    Adopt {
        then: Then,
        gone: Gone,
    },
    /// It was coming back from disk, and its box may be there, without a record.
    Recover(Gone),
    /// Remove what there may be of a box.
    NoBox(Gone),
    FinishDelete,
}

/// What becomes of a box that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Runs,
    Sleeps,
    FinishHibernation,
    FinishStop,
}

/// What an agent without a box is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    Failed(&'static str),
    Stopped(&'static str),
    /// Hibernated, if there is an image of its memory and the home is still the one that belongs to it.
    Remembered(&'static str),
}

fn plan(state: State, has_home: bool, has_box_record: bool) -> Plan {
    if state == State::Deleting {
        return Plan::FinishDelete;
    }
    if !has_home {
        return Plan::NoBox(Gone::Failed("its home is missing from the pool"));
    }
    const AWAY: &str = "the box ended while the daemon was away";
    const UNKNOWN: &str = "nothing is known of its box";
    const STOPPED: &str = "stopped while the daemon was away";
    match (state, has_box_record) {
        (State::Deleting, true | false) => Plan::FinishDelete,
        (State::Stopped | State::Failed, true | false) => Plan::Keep,
        // With its memory, if it had failed with its memory on disk.
        (State::Starting, true | false) => {
            Plan::Recover(Gone::Remembered("the daemon ended while it was starting"))
        }
        (State::Running | State::Freezing, true) => Plan::Adopt {
            then: Then::Runs,
            gone: Gone::Stopped(AWAY),
        },
        (State::Running | State::Freezing, false) => Plan::NoBox(Gone::Stopped(UNKNOWN)),
        (State::Standby, true) => Plan::Adopt {
            then: Then::Sleeps,
            gone: Gone::Remembered(AWAY),
        },
        (State::Standby, false) => Plan::NoBox(Gone::Remembered(UNKNOWN)),
        (State::Hibernating, true) => Plan::Adopt {
            then: Then::FinishHibernation,
            gone: Gone::Remembered(AWAY),
        },
        (State::Hibernating, false) => Plan::NoBox(Gone::Remembered(UNKNOWN)),
        (State::Hibernated, true | false) => Plan::NoBox(Gone::Remembered(UNKNOWN)),
        // A wake from disk is recorded before it begins, and its box only when it is over.
        (State::Waking, true | false) => {
            Plan::Recover(Gone::Remembered("the daemon ended while it was waking"))
        }
        (State::Stopping, true) => Plan::Adopt {
            then: Then::FinishStop,
            gone: Gone::Stopped(STOPPED),
        },
        (State::Stopping, false) => Plan::NoBox(Gone::Stopped(STOPPED)),
    }
}

pub(super) async fn reconcile(ctx: &Arc<Context>, sweep_homes: bool) -> Result<(), ReconcileError> {
    let all = ctx.store.agents().await?;
    let found = Found {
        boxes: ctx.engine.present().await?.into_iter().collect(),
        homes: ctx.homes.list().await?.into_iter().collect(),
        holds: HashMap::new(),
        damaged: false,
    };
    let known: HashSet<Id> = all
        .readable
        .iter()
        .map(|record| record.profile.id.clone())
        .collect();
    let damage = [&all.damage[..], &ctx.store.damage().await?].concat();
    for why in &damage {
        tracing::error!(%why, "a record cannot be read; nothing that seems to have none is removed until that is mended");
    }
    let mut holds: HashMap<Id, Vec<HoldRecord>> = HashMap::new();
    for hold in ctx.store.holds().await? {
        if hold.until > now() {
            holds.entry(hold.agent.clone()).or_default().push(hold);
        } else if let Err(error) = ctx.store.delete_hold(&hold.id).await {
            tracing::warn!(%error, "a hold that is over could not be removed");
        }
    }
    let found = Found {
        holds,
        damaged: !damage.is_empty(),
        ..found
    };
    let agents = all.readable.len();
    // Before anything is driven: an image that is made now has no record yet.
    let snapshots = ctx.store.snapshots().await?;
    let snapshot_ids: HashSet<Id> = snapshots.iter().map(|snapshot| snapshot.id.clone()).collect();
    if damage.is_empty() {
        // An agent may be gone, and have snapshots still.
        let gone = snapshots.iter().map(|snapshot| (&snapshot.agent, None));
        let agents = all.readable.iter();
        let agents = agents.map(|record| (&record.profile.id, record.image.as_ref()));
        images::sweep(ctx, &gone.chain(agents).collect(), &snapshot_ids).await;
    }
    stream::iter(all.readable)
        .for_each_concurrent(AT_ONCE, |record| settle(ctx, &found, record))
        .await;
    if damage.is_empty() {
        remove_boxes(ctx, found.boxes.difference(&known)).await;
    }
    if sweep_homes && damage.is_empty() {
        remove_homes(ctx, found.homes.difference(&known)).await?;
        remove_snapshots(ctx, &snapshot_ids).await?;
    } else {
        let homes = found.homes.difference(&known).count();
        if homes > 0 {
            tracing::warn!(
                homes,
                "homes without a record are kept, as the records are new or damaged"
            );
        }
    }
    tracing::info!(
        agents,
        boxes = found.boxes.len(),
        "records, boxes and homes agree"
    );
    Ok(())
}

async fn remove_boxes(ctx: &Arc<Context>, boxes: impl Iterator<Item = &Id>) {
    for id in boxes {
        tracing::info!(%id, "removing a box that belongs to no agent");
        if let Err(error) = ctx.engine.sweep(id).await {
            tracing::error!(%id, %error, "a box that belongs to no agent could not be removed");
        }
    }
}

async fn remove_homes(ctx: &Arc<Context>, homes: impl Iterator<Item = &Id>) -> Result<(), ReconcileError> {
    for id in homes {
        tracing::info!(%id, "removing a home that belongs to no agent");
        if let Err(error) = ctx.homes.delete(id).await {
            tracing::error!(%id, %error, "a home that belongs to no agent could not be removed");
        }
    }
    let known: HashSet<Id> = ctx.store.template_ids().await?.into_iter().collect();
    for id in ctx
        .homes
        .templates()
        .await?
        .iter()
        .filter(|id| !known.contains(id))
    {
        tracing::info!(%id, "removing a template that has no record");
        if let Err(error) = ctx.homes.delete_template(id).await {
            tracing::error!(%id, %error, "a template that has no record could not be removed");
        }
    }
    Ok(())
}

async fn remove_snapshots(ctx: &Arc<Context>, known: &HashSet<Id>) -> Result<(), ReconcileError> {
    for id in ctx
        .homes
        .snapshots()
        .await?
        .iter()
        .filter(|id| !known.contains(id))
    {
        tracing::info!(%id, "removing a snapshot that has no record");
        if let Err(error) = ctx.homes.delete_snapshot(id).await {
            tracing::error!(%id, %error, "a snapshot that has no record could not be removed");
        }
    }
    Ok(())
}

async fn settle(ctx: &Arc<Context>, found: &Found, mut record: AgentRecord) {
    let id = record.profile.id.clone();
    let plan = plan(
        record.status.state,
        found.homes.contains(&id),
        record.box_record.is_some(),
    );
    let was_up = go_on::is_up(record.status.state);
    let box_record = record.box_record.take();
    let agent = Agent::new(ctx.clone(), record);
    if let Some(holds) = found.holds.get(&id) {
        agent
            .holds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(holds);
    }
    ctx.enroll(&agent);
    // Nobody has stopped it, and it is to be always on.
    if was_up && agent.sleep().keep_awake {
        agent.is_to_go_on().await;
    }
    let settled = match plan {
        Plan::Keep if found.boxes.contains(&id) && !found.damaged => sweep(&agent).await,
        Plan::Keep => Ok(()),
        Plan::NoBox(gone) => without_box(&agent, gone).await,
        Plan::Recover(gone) => recover(&agent, gone).await,
        Plan::FinishDelete => {
            let why = agent.published().status.reason;
            driver::resume(&agent, Transition::Delete { why }, Rest::Failed);
            Ok(())
        }
        Plan::Adopt { then, gone } => match box_record {
            Some(box_record) => adopt(&agent, box_record, then, gone).await,
            None => without_box(&agent, gone).await,
        },
    };
    if let Err(trouble) = settled {
        let reason = trouble.in_full();
        tracing::error!(agent = %agent.profile.name, %reason, "an agent could not be put in order");
        if let Err(error) = record_rest(&agent, State::Failed, &reason).await {
            tracing::error!(agent = %agent.profile.name, %error, "and that could not be recorded");
            agent.publish(Status::now(State::Failed, reason));
        }
    }
}

async fn adopt(agent: &Arc<Agent>, record: BoxRecord, then: Then, gone: Gone) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    match ctx.engine.adopt(&agent.box_spec(), &record).await {
        Ok(true) => {}
        Ok(false) => return without_box(agent, gone).await,
        Err(error) => {
            unseen(agent, record, &Trouble::engine("be adopted")(error));
            return Ok(());
        }
    }
    let generation = agent.publish_box(agent.published().status, record);
    match then {
        Then::Runs => {
            agent.now_differs_from_image();
            // Perhaps a daemon died while it held the box still.
            ctx.engine.thaw(id).await.map_err(Trouble::engine("be adopted"))?;
            watcher::spawn(agent, generation);
            agent
                .record_state(State::Running, "the daemon was started again")
                .await
        }
        Then::Sleeps => {
            // Frozen already, unless a daemon died right after it let the box go on.
            let frozen = ctx.engine.freeze(id).await;
            if frozen.is_err() || !has_slept_on(agent).await {
                forget_image(agent).await;
            }
            watcher::spawn(agent, generation);
            match frozen {
                Ok(()) => Ok(()),
                Err(error) => {
                    tracing::warn!(agent = %agent.profile.name, %error, "could not be kept in standby");
                    let thawed = ctx.engine.thaw(id).await;
                    thawed.map_err(Trouble::engine("be adopted"))?;
                    agent
                        .record_state(State::Running, "it could not be kept in standby")
                        .await
                }
            }
        }
        Then::FinishHibernation => {
            // Frozen already, unless the daemon died before it came to that.
            let from = match ctx.engine.freeze(id).await {
                Ok(()) => Rest::Standby,
                Err(_) => Rest::Running,
            };
            watcher::spawn(agent, generation);
            let why = agent.published().status.reason;
            driver::resume(agent, Transition::Hibernate { why }, from);
            Ok(())
        }
        // It was to be rolled back, and goes with its box.
        Then::FinishStop if agent.profile.lifetime == Lifetime::Ephemeral => without_box(agent, gone).await,
        Then::FinishStop => {
            let grace = ctx.stop_grace;
            driver::resume(agent, Transition::Stop { grace }, Rest::Standby);
            Ok(())
        }
    }
}

/// Nothing is known of the box, which may go on: the record stays, for the next start or the next daemon to look again.
fn unseen(agent: &Arc<Agent>, record: BoxRecord, trouble: &Trouble) {
    let reason = format!("{}{BOX_LEFT}", trouble.in_full());
    tracing::error!(agent = %agent.profile.name, %reason, "an agent could not be put in order");
    agent.set_unseen_box(Some(record));
    agent.publish(Status::now(State::Failed, reason));
}

/// A box that is back has gone on, so that its image is of no use any more: it is kept, or its memory is lost.
async fn recover(agent: &Arc<Agent>, gone: Gone) -> Result<(), Trouble> {
    let ctx = &agent.ctx;
    let Some(image) = agent.current_image() else {
        return without_box(agent, gone).await;
    };
    let spec = agent.filled_spec().await?;
    let found = ctx.engine.recover(&spec, &images::path(agent, &image.id)).await;
    let Some(record) = found.map_err(Trouble::engine("be adopted"))? else {
        return without_box(agent, gone).await;
    };
    if image.foreign
        && let Err(error) = start::introduce(agent, &spec.boot).await
    {
        tracing::warn!(agent = %agent.profile.name, %error, "is restored once more");
        return without_box(agent, gone).await;
    }
    let status = Status::now(State::Running, "woken from disk while the daemon was away");
    let change = Change {
        agent: &agent.profile.id,
        from: agent.state(),
        to: &status,
        at: status.since,
        millis: None,
        box_record: BoxChange::Set(&record),
        image: ImageChange::Clear,
    };
    match ctx.record(&change).await {
        Ok(()) => {
            agent.set_image(None);
            images::discard_of(ctx, &agent.profile.id, &image.id).await;
        }
        Err(error) => {
            tracing::error!(agent = %agent.profile.name, %error, "is awake, which could not be recorded");
            record_awake_later(agent, change.from, &status, 0, &record);
        }
    }
    let generation = agent.publish_box(status, record);
    watcher::spawn(agent, generation);
    Ok(())
}

async fn without_box(agent: &Arc<Agent>, gone: Gone) -> Result<(), Trouble> {
    match gone {
        Gone::Failed(reason) => rest(agent, State::Failed, reason).await,
        Gone::Stopped(reason) => rest(agent, State::Stopped, reason).await,
        Gone::Remembered(reason) => match agent.current_image() {
            None => rest(agent, State::Stopped, reason).await,
            Some(image) if !images::exists(agent, &image.id).await => {
                agent.set_image(None);
                let why = match images::is_set_aside(agent, &image.id).await {
                    true => "its memory is lost: the image cannot be used, and is set aside",
                    false => "its memory is lost: the image is missing",
                };
                agent.note_setback(why.to_owned()).await;
                rest(agent, State::Stopped, why).await
            }
            Some(_) => {
                sweep(agent).await?;
                if agent.state() == State::Hibernated {
                    return Ok(());
                }
                start::see_writes(agent).await?;
                record_rest(agent, State::Hibernated, reason).await
            }
        },
    }
}

/// Whether the frozen box is what its image holds. The processor time that it has used tells, rather than a mark that a thaw would
/// have to take away: that could fail, as on a disk that is full, and the old memory would pass for the present one.
async fn has_slept_on(agent: &Arc<Agent>) -> bool {
    let Some(image) = agent.current_image() else {
        return false;
    };
    let now = agent.ctx.engine.stats(&agent.profile.id).await;
    let now = now.ok().map(|stats| stats.cpu_usec);
    image.cpu_usec.is_some() && image.cpu_usec == now && images::exists(agent, &image.id).await
}

async fn forget_image(agent: &Arc<Agent>) {
    agent.now_differs_from_image();
    if let Err(error) = agent.ctx.store.set_image(&agent.profile.id, None).await {
        // Whatever is recorded next tells of it too, and until then another daemon would see it for itself.
        tracing::error!(agent = %agent.profile.name, %error, "that its image is old could not be recorded");
        return;
    }
    if let Some(image) = agent.set_image(None) {
        images::discard(agent, &image.id).await;
    }
}

async fn sweep(agent: &Arc<Agent>) -> Result<(), Trouble> {
    agent
        .ctx
        .engine
        .sweep(&agent.profile.id)
        .await
        .map_err(Trouble::engine("be cleared away"))
}

/// Without a box from now on. An ephemeral agent that comes to rest is deleted.
async fn rest(agent: &Arc<Agent>, state: State, reason: &str) -> Result<(), Trouble> {
    sweep(agent).await?;
    match (agent.profile.lifetime, state) {
        (Lifetime::Ephemeral, State::Stopped) => {
            record_rest(agent, State::Deleting, reason).await?;
            let why = reason.to_owned();
            driver::resume(agent, Transition::Delete { why }, Rest::Failed);
            Ok(())
        }
        _ => record_rest(agent, state, reason).await,
    }
}

async fn record_rest(agent: &Arc<Agent>, state: State, reason: &str) -> Result<(), Trouble> {
    let present = agent.published().status;
    if present.state == state && present.reason == reason {
        return Ok(());
    }
    let status = Status::now(state, reason).following(&present);
    let change = Change {
        agent: &agent.profile.id,
        from: present.state,
        to: &status,
        at: now(),
        millis: None,
        box_record: BoxChange::Clear,
        image: match state {
            State::Stopped => ImageChange::Clear,
            _ => ImageChange::Keep,
        },
    };
    agent.ctx.record(&change).await?;
    agent.publish(status);
    if state == State::Stopped {
        images::give_up(agent).await;
    }
    Ok(())
}
