//! What all transitions have in common: record, do, record again. What [`is_recorded_first`] does not
//! hold for is done at once and recorded when it is over.

use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinError;

use super::agent::Answer;
use super::decide::{Next, Outcome, Rest, Transition, Work, after, during, is_recorded_first};
use super::lag::{Late, LateBox, LateImage, catch_up, record_awake_later, record_later};
use super::start::Up;
use super::{
    Agent, Trouble, convert, delete, hibernate, images, roll_back, snapshot, standby, start, stop, watcher,
};
use crate::faults::Point;
use crate::records::{BoxChange, Change, ImageChange, State, Status, now};
use crate::store::StoreError;

/// A transition that was not possible, and where it left the agent.
pub(super) struct Setback {
    left: Rest,
    trouble: Trouble,
}

impl Setback {
    pub(super) fn at(left: Rest, trouble: Trouble) -> Self {
        Self { left, trouble }
    }
}

/// Most troubles leave it failed.
impl From<Trouble> for Setback {
    fn from(trouble: Trouble) -> Self {
        Self::at(Rest::Failed, trouble)
    }
}

/// What the work of a transition made.
enum Made {
    Box(Up),
    /// The box goes on, or stays as it was.
    SameBox,
    NoBox,
    /// No box either, and this to say about it.
    Told(String),
}

/// Runs a transition from the state in which the agent rests.
pub(super) async fn run(agent: Arc<Agent>, transition: Transition) -> Answer {
    if let Transition::Start { .. } = transition
        && start::is_seen_again(&agent).await?
    {
        return Ok(());
    }
    let from = agent.rest();
    let began = Instant::now();
    let status = Status::now(during(&transition), why(&transition));
    if !is_recorded_first(&transition) {
        return at_once(agent, transition, from, status, began).await;
    }
    let held_back = match (catch_up(&agent).await, &transition) {
        (Ok(()), _) => None,
        // What happened before the end of an agent matters to nobody once that is recorded.
        (Err(_), Transition::Delete { .. }) => Some(agent.lag.hold_back().await),
        (Err(error), _) => return Err(error.into()),
    };
    let resting = agent.published().status;
    if let Transition::RollBack { snapshot, before, .. } = &transition {
        agent.publish(status.clone());
        if let Err(setback) = roll_back::keep_present(&agent, from, snapshot, before).await {
            return not_begun(&agent, from, resting, setback, began);
        }
    }
    let change = Change {
        agent: &agent.profile.id,
        from: from.state(),
        to: &status,
        at: status.since,
        millis: None,
        box_record: BoxChange::Keep,
        image: agent.image_as_it_is(),
    };
    let recorded = agent.ctx.record(&change).await;
    if held_back.is_some() && recorded.is_ok() {
        agent.lag.forget();
    }
    drop(held_back);
    match recorded {
        Ok(()) => {}
        Err(StoreError::NotFound { .. }) => {
            leave(&agent);
            return Err(Trouble::NotFound(agent.profile.name.clone()));
        }
        Err(error) => {
            debug_assert_eq!(after(&transition, from, Outcome::NotBegun), Next::Rest(from));
            let Transition::RollBack { .. } = transition else {
                return Err(error.into());
            };
            let setback = standby::as_before(&agent, from, error.into()).await;
            return not_begun(&agent, from, resting, setback, began);
        }
    }
    agent.publish(status);
    proceed(agent, transition, from, &resting, began).await
}

/// The store knows nothing of the transition yet, for which the agent was held still.
fn not_begun(agent: &Arc<Agent>, from: Rest, resting: Status, setback: Setback, began: Instant) -> Answer {
    if setback.left == from {
        agent.publish(resting);
    } else {
        let to = Status::now(setback.left.state(), setback.trouble.in_full());
        agent.publish(to.clone());
        let late = Late {
            from: from.state(),
            at: to.since,
            to,
            millis: millis_since(began),
            box_record: LateBox::Kept,
            image: LateImage::Kept,
        };
        record_later(agent, late);
    }
    Err(setback.trouble)
}

/// Runs a transition whose beginning the store has already.
pub(super) async fn resume(agent: Arc<Agent>, transition: Transition, from: Rest) -> Answer {
    let under_way = agent.published().status;
    proceed(agent, transition, from, &under_way, Instant::now()).await
}

