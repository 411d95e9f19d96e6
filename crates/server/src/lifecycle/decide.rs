//! May this be done now, and what follows? Pure functions over plain data.
//!
//! Nothing here waits, locks or fails. The driver asks [`decide`] for every request, with the state that
//! the agent rests in or the work that is under way, and [`after`] when a transition has ended.

use std::time::Duration;

use dorm_engine::{Id, Isolation};
use tokio::time::Instant;

pub use super::rest::Rest;
use crate::records::{Lifetime, SnapshotKind, State};

/// What can be asked of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A user wants it to run.
    Start,
    /// Something reaches for it: a run, a file, a preview.
    EnsureRunning,
    /// A user wants it in standby.
    Pause,
    /// Nobody seems to use it.
    Idle {
        why: String,
        /// Since when.
        since: Instant,
    },
    /// To disk, for good.
    Hibernate {
        why: String,
    },
    /// To disk if it is still in standby: it has slept for long, or memory is short.
    Retire {
        why: String,
    },
    /// Its memory should be on disk while it stays in standby.
    MakeDurable,
    /// Kept as it is now.
    Snapshot {
        id: Id,
        /// `None` for one that is needed for a moment: it is not recorded, and goes with the daemon.
        label: Option<String>,
        kind: SnapshotKind,
    },
    /// Back to what it was.
    RollBack {
        snapshot: Id,
        kind: SnapshotKind,
        /// The snapshot that keeps what it is now.
        before: Id,
    },
    /// Files in the form that another engine runs on.
    Convert {
        to: Isolation,
        grace: Duration,
    },
    Stop {
        grace: Duration,
    },
    Delete,
    /// The box ended without being asked.
    BoxExited {
        /// Which of the agent's boxes: the news may come late.
        generation: u64,
        reason: String,
        /// Whether its memory, as it is at the moment of the decision, is on disk.
        saved: bool,
    },
}

/// Work that leads from one resting state to another, mostly through a state of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    /// From files.
    Start {
        why: &'static str,
    },
    /// From standby.
    Thaw {
        why: &'static str,
    },
    /// From disk.
    Wake {
        why: &'static str,
    },
    Freeze {
        why: String,
        /// Only if nobody has used it since when it begins.
        if_idle: Option<Instant>,
    },
    /// Writes the memory of a box in standby to disk.
    MakeDurable,
    Hibernate {
        why: String,
    },
    Snapshot {
        id: Id,
        /// `None` for one that is needed for a moment: it is not recorded, and goes with the daemon.
        label: Option<String>,
        kind: SnapshotKind,
    },
    RollBack {
        snapshot: Id,
        kind: SnapshotKind,
        /// The snapshot that keeps what it is now.
        before: Id,
    },
    /// Ends the box, as a stop does, and gives the home another form.
    Convert {
        to: Isolation,
        grace: Duration,
    },
    Stop {
        grace: Duration,
    },
    /// Clears away a box that ended by itself.
    Settle {
        reason: String,
        /// Whether its memory is on disk, with which nothing is lost.
        saved: bool,
    },
    Delete {
        why: String,
    },
}

/// The kind of a transition that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// From files, from standby or from disk: it will run.
    BringUp,
    Freeze,
    MakeDurable,
    Hibernate,
    Snapshot,
    RollBack,
    Convert,
    Stop,
    Delete,
}

impl Work {
    pub const ALL: [Work; 9] = [
        Self::BringUp,
        Self::Freeze,
        Self::MakeDurable,
        Self::Hibernate,
        Self::Snapshot,
        Self::RollBack,
        Self::Convert,
        Self::Stop,
        Self::Delete,
    ];

    pub fn of(transition: &Transition) -> Self {
        match transition {
            Transition::Start { .. } | Transition::Thaw { .. } | Transition::Wake { .. } => Self::BringUp,
            Transition::Freeze { .. } => Self::Freeze,
            Transition::MakeDurable => Self::MakeDurable,
            Transition::Hibernate { .. } => Self::Hibernate,
            Transition::Snapshot { .. } => Self::Snapshot,
            Transition::RollBack { .. } => Self::RollBack,
            Transition::Convert { .. } => Self::Convert,
            Transition::Stop { .. } | Transition::Settle { .. } => Self::Stop,
            Transition::Delete { .. } => Self::Delete,
        }
    }
}

