//! Records that follow what they tell of. A thaw and a freeze are acknowledged first and recorded
//! then, in their order, and before anything else of the agent is recorded.
//!
//! A crash in between is harmless: the next daemon finds a box that is frozen or is not, whatever was
//! recorded, and puts it into the state that it adopts it in.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use dorm_engine::Id;

use super::{Agent, images};
use crate::faults::Point;
use crate::records::{BoxChange, Change, ImageChange, State, Status};

#[derive(Default)]
pub(super) struct Lag {
    pending: Mutex<VecDeque<Late>>,
    /// Held by the one who writes, so that the order is kept.
    writing: tokio::sync::Mutex<()>,
}

pub(super) struct Late {
    pub(super) from: State,
    pub(super) to: Status,
    pub(super) millis: i64,
    /// A memory image that is stale from now on, and of no use to anyone.
    pub(super) stale: Option<Id>,
}

/// Records this soon.
pub(super) fn record_later(agent: &Arc<Agent>, late: Late) {
    agent
        .lag
        .pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push_back(late);
    let later = agent.clone();
    agent.ctx.tasks.spawn(async move {
        // The daemon that was ended in order catches up itself; one that dies does not get here.
        if !later.ctx.is_closed() {
            catch_up(&later).await;
        }
    });
}

/// Returns when everything so far is recorded.
pub(super) async fn catch_up(agent: &Arc<Agent>) {
    let _turn = agent.lag.writing.lock().await;
    loop {
        let next = agent
            .lag
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front();
        let Some(late) = next else { return };
        let change = Change {
            agent: &agent.profile.id,
            from: late.from,
            to: &late.to,
            millis: Some(late.millis),
            box_record: BoxChange::Keep,
            image: match late.stale {
                Some(_) => ImageChange::Clear,
                None => ImageChange::Keep,
            },
        };
        let recorded = agent.ctx.record(&change).await;
        let point = match late.to.state {
            State::Standby => Point::FreezeRecorded,
            _ => Point::ThawRecorded,
        };
        if let Err(fault) = agent.ctx.faults.reach(point).await {
            tracing::warn!(agent = %agent.profile.name, %fault, "a change of state is recorded");
        }
        match (recorded, late.stale) {
            (Ok(()), Some(image)) => images::discard(agent, &image).await,
            (Ok(()), None) => {}
            // The next record says where the agent is.
            (Err(error), _) => {
                tracing::error!(agent = %agent.profile.name, %error, "a change of state could not be recorded");
            }
        }
    }
}