async fn at_once(
    agent: Arc<Agent>,
    transition: Transition,
    from: Rest,
    status: Status,
    began: Instant,
) -> Answer {
    let before = agent.published().status;
    match &transition {
        // Who sleeps stays as it is, and who runs is held still for a part of it only.
        Transition::MakeDurable | Transition::Snapshot { .. } => {}
        _ => agent.publish(status),
    }
    let stale = agent.image().map(|image| image.id);
    let done = work(&agent, &transition, from).await;
    let (outcome, reason) = match &done {
        Ok(_) => (Outcome::Done, result(&transition)),
        Err(setback) => (Outcome::Fell(setback.left), setback.trouble.in_full()),
    };
    let Next::Rest(rest) = after(&transition, from, outcome) else {
        unreachable!("only a deletion leads to nothing, and it is recorded first");
    };
    // What did not happen, or what changes no state, is no news.
    let quiet = match (&transition, &done) {
        (_, Err(setback)) => matches!(setback.trouble, Trouble::InUse) && setback.left == from,
        (Transition::MakeDurable | Transition::Snapshot { .. }, Ok(_)) => true,
        (_, Ok(_)) => false,
    };
    let at = now();
    let to = match quiet {
        true => before,
        false => Status::now(rest.state(), reason).following(&before),
    };
    if rest == Rest::Running {
        agent.may_be_savable();
    }
    if let Transition::Settle { .. } = transition {
        agent.publish_no_box();
    }
    agent.publish(to.clone());
    if !quiet {
        let stale = stale.filter(|id| agent.image().is_some_and(|now| now.id == *id && !now.current));
        if stale.is_some() {
            agent.set_image(None);
        }
        let late = Late {
            from: from.state(),
            to,
            at,
            millis: millis_since(began),
            box_record: match &done {
                Ok(Made::NoBox) => LateBox::Gone,
                Ok(_) | Err(_) => LateBox::Kept,
            },
            image: stale.map_or(LateImage::Kept, LateImage::Useless),
        };
        record_later(&agent, late);
    }
    if let Transition::Settle { saved: false, .. } = transition {
        images::forget_memory(&agent).await;
    }
    done.map(|_| ()).map_err(|setback| setback.trouble)
}

fn millis_since(began: Instant) -> i64 {
    i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX)
}

async fn proceed(
    agent: Arc<Agent>,
    transition: Transition,
    from: Rest,
    before: &Status,
    began: Instant,
) -> Answer {
    let done = work(&agent, &transition, from).await;
    let outcome = match &done {
        Ok(_) => Outcome::Done,
        Err(setback) => Outcome::Fell(setback.left),
    };
    if let Transition::Start { .. } = transition {
        agent.ctx.metrics.started(done.is_ok(), began.elapsed());
    }
    match after(&transition, from, outcome) {
        Next::Gone => {
            leave(&agent);
            agent.ctx.faults.reach(Point::DeleteFinished).await?;
            Ok(())
        }
        Next::Rest(rest) => {
            let status = at_rest(&transition, rest, &done, before);
            come_to_rest(&agent, &transition, rest, status, done, millis_since(began)).await
        }
    }
}

/// There is no such agent any more.
fn leave(agent: &Arc<Agent>) {
    agent.ctx.forget(agent);
    agent.publish_gone();
}

async fn work(agent: &Arc<Agent>, transition: &Transition, from: Rest) -> Result<Made, Setback> {
    match transition {
        Transition::Start { .. } | Transition::Wake { .. } => {
            Ok(Made::Box(start::bring_up(agent, from).await?))
        }
        Transition::Thaw { .. } => standby::thaw(agent).await.map(|()| Made::SameBox),
        Transition::Freeze { if_idle, .. } => standby::freeze(agent, *if_idle).await.map(|()| Made::SameBox),
        Transition::MakeDurable => hibernate::make_durable(agent).await.map(|()| Made::SameBox),
        Transition::Hibernate { .. } => hibernate::hibernate(agent, from).await.map(|()| Made::NoBox),
        Transition::Snapshot { id, label, kind } => {
            let taken = snapshot::take(agent, from, id, label.as_deref(), *kind).await;
            taken.map(|()| Made::SameBox)
        }
        Transition::RollBack { snapshot, kind, .. } => {
            let back = roll_back::roll_back(agent, from, snapshot, *kind).await;
            back.map(|()| Made::NoBox)
        }
        Transition::Convert { to, grace } => {
            let converted = convert::convert(agent, from, *to, *grace).await;
            converted.map(Made::Told)
        }
        Transition::Stop { grace } => {
            stop::stop(agent, from, *grace).await?;
            Ok(Made::NoBox)
        }
        Transition::Settle { .. } => {
            stop::settle(agent).await?;
            Ok(Made::NoBox)
        }
        Transition::Delete { .. } => {
            delete::delete(agent).await?;
            Ok(Made::NoBox)
        }
    }
}