/// What an agent does at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Situation {
    At(Rest),
    Busy(Work),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is so already, or no longer matters.
    Done,
    /// Nothing is under way: begin, and answer when it has ended.
    Begin(Transition),
    /// What is under way leads to where the request wants: answer with its result.
    Join,
    /// What is under way must end first; then decide again.
    Wait,
    /// As [`Decision::Wait`], and what is under way leaves off where it can.
    Hurry,
    /// As [`Decision::Wait`], and whoever else waits is refused.
    Overrule,
    Refuse(Refusal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is being deleted")]
    BeingDeleted,
    #[error("it does not run, so there is no memory to keep")]
    NothingRuns,
    #[error("it is ephemeral, and would end with its box, which has to be stopped for that")]
    Ephemeral,
}

/// How a transition ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It was not possible, and the agent was left here.
    Fell(Rest),
    /// It could not be recorded, so nothing was done.
    NotBegun,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Rest(Rest),
    /// There is no such agent any more.
    Gone,
}

/// What to do about `request` for an agent in `situation`.
pub fn decide(situation: Situation, lifetime: Lifetime, request: &Request) -> Decision {
    match situation {
        Situation::At(rest) => at_rest(rest, lifetime, request),
        Situation::Busy(work) => meanwhile(work, request),
    }
}

fn at_rest(rest: Rest, lifetime: Lifetime, request: &Request) -> Decision {
    use Decision::{Begin, Done, Refuse};
    match (rest, request) {
        (Rest::Stopped | Rest::Failed, Request::Start) => Begin(Transition::Start { why: ASKED }),
        (Rest::Stopped | Rest::Failed, Request::EnsureRunning) => Begin(Transition::Start { why: REACHED }),
        (Rest::Running, Request::Start | Request::EnsureRunning) => Done,
        (Rest::Standby, Request::Start) => Begin(Transition::Thaw { why: ASKED }),
        (Rest::Standby, Request::EnsureRunning) => Begin(Transition::Thaw { why: REACHED }),
        (Rest::Hibernated, Request::Start) => Begin(Transition::Wake { why: ASKED }),
        (Rest::Hibernated, Request::EnsureRunning) => Begin(Transition::Wake { why: REACHED }),

        (Rest::Running, Request::Pause) => Begin(Transition::Freeze {
            why: "asked to pause".to_owned(),
            if_idle: None,
        }),
        (Rest::Standby | Rest::Hibernated, Request::Pause) => Done,
        (Rest::Stopped | Rest::Failed, Request::Pause) => Refuse(Refusal::NothingRuns),

        (Rest::Running, Request::Idle { why, since }) => Begin(Transition::Freeze {
            why: why.clone(),
            if_idle: Some(*since),
        }),
        (Rest::Stopped | Rest::Standby | Rest::Hibernated | Rest::Failed, Request::Idle { .. }) => Done,

        (Rest::Running | Rest::Standby, Request::Hibernate { why }) => {
            Begin(Transition::Hibernate { why: why.clone() })
        }
        (Rest::Standby, Request::Retire { why }) => Begin(Transition::Hibernate { why: why.clone() }),
        (Rest::Stopped | Rest::Running | Rest::Hibernated | Rest::Failed, Request::Retire { .. }) => Done,
        (Rest::Hibernated, Request::Hibernate { .. }) => Done,
        (Rest::Stopped | Rest::Failed, Request::Hibernate { .. }) => Refuse(Refusal::NothingRuns),

        (Rest::Standby, Request::MakeDurable) => Begin(Transition::MakeDurable),
        (Rest::Stopped | Rest::Running | Rest::Hibernated | Rest::Failed, Request::MakeDurable) => Done,

        (
            Rest::Stopped | Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed,
            Request::Snapshot { id, label, kind },
        ) => Begin(Transition::Snapshot {
            id: id.clone(),
            label: label.clone(),
            kind: *kind,
        }),
        (
            Rest::Stopped | Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed,
            Request::RollBack {
                snapshot,
                kind,
                before,
            },
        ) => Begin(Transition::RollBack {
            snapshot: snapshot.clone(),
            kind: *kind,
            before: before.clone(),
        }),

        (
            Rest::Stopped | Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed,
            Request::Convert { to, grace },
        ) => match lifetime {
            Lifetime::Persistent => Begin(Transition::Convert {
                to: *to,
                grace: *grace,
            }),
            Lifetime::Ephemeral => Refuse(Refusal::Ephemeral),
        },

        (Rest::Stopped, Request::Stop { .. }) => Done,
        (Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed, Request::Stop { grace }) => {
            Begin(stop(lifetime, *grace))
        }

        (
            Rest::Stopped | Rest::Running | Rest::Standby | Rest::Hibernated | Rest::Failed,
            Request::Delete,
        ) => Begin(Transition::Delete {
            why: "asked to delete".to_owned(),
        }),

        (
            Rest::Standby,
            Request::BoxExited {
                reason, saved: true, ..
            },
        ) => Begin(Transition::Settle {
            reason: reason.clone(),
            saved: true,
        }),
        (Rest::Running | Rest::Standby, Request::BoxExited { reason, .. }) => Begin(settle(lifetime, reason)),
        (Rest::Stopped | Rest::Hibernated | Rest::Failed, Request::BoxExited { .. }) => Done,
    }
}

