//! Where an agent can be while nothing is under way.

use crate::records::State;

/// The states in which an agent may stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    Stopped,
    Running,
    Standby,
    Hibernated,
    Failed,
}

impl Rest {
    pub const ALL: [Rest; 5] = [
        Self::Stopped,
        Self::Running,
        Self::Standby,
        Self::Hibernated,
        Self::Failed,
    ];

    /// `None` for a state that is only passed through.
    pub fn of(state: State) -> Option<Self> {
        match state {
            State::Stopped => Some(Self::Stopped),
            State::Running => Some(Self::Running),
            State::Standby => Some(Self::Standby),
            State::Hibernated => Some(Self::Hibernated),
            State::Failed => Some(Self::Failed),
            State::Starting
            | State::Freezing
            | State::Hibernating
            | State::Waking
            | State::Stopping
            | State::Deleting => None,
        }
    }

    pub fn state(self) -> State {
        match self {
            Self::Stopped => State::Stopped,
            Self::Running => State::Running,
            Self::Standby => State::Standby,
            Self::Hibernated => State::Hibernated,
            Self::Failed => State::Failed,
        }
    }
}
