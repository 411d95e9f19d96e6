//! What can go wrong with templates, and what it is for those who asked.

use std::io;

use dorm_engine::home::oci::OciError;
use dorm_engine::{EngineError, chain};

use crate::api::types::ErrorBody;
use crate::guest_client::{Exit, GuestError};
use crate::store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("{0}")]
    Invalid(String),
    #[error("template {0:?} is being made or deleted at this moment")]
    Busy(String),
    #[error("another template is being built from {0:?} at this moment")]
    InUse(String),
    #[error("template {0:?} was replaced while a build from it began")]
    ParentReplaced(String),
    #[error("there is no log of template {0:?}")]
    NoLog(String),
    #[error("the upload holds no usable image or root filesystem")]
    Upload(#[source] OciError),
    #[error("the upload broke off")]
    UploadBroken(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the disk has no room for this: {free} bytes are free")]
    NoRoom { free: u64 },
    #[error("a command failed: {exit}")]
    Command { exit: Exit, tail: Vec<String> },
    #[error("the box in which the template is built ended: {0}")]
    BoxEnded(String),
    #[error("it was broken off")]
    Cancelled,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error("the daemon could not {doing}")]
    Io {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// Which of the steps it was.
    #[error("step {step} of {steps} ({title}) failed")]
    Step {
        step: u32,
        steps: u32,
        title: String,
        #[source]
        source: Box<TemplateError>,
    },
}

impl TemplateError {
    pub(super) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoRoom { free: 0 },
            _ => Self::Io { doing, source },
        }
    }

    /// The stable code of [`ErrorBody`].
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid(_) | Self::UploadBroken(_) => "invalid_argument",
            Self::Busy(_) | Self::InUse(_) | Self::ParentReplaced(_) => "conflict",
            Self::NoLog(_) => "not_found",
            Self::Upload(OciError::Read(_)) => "internal",
            Self::Upload(OciError::NoRoom { .. }) | Self::NoRoom { .. } => "no_space",
            Self::Upload(_) => "invalid_argument",
            // Recipes are the caller's.
            Self::Command { .. } => "invalid_argument",
            Self::Cancelled => "unavailable",
            Self::Store(StoreError::NotFound { .. }) => "not_found",
            Self::Store(StoreError::AlreadyExists { .. }) => "already_exists",
            Self::Engine(error) if error.is_no_space() => "no_space",
            Self::Engine(EngineError::BadLayer(_)) => "invalid_argument",
            Self::Guest(GuestError::Refused { code, .. }) if code == "507" => "no_space",
            Self::Guest(GuestError::Refused { code, .. }) if code == "400" || code == "not_found" => {
                "invalid_argument"
            }
            Self::BoxEnded(_) | Self::Store(_) | Self::Engine(_) | Self::Guest(_) | Self::Io { .. } => {
                "internal"
            }
            Self::Step { source, .. } => source.code(),
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Busy(_) => "wait for the other build to end, or build under another name".to_owned(),
            Self::InUse(_) => "wait for that build to end".to_owned(),
            Self::ParentReplaced(_) => "build again".to_owned(),
            Self::Command { tail, .. } if !tail.is_empty() => format!("its last lines:\n{}", tail.join("\n")),
            Self::Upload(OciError::Several(_)) => {
                "save one image alone, as `docker save NAME` or `skopeo copy` do".to_owned()
            }
            Self::Upload(OciError::Platform { .. }) => {
                "pull the image for this machine's platform".to_owned()
            }
            Self::Upload(_) => {
                "give a tar of a root filesystem, of an OCI image layout, or what `docker save` writes"
                    .to_owned()
            }
            Self::NoRoom { .. } | Self::Engine(EngineError::NoSpace { .. }) => {
                "delete agents or templates that are not needed, or give the data directory more room"
                    .to_owned()
            }
            Self::Store(StoreError::NotFound { kind: "template", .. }) => {
                "`dorm template ls` lists the templates".to_owned()
            }
            Self::BoxEnded(_) => "the build may need more memory than a build box has".to_owned(),
            Self::Step { source, .. } => return source.hint(),
            _ => return None,
        })
    }

    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            code: self.code().to_owned(),
            message: chain(self),
            hint: self.hint(),
        }
    }
}
