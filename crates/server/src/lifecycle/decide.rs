//! May this be done now, and what follows? Pure functions over plain data.
//!
//! Nothing here waits, locks or fails. The driver asks [`decide`] for every request, with the state that
//! the agent is in or the one it is passing through, and [`after`] when a transition has ended.

use std::time::Duration;

use crate::records::{Lifetime, State};

/// What can be asked of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A user wants it to run.
    Start,
    /// Something reaches for it: a run, a file, a preview.
    EnsureRunning,
    Stop {
        grace: Duration,
    },
    Delete,
    /// The box ended without being asked.
    BoxExited {
        /// Which of the agent's boxes: the news may come late.
        generation: u64,
        reason: String,
    },
}

/// Work that leads from one resting state to another, through a state of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    Start {
        why: &'static str,
    },
    Stop {
        grace: Duration,
    },
    /// Clears away a box that ended by itself.
    Settle {
        reason: String,
    },
    Delete {
        why: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is so already.
    Done,
    /// Nothing is under way: begin, and answer when it has ended.
    Begin(Transition),
    /// What is under way leads to where the request wants: answer with its result.
    Join,
    /// What is under way must end first; then decide again.
    Wait,
    /// As [`Decision::Wait`], and whoever else waits is refused.
    Overrule,
    Refuse(Refusal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is being deleted")]
    BeingDeleted,
}

/// How a transition ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed,
    /// It could not be recorded, so nothing was done.
    NotBegun,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Rest(State),
    /// There is no such agent any more.
    Gone,
}

/// What to do about `request` for an agent in `state`.
///
/// `starting`, `stopping` and `deleting` mean that this transition is under way: an agent never rests
/// in them.
pub fn decide(state: State, lifetime: Lifetime, request: &Request) -> Decision {
    use Decision::{Begin, Done, Join, Overrule, Refuse, Wait};
    match (state, request) {
        (State::Stopped, Request::Start) => Begin(Transition::Start {
            why: "asked to start",
        }),
        (State::Stopped, Request::EnsureRunning) => Begin(Transition::Start {
            why: "something reached for it",
        }),
        (State::Stopped, Request::Stop { .. }) => Done,
        (State::Stopped, Request::Delete) => Begin(asked_to_delete()),
        (State::Stopped, Request::BoxExited { .. }) => Done,

        (State::Starting, Request::Start | Request::EnsureRunning) => Join,
        (State::Starting, Request::Stop { .. }) => Wait,
        (State::Starting, Request::Delete) => Overrule,
        (State::Starting, Request::BoxExited { .. }) => Done,

        (State::Running, Request::Start | Request::EnsureRunning) => Done,
        (State::Running, Request::Stop { grace }) => Begin(stop(lifetime, *grace)),
        (State::Running, Request::Delete) => Begin(asked_to_delete()),
        (State::Running, Request::BoxExited { reason, .. }) => Begin(settle(lifetime, reason)),

        (State::Stopping, Request::Start | Request::EnsureRunning) => Wait,
        (State::Stopping, Request::Stop { .. }) => Join,
        (State::Stopping, Request::Delete) => Overrule,
        (State::Stopping, Request::BoxExited { .. }) => Done,

        (State::Failed, Request::Start) => Begin(Transition::Start {
            why: "asked to start again",
        }),
        (State::Failed, Request::EnsureRunning) => Begin(Transition::Start {
            why: "something reached for it",
        }),
        (State::Failed, Request::Stop { grace }) => Begin(stop(lifetime, *grace)),
        (State::Failed, Request::Delete) => Begin(asked_to_delete()),
        (State::Failed, Request::BoxExited { .. }) => Done,

        (State::Deleting, Request::Start | Request::EnsureRunning | Request::Stop { .. }) => {
            Refuse(Refusal::BeingDeleted)
        }
        (State::Deleting, Request::Delete) => Join,
        (State::Deleting, Request::BoxExited { .. }) => Done,
    }
}

fn asked_to_delete() -> Transition {
    Transition::Delete {
        why: "asked to delete".to_owned(),
    }
}

fn stop(lifetime: Lifetime, grace: Duration) -> Transition {
    match lifetime {
        Lifetime::Persistent => Transition::Stop { grace },
        Lifetime::Ephemeral => Transition::Delete {
            why: "stopped, and ephemeral".to_owned(),
        },
    }
}

fn settle(lifetime: Lifetime, reason: &str) -> Transition {
    match lifetime {
        Lifetime::Persistent => Transition::Settle {
            reason: reason.to_owned(),
        },
        Lifetime::Ephemeral => Transition::Delete {
            why: format!("the box ended: {reason}"),
        },
    }
}

/// The state that an agent is in while the transition is under way.
pub fn during(transition: &Transition) -> State {
    match transition {
        Transition::Start { .. } => State::Starting,
        Transition::Stop { .. } | Transition::Settle { .. } => State::Stopping,
        Transition::Delete { .. } => State::Deleting,
    }
}

/// Where a transition that began in `from` leads.
pub fn after(transition: &Transition, from: State, outcome: Outcome) -> Next {
    match (transition, outcome) {
        (Transition::Start { .. }, Outcome::Done) => Next::Rest(State::Running),
        (Transition::Stop { .. } | Transition::Settle { .. }, Outcome::Done) => Next::Rest(State::Stopped),
        (Transition::Delete { .. }, Outcome::Done) => Next::Gone,
        (
            Transition::Start { .. }
            | Transition::Stop { .. }
            | Transition::Settle { .. }
            | Transition::Delete { .. },
            Outcome::Failed,
        ) => Next::Rest(State::Failed),
        (
            Transition::Start { .. }
            | Transition::Stop { .. }
            | Transition::Settle { .. }
            | Transition::Delete { .. },
            Outcome::NotBegun,
        ) => Next::Rest(from),
    }
}