/// What the end of a transition means for the image, in the record and for the one who holds it.
fn image_change(transition: &Transition, rest: Rest) -> ImageChange {
    match (Work::of(transition), rest) {
        (Work::BringUp, Rest::Running) => ImageChange::Clear,
        (Work::BringUp | Work::Stop | Work::RollBack | Work::Convert, Rest::Stopped) => ImageChange::Clear,
        (
            Work::BringUp
            | Work::Freeze
            | Work::MakeDurable
            | Work::Hibernate
            | Work::Snapshot
            | Work::RollBack
            | Work::Convert
            | Work::Stop
            | Work::Delete,
            Rest::Stopped | Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed,
        ) => ImageChange::Keep,
    }
}

/// `before` is what it was when the transition began.
fn at_rest(transition: &Transition, rest: Rest, done: &Result<Made, Setback>, before: &Status) -> Status {
    let now = |reason| Status::now(rest.state(), reason);
    match done {
        Ok(Made::Box(up)) => now(up.how.clone()),
        Ok(Made::Told(said)) => now(said.clone()),
        Ok(Made::SameBox | Made::NoBox) => now(result(transition)),
        Err(setback) => now(setback.trouble.in_full()).following(before),
    }
}

async fn come_to_rest(
    agent: &Arc<Agent>,
    transition: &Transition,
    rest: Rest,
    status: Status,
    done: Result<Made, Setback>,
    millis: i64,
) -> Answer {
    let image = match image_change(transition, rest) {
        // It may have gone on for a while before it failed.
        ImageChange::Keep => agent.image_as_it_is(),
        change => change,
    };
    let change = Change {
        agent: &agent.profile.id,
        from: during(transition),
        to: &status,
        at: now(),
        millis: Some(millis),
        box_record: match &done {
            Ok(Made::Box(up)) => BoxChange::Set(&up.record),
            Ok(Made::NoBox | Made::Told(_)) => BoxChange::Clear,
            // Whatever went wrong, it did so after the end of the box.
            Err(_) if rest == Rest::Stopped => BoxChange::Clear,
            Ok(Made::SameBox) | Err(_) => BoxChange::Keep,
        },
        image,
    };
    let recorded = agent.ctx.record(&change).await;
    if recorded.is_ok() {
        forget_image(agent, image, rest).await;
    }
    match (done, recorded) {
        (Ok(Made::Box(up)), Ok(())) => {
            agent.may_be_savable();
            let generation = agent.publish_box(status, up.record);
            watcher::spawn(agent, generation);
            agent.has_gone_on().await;
            agent.ctx.faults.reach(Point::StartFinished).await?;
            Ok(())
        }
        (Ok(Made::SameBox | Made::NoBox | Made::Told(_)), Ok(())) => {
            agent.publish_no_box();
            agent.publish(status);
            let point = match (transition, rest) {
                (Transition::RollBack { .. }, _) => Point::RollBackFinished,
                (Transition::Convert { .. }, _) => Point::ConvertFinished,
                (_, Rest::Hibernated) => Point::HibernateFinished,
                (_, Rest::Stopped | Rest::Running | Rest::Standby | Rest::Failed) => Point::StopFinished,
            };
            agent.ctx.faults.reach(point).await?;
            Ok(())
        }
        (Err(setback), recorded) => {
            tracing::warn!(agent = %agent.profile.name, reason = %status.reason, "a transition failed");
            if let Err(error) = recorded {
                tracing::error!(agent = %agent.profile.name, %error, "and could not be recorded");
            }
            match rest {
                Rest::Failed | Rest::Stopped => agent.publish_no_box(),
                Rest::Running => agent.may_be_savable(),
                Rest::Standby | Rest::Hibernated => {}
            }
            agent.publish(status);
            Err(setback.trouble)
        }
        // Its memory is nowhere but in the box now, and the next daemon finds a box that was waking.
        (Ok(Made::Box(up)), Err(error)) if agent.current_image().is_some() => {
            let trouble = Trouble::from(error);
            tracing::error!(agent = %agent.profile.name, reason = %trouble.in_full(), "is awake, which could not be recorded");
            record_awake_later(agent, during(transition), &status, millis, &up.record);
            let generation = agent.publish_box(status, up.record);
            watcher::spawn(agent, generation);
            Err(trouble)
        }
        (Ok(made), Err(error)) => {
            // The store still says what is under way, which the next daemon puts in order.
            // A box that nobody would know of must not go on.
            if let Made::Box(_) = made {
                let _ = agent.ctx.engine.sweep(&agent.profile.id).await;
            }
            let trouble = Trouble::from(error);
            agent.publish_no_box();
            agent.publish(Status::now(Rest::Failed.state(), trouble.in_full()));
            Err(trouble)
        }
    }
}