fn meanwhile(work: Work, request: &Request) -> Decision {
    use Decision::{Done, Hurry, Join, Overrule, Refuse, Wait};
    match (work, request) {
        // Whoever watches will look again.
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
            Request::Idle { .. } | Request::Retire { .. } | Request::MakeDurable,
        ) => Done,

        (Work::BringUp, Request::Start | Request::EnsureRunning) => Join,
        (Work::Hibernate, Request::Hibernate { .. }) => Join,
        (Work::Stop, Request::Stop { .. }) => Join,
        (Work::Delete, Request::Delete) => Join,

        (
            Work::BringUp
            | Work::Freeze
            | Work::MakeDurable
            | Work::Hibernate
            | Work::Snapshot
            | Work::RollBack
            | Work::Convert
            | Work::Stop,
            Request::Delete,
        ) => Overrule,
        (
            Work::Delete,
            Request::Start
            | Request::EnsureRunning
            | Request::Pause
            | Request::Hibernate { .. }
            | Request::Snapshot { .. }
            | Request::RollBack { .. }
            | Request::Convert { .. }
            | Request::Stop { .. },
        ) => Refuse(Refusal::BeingDeleted),

        // A wake from standby is a thaw, whatever goes to the disk just then.
        (Work::MakeDurable, Request::Start | Request::EnsureRunning) => Hurry,
        // A freeze for idleness may be given up, so not even a pause can join it.
        (
            Work::Freeze | Work::Snapshot | Work::RollBack | Work::Convert,
            Request::Start
            | Request::EnsureRunning
            | Request::Pause
            | Request::Hibernate { .. }
            | Request::Snapshot { .. }
            | Request::RollBack { .. }
            | Request::Convert { .. }
            | Request::Stop { .. },
        ) => Wait,
        (
            Work::BringUp | Work::MakeDurable,
            Request::Pause
            | Request::Hibernate { .. }
            | Request::Snapshot { .. }
            | Request::RollBack { .. }
            | Request::Convert { .. }
            | Request::Stop { .. },
        ) => Wait,
        (
            Work::Hibernate,
            Request::Start
            | Request::EnsureRunning
            | Request::Pause
            | Request::Snapshot { .. }
            | Request::RollBack { .. }
            | Request::Convert { .. }
            | Request::Stop { .. },
        ) => Wait,
        (
            Work::Stop,
            Request::Start
            | Request::EnsureRunning
            | Request::Pause
            | Request::Hibernate { .. }
            | Request::Snapshot { .. }
            | Request::RollBack { .. }
            | Request::Convert { .. },
        ) => Wait,

        (
            Work::BringUp
            | Work::Freeze
            | Work::MakeDurable
            | Work::Hibernate
            | Work::Snapshot
            | Work::RollBack
            // These end the box, if they begin.
            | Work::Convert
            | Work::Stop
            | Work::Delete,
            Request::BoxExited { .. },
        ) => Wait,
    }
}

