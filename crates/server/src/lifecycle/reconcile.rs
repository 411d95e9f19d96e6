//! Once, when the daemon starts: makes records, boxes and homes agree again.
//!
//! What the store says is compared with what is on this machine. Boxes that go on running are adopted;
//! transitions that an earlier daemon did not finish are finished or undone; boxes and homes without a
//! record are removed. Trouble with one agent makes that agent `failed`, and never keeps the daemon
//! from starting.

use std::collections::HashSet;
use std::sync::Arc;

use dorm_engine::{EngineError, Id};
use futures_util::{StreamExt as _, stream};

use super::decide::Transition;
use super::registry::Context;
use super::{Agent, Trouble, driver, watcher};
use crate::records::{AgentRecord, BoxChange, Change, Lifetime, State, Status};
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
}

/// What to do about an agent that an earlier daemon left in some state.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// It rests, and has no box.
    Keep,
    /// Its box may be running still.
    Adopt,
    /// Remove what there may be of a box, and record this.
    Rest(State, &'static str),
    FinishStop,
    FinishDelete,
}

fn plan(state: State, has_home: bool, has_box_record: bool) -> Plan {
    match (state, has_home, has_box_record) {
        (State::Deleting, true | false, true | false) => Plan::FinishDelete,
        (
            State::Stopped | State::Starting | State::Running | State::Stopping | State::Failed,
            false,
            true | false,
        ) => Plan::Rest(State::Failed, "its home is missing from the pool"),
        (State::Stopped | State::Failed, true, true | false) => Plan::Keep,
        (State::Starting, true, true | false) => {
            Plan::Rest(State::Stopped, "the daemon ended while it was starting")
        }
        (State::Running, true, true) => Plan::Adopt,
        (State::Running, true, false) => Plan::Rest(State::Stopped, "nothing is known of its box"),
        (State::Stopping, true, true) => Plan::FinishStop,
        (State::Stopping, true, false) => Plan::Rest(State::Stopped, "stopped while the daemon was away"),
    }
}

pub(super) async fn reconcile(ctx: &Arc<Context>, sweep_homes: bool) -> Result<(), ReconcileError> {
    let all = ctx.store.agents().await?;
    let found = Found {
        boxes: ctx.engine.present().await?.into_iter().collect(),
        homes: ctx.homes.list().await?.into_iter().collect(),
    };
    let known: HashSet<Id> = all
        .readable
        .iter()
        .map(|record| record.profile.id.clone())
        .collect();
    for why in &all.unreadable {
        tracing::error!(%why, "an agent's record cannot be read at all; no home is removed until that is mended");
    }
    let agents = all.readable.len();
    stream::iter(all.readable)
        .for_each_concurrent(AT_ONCE, |record| settle(ctx, &found, record))
        .await;
    for id in found.boxes.difference(&known) {
        tracing::info!(%id, "removing a box that belongs to no agent");
        if let Err(error) = ctx.engine.sweep(id).await {
            tracing::error!(%id, %error, "a box that belongs to no agent could not be removed");
        }
    }
    if sweep_homes && all.unreadable.is_empty() {
        remove_homes(ctx, found.homes.difference(&known)).await?;
    } else {
        tracing::warn!("homes without a record are kept, as the records are new or damaged");
    }
    tracing::info!(
        agents,
        boxes = found.boxes.len(),
        "records, boxes and homes agree"
    );
    Ok(())
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

async fn settle(ctx: &Arc<Context>, found: &Found, mut record: AgentRecord) {
    let id = record.profile.id.clone();
    let plan = plan(
        record.status.state,
        found.homes.contains(&id),
        record.box_record.is_some(),
    );
    let box_record = record.box_record.take();
    let agent = Agent::new(ctx.clone(), record);
    ctx.enroll(&agent);
    let settled = match plan {
        Plan::Keep if found.boxes.contains(&id) => sweep(&agent).await,
        Plan::Keep => Ok(()),
        Plan::Rest(state, reason) => rest(&agent, state, reason).await,
        Plan::FinishDelete => {
            driver::resume(
                &agent,
                Transition::Delete {
                    why: agent.published().status.reason,
                },
            );
            Ok(())
        }
        Plan::Adopt | Plan::FinishStop => match box_record {
            Some(box_record) => {
                let adopted = ctx.engine.adopt(&agent.box_spec(), &box_record).await;
                match (adopted.map_err(Trouble::engine("be adopted")), plan) {
                    (Ok(true), Plan::FinishStop) => {
                        driver::resume(
                            &agent,
                            Transition::Stop {
                                grace: ctx.stop_grace,
                            },
                        );
                        Ok(())
                    }
                    (Ok(true), _) => {
                        let generation = agent.publish_box(agent.published().status, box_record);
                        watcher::spawn(&agent, generation);
                        Ok(())
                    }
                    (Ok(false), Plan::FinishStop) => {
                        rest(&agent, State::Stopped, "stopped while the daemon was away").await
                    }
                    (Ok(false), _) => {
                        rest(&agent, State::Stopped, "the box ended while the daemon was away").await
                    }
                    (Err(trouble), _) => Err(trouble),
                }
            }
            None => rest(&agent, State::Stopped, "nothing is known of its box").await,
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
            driver::resume(
                agent,
                Transition::Delete {
                    why: reason.to_owned(),
                },
            );
            Ok(())
        }
        _ => record_rest(agent, state, reason).await,
    }
}

async fn record_rest(agent: &Arc<Agent>, state: State, reason: &str) -> Result<(), Trouble> {
    let now = agent.published().status;
    if now.state == state && now.reason == reason {
        return Ok(());
    }
    let status = Status::now(state, reason);
    let box_record = BoxChange::Clear;
    let change = Change {
        agent: &agent.profile.id,
        from: now.state,
        to: &status,
        millis: None,
        box_record,
    };
    agent.ctx.store.change_state(&change).await?;
    agent.publish(status);
    Ok(())
}