async fn forget_image(agent: &Arc<Agent>, change: ImageChange, rest: Rest) {
    match (change, rest) {
        // Whoever has made it old has said so.
        (ImageChange::Keep | ImageChange::Stale, _) => {}
        // All of it is in the box. Nobody waits for what is left on the disk.
        (ImageChange::Clear, Rest::Running) => {
            if let Some(image) = agent.set_image(None) {
                images::release(agent, &image.id).await;
                let (ctx, id) = (agent.ctx.clone(), agent.profile.id.clone());
                let discarded = async move { images::discard_of(&ctx, &id, &image.id).await };
                agent.ctx.tasks.spawn(discarded);
            }
        }
        (ImageChange::Clear, Rest::Stopped | Rest::Standby | Rest::Hibernated | Rest::Failed) => {
            images::give_up(agent).await;
        }
    }
}

/// After a bug in a transition: a box that goes on is left to go on; otherwise nothing is known of it, so
/// it is removed and the agent fails.
pub(super) async fn broken(agent: &Arc<Agent>, work: Work, recorded: State, bug: &JoinError) -> Answer {
    let trouble = Trouble::Bug {
        verb: "finish what was under way",
        reason: bug.to_string(),
    };
    tracing::error!(agent = %agent.profile.name, ?work, %bug, "a transition broke off");
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    let goes_on = match work {
        Work::Freeze | Work::MakeDurable | Work::Hibernate => true,
        Work::Snapshot => matches!(recorded, State::Running | State::Standby),
        Work::BringUp => recorded == State::Standby,
        Work::RollBack | Work::Convert | Work::Stop | Work::Delete => false,
    };
    let goes_on = goes_on && ctx.engine.thaw(id).await.is_ok();
    let rest = if goes_on { Rest::Running } else { Rest::Failed };
    if goes_on {
        agent.now_differs_from_image();
    } else if let Err(error) = ctx.engine.sweep(id).await {
        tracing::error!(agent = %agent.profile.name, %error, "its box could not be removed");
    }
    let _ = catch_up(agent).await;
    let status = Status::now(rest.state(), trouble.in_full());
    let change = Change {
        agent: id,
        from: recorded,
        to: &status,
        at: status.since,
        millis: None,
        box_record: if goes_on {
            BoxChange::Keep
        } else {
            BoxChange::Clear
        },
        image: if goes_on {
            ImageChange::Stale
        } else {
            ImageChange::Keep
        },
    };
    if let Err(error) = ctx.record(&change).await {
        tracing::error!(agent = %agent.profile.name, %error, "the failure could not be recorded");
    }
    if !goes_on {
        agent.publish_no_box();
    }
    agent.publish(status);
    Err(trouble)
}

fn why(transition: &Transition) -> String {
    match transition {
        Transition::Start { why } | Transition::Thaw { why } | Transition::Wake { why } => (*why).to_owned(),
        Transition::Freeze { why, .. } | Transition::Hibernate { why } => why.clone(),
        Transition::MakeDurable => "its memory goes to disk".to_owned(),
        Transition::Snapshot { .. } => snapshot::HELD.to_owned(),
        Transition::RollBack { snapshot, .. } => format!("rolled back to {snapshot}"),
        Transition::Convert { to, .. } => format!("its isolation becomes {to}"),
        Transition::Stop { .. } => "asked to stop".to_owned(),
        Transition::Settle { reason, saved } => match saved {
            true => format!("the box ended: {reason}; its memory is on disk"),
            false => format!("the box ended: {reason}"),
        },
        Transition::Delete { why } => why.clone(),
    }
}

fn result(transition: &Transition) -> String {
    match transition {
        Transition::Start { .. } => "started".to_owned(),
        Transition::Thaw { why } => format!("woken: {why}"),
        Transition::Wake { .. } => "woken from disk".to_owned(),
        Transition::MakeDurable => "its memory is on disk too".to_owned(),
        Transition::Snapshot { .. } => "a snapshot was taken".to_owned(),
        Transition::Convert { to, .. } => format!("its isolation is {to} now"),
        Transition::Stop { .. } => "stopped on request".to_owned(),
        Transition::Delete { .. } => "deleted".to_owned(),
        // Why it begins is what has become of it.
        Transition::Freeze { .. }
        | Transition::Hibernate { .. }
        | Transition::RollBack { .. }
        | Transition::Settle { .. } => why(transition),
    }
}
