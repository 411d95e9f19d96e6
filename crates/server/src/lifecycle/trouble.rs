//! What can go wrong with what is asked of an agent.

use std::error::Error;
use std::sync::Arc;

use dorm_engine::{EngineError, Isolation};

use super::decide::Refusal;
use crate::faults::Injected;
use crate::store::StoreError;

/// Cloned for everyone who waited for the same transition.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Trouble {
    #[error("there is no agent {0:?}")]
    NotFound(String),
    #[error("there is no snapshot {0:?} of it")]
    NoSnapshot(String),
    #[error("more than one snapshot of it has the label {0:?}")]
    SameLabel(String),
    /// Memory that one engine wrote means nothing to another.
    #[error("the memory of the snapshot is that of a box with isolation {then}, and the agent has {now} now")]
    OtherIsolation { then: Isolation, now: Isolation },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the daemon is shutting down")]
    ShuttingDown,
    #[error("{0}")]
    Damaged(String),
    /// Something reached for it in the moment in which it was to go to sleep.
    #[error("it is in use")]
    InUse,
    #[error("memory images cannot be made on this machine: {0}")]
    NoImages(String),
    /// Nothing is wrong with the image.
    #[error("its memory is on disk and cannot be brought back on this machine now: {0}")]
    CannotWake(String),
    #[error("its memory is lost: {why}; and it was not started from its files")]
    MemoryLost {
        /// Why it cannot be brought back.
        why: String,
        /// And why it did not start.
        #[source]
        source: Arc<Trouble>,
    },
    #[error("the agent could not {verb}")]
    Disk {
        verb: &'static str,
        #[source]
        source: Arc<std::io::Error>,
    },
    #[error("the agent could not {verb}")]
    Engine {
        verb: &'static str,
        #[source]
        source: Arc<EngineError>,
    },
    #[error("the record could not be kept")]
    Store(#[source] Arc<StoreError>),
    #[error("the agent could not {verb}: {reason}")]
    Bug { verb: &'static str, reason: String },
    #[error(transparent)]
    Injected(Arc<Injected>),
}

impl Trouble {
    pub(crate) fn engine(verb: &'static str) -> impl FnOnce(EngineError) -> Self {
        move |source| Self::Engine {
            verb,
            source: Arc::new(source),
        }
    }

    pub(super) fn disk(verb: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Disk {
            verb,
            source: Arc::new(source),
        }
    }

    /// Whether a disk is full. Nothing else is wrong then, and it may be tried again.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Disk { source, .. } => dorm_engine::is_no_space(&**source),
            Self::Engine { source, .. } => source.is_no_space(),
            Self::Store(source) => source.is_full(),
            Self::MemoryLost { source, .. } => source.is_no_space(),
            _ => false,
        }
    }

    /// Whether it is the memory itself that cannot be saved, or brought back, and not this machine that could not do it now.
    pub(super) fn is_about_memory(&self) -> bool {
        match self {
            Self::NoImages(_) => true,
            Self::Engine { source, .. } => {
                matches!(
                    **source,
                    EngineError::CannotCheckpoint(_) | EngineError::BadImage(_)
                )
            }
            _ => false,
        }
    }

    /// With all its causes, for the record and for people.
    pub fn in_full(&self) -> String {
        in_full(self)
    }
}

impl From<StoreError> for Trouble {
    fn from(source: StoreError) -> Self {
        Self::Store(Arc::new(source))
    }
}

impl From<Injected> for Trouble {
    fn from(source: Injected) -> Self {
        Self::Injected(Arc::new(source))
    }
}

/// An error and its causes in one line.
pub(crate) fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