const ASKED: &str = "asked to start";
const REACHED: &str = "something reached for it";

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
            saved: false,
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
        Transition::Thaw { .. } | Transition::Wake { .. } => State::Waking,
        Transition::Freeze { .. } => State::Freezing,
        Transition::MakeDurable => State::Standby,
        Transition::Hibernate { .. } => State::Hibernating,
        Transition::Snapshot { .. } => State::Freezing,
        Transition::RollBack { .. } | Transition::Convert { .. } => State::Stopping,
        Transition::Settle { saved: true, .. } => State::Hibernating,
        Transition::Stop { .. } | Transition::Settle { saved: false, .. } => State::Stopping,
        Transition::Delete { .. } => State::Deleting,
    }
}

/// Whether the transition is recorded before it begins. The others change nothing that a crash would
/// not leave in order, and are recorded when they are over: a wake from standby waits for no disk, and a
/// box that has ended is gone on one that is full, too.
pub fn is_recorded_first(transition: &Transition) -> bool {
    match transition {
        Transition::Thaw { .. }
        | Transition::Freeze { .. }
        | Transition::MakeDurable
        | Transition::Snapshot { .. }
        | Transition::Settle { .. } => false,
        Transition::Start { .. }
        | Transition::Wake { .. }
        | Transition::Hibernate { .. }
        | Transition::RollBack { .. }
        | Transition::Convert { .. }
        | Transition::Stop { .. }
        | Transition::Delete { .. } => true,
    }
}

/// Where a transition that began in `from` leads.
pub fn after(transition: &Transition, from: Rest, outcome: Outcome) -> Next {
    match (transition, outcome) {
        (Transition::Start { .. } | Transition::Thaw { .. } | Transition::Wake { .. }, Outcome::Done) => {
            Next::Rest(Rest::Running)
        }
        (Transition::Freeze { .. } | Transition::MakeDurable, Outcome::Done) => Next::Rest(Rest::Standby),
        (Transition::Hibernate { .. } | Transition::Settle { saved: true, .. }, Outcome::Done) => {
            Next::Rest(Rest::Hibernated)
        }
        (Transition::Snapshot { .. }, Outcome::Done) => Next::Rest(from),
        // The memory of the snapshot is on disk: as if it had been put there.
        (Transition::RollBack { kind, .. }, Outcome::Done) => Next::Rest(match kind {
            SnapshotKind::Full => Rest::Hibernated,
            SnapshotKind::Files => Rest::Stopped,
        }),
        (
            Transition::Convert { .. } | Transition::Stop { .. } | Transition::Settle { saved: false, .. },
            Outcome::Done,
        ) => Next::Rest(Rest::Stopped),
        (Transition::Delete { .. }, Outcome::Done) => Next::Gone,
        (
            Transition::Start { .. }
            | Transition::Thaw { .. }
            | Transition::Wake { .. }
            | Transition::Freeze { .. }
            | Transition::MakeDurable
            | Transition::Hibernate { .. }
            | Transition::Snapshot { .. }
            | Transition::RollBack { .. }
            | Transition::Convert { .. }
            | Transition::Stop { .. }
            | Transition::Settle { .. }
            | Transition::Delete { .. },
            Outcome::Fell(rest),
        ) => Next::Rest(rest),
        (
            Transition::Start { .. }
            | Transition::Thaw { .. }
            | Transition::Wake { .. }
            | Transition::Freeze { .. }
            | Transition::MakeDurable
            | Transition::Hibernate { .. }
            | Transition::Snapshot { .. }
            | Transition::RollBack { .. }
            | Transition::Convert { .. }
            | Transition::Stop { .. }
            | Transition::Settle { .. }
            | Transition::Delete { .. },
            Outcome::NotBegun,
        ) => Next::Rest(from),
    }
}
