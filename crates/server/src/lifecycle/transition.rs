//! What all transitions have in common: record, do, record again.

use std::sync::Arc;
use std::time::Instant;

use dorm_engine::BoxRecord;
use tokio::task::JoinError;

use super::agent::Answer;
use super::decide::{Next, Outcome, Transition, after, during};
use super::{Agent, Trouble, delete, start, stop, watcher};
use crate::faults::Point;
use crate::records::{BoxChange, Change, State, Status};
use crate::store::StoreError;

/// Runs a transition from the state in which the agent rests.
pub(super) async fn run(agent: Arc<Agent>, transition: Transition) -> Answer {
    let from = agent.state();
    let began = Instant::now();
    let status = Status::now(during(&transition), why(&transition));
    let change = Change {
        agent: &agent.profile.id,
        from,
        to: &status,
        millis: None,
        box_record: BoxChange::Keep,
    };
    match agent.ctx.store.change_state(&change).await {
        Ok(()) => {}
        Err(StoreError::NotFound { .. }) => {
            leave(&agent);
            return Err(Trouble::NotFound(agent.profile.name.clone()));
        }
        Err(error) => {
            debug_assert_eq!(after(&transition, from, Outcome::NotBegun), Next::Rest(from));
            return Err(error.into());
        }
    }
    agent.publish(status);
    proceed(agent, transition, from, began).await
}

/// Runs a transition whose beginning the store has already.
pub(super) async fn resume(agent: Arc<Agent>, transition: Transition) -> Answer {
    let from = agent.state();
    proceed(agent, transition, from, Instant::now()).await
}

async fn proceed(agent: Arc<Agent>, transition: Transition, from: State, began: Instant) -> Answer {
    let done = work(&agent, &transition, from).await;
    let outcome = if done.is_ok() {
        Outcome::Done
    } else {
        Outcome::Failed
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
        Next::Rest(state) => {
            let millis = i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX);
            come_to_rest(&agent, &transition, state, done, millis).await
        }
    }
}

/// There is no such agent any more.
fn leave(agent: &Arc<Agent>) {
    agent.ctx.forget(agent);
    agent.publish_gone();
}

/// The work itself. A start gives the record of the box.
async fn work(
    agent: &Arc<Agent>,
    transition: &Transition,
    from: State,
) -> Result<Option<BoxRecord>, Trouble> {
    match transition {
        Transition::Start { .. } => start::start(agent, from).await.map(Some),
        Transition::Stop { grace } => stop::stop(agent, *grace).await.map(|()| None),
        Transition::Settle { .. } => stop::settle(agent).await.map(|()| None),
        Transition::Delete { .. } => delete::delete(agent).await.map(|()| None),
    }
}

async fn come_to_rest(
    agent: &Arc<Agent>,
    transition: &Transition,
    state: State,
    done: Result<Option<BoxRecord>, Trouble>,
    millis: i64,
) -> Answer {
    let reason = match &done {
        Ok(_) => result(transition),
        Err(trouble) => trouble.in_full(),
    };
    let status = Status::now(state, reason);
    let box_record = match &done {
        Ok(Some(record)) => BoxChange::Set(record),
        Ok(None) => BoxChange::Clear,
        Err(_) => BoxChange::Keep,
    };
    let from = during(transition);
    let change = Change {
        agent: &agent.profile.id,
        from,
        to: &status,
        millis: Some(millis),
        box_record,
    };
    let recorded = agent.ctx.store.change_state(&change).await;
    match (done, recorded) {
        (Ok(Some(record)), Ok(())) => {
            let generation = agent.publish_box(status, record);
            watcher::spawn(agent, generation);
            agent.ctx.faults.reach(Point::StartFinished).await?;
            Ok(())
        }
        (Ok(None), Ok(())) => {
            agent.publish_no_box();
            agent.publish(status);
            agent.ctx.faults.reach(Point::StopFinished).await?;
            Ok(())
        }
        (Err(trouble), recorded) => {
            tracing::warn!(agent = %agent.profile.name, reason = %status.reason, "a transition failed");
            if let Err(error) = recorded {
                tracing::error!(agent = %agent.profile.name, %error, "and could not be recorded");
            }
            agent.publish_no_box();
            agent.publish(status);
            Err(trouble)
        }
        (Ok(record), Err(error)) => {
            // The store still says `starting` or `stopping`, which the next daemon puts in order.
            // A box that nobody would know of must not go on.
            if record.is_some() {
                let _ = agent.ctx.engine.sweep(&agent.profile.id).await;
            }
            let trouble = Trouble::from(error);
            agent.publish_no_box();
            agent.publish(Status::now(State::Failed, trouble.in_full()));
            Err(trouble)
        }
    }
}

/// After a bug in a transition: nothing is known of the box, so it is removed and the agent fails.
pub(super) async fn broken(agent: &Arc<Agent>, during: State, bug: &JoinError) -> Answer {
    let trouble = Trouble::Bug {
        verb: "finish what was under way",
        reason: bug.to_string(),
    };
    tracing::error!(agent = %agent.profile.name, %during, %bug, "a transition broke off");
    if let Err(error) = agent.ctx.engine.sweep(&agent.profile.id).await {
        tracing::error!(agent = %agent.profile.name, %error, "its box could not be removed");
    }
    let status = Status::now(State::Failed, trouble.in_full());
    let box_record = BoxChange::Clear;
    let change = Change {
        agent: &agent.profile.id,
        from: during,
        to: &status,
        millis: None,
        box_record,
    };
    if let Err(error) = agent.ctx.store.change_state(&change).await {
        tracing::error!(agent = %agent.profile.name, %error, "the failure could not be recorded");
    }
    agent.publish_no_box();
    agent.publish(status);
    Err(trouble)
}

fn why(transition: &Transition) -> String {
    match transition {
        Transition::Start { why } => (*why).to_owned(),
        Transition::Stop { .. } => "asked to stop".to_owned(),
        Transition::Settle { reason } => format!("the box ended: {reason}"),
        Transition::Delete { why } => why.clone(),
    }
}

fn result(transition: &Transition) -> String {
    match transition {
        Transition::Start { .. } => "started".to_owned(),
        Transition::Stop { .. } => "stopped on request".to_owned(),
        Transition::Settle { reason } => format!("the box ended: {reason}"),
        Transition::Delete { .. } => "deleted".to_owned(),
    }
}
