//! Errors as clients see them: `{code, message, hint}`.

use axum::response::{IntoResponse, Response};
use dorm_engine::EngineError;
use http::StatusCode;

use super::types::ErrorBody;
use crate::lifecycle::{Trouble, in_full};
use crate::store::StoreError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    NotFound,
    AlreadyExists,
    InvalidArgument,
    Conflict,
    Unauthorized,
    TooLarge,
    NoSpace,
    Unavailable,
    Internal,
}

impl Code {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::InvalidArgument => "invalid_argument",
            Self::Conflict => "conflict",
            Self::Unauthorized => "unauthorized",
            Self::TooLarge => "too_large",
            Self::NoSpace => "no_space",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists | Self::Conflict => StatusCode::CONFLICT,
            Self::InvalidArgument => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        let body = ErrorBody {
            code: code.as_str().to_owned(),
            message: message.into(),
            hint: None,
        };
        Self {
            status: code.status(),
            body,
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }

    pub(crate) fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(message = %self.body.message, "a request failed");
        }
        (self.status, axum::Json(self.body)).into_response()
    }
}

/// What to do about a disk that is full.
const MAKE_ROOM: &str = "it is as it was; delete agents, snapshots or templates, or give the data directory more room, and try again";

const START_AGAIN: &str = "its files are as they were; make room if there is none, and try again";

impl From<Trouble> for ApiError {
    fn from(trouble: Trouble) -> Self {
        if let Trouble::MemoryLost { .. } = trouble {
            let code = match trouble.is_no_space() {
                true => Code::NoSpace,
                false => Code::Internal,
            };
            return Self::new(code, trouble.in_full()).hint(START_AGAIN);
        }
        if trouble.is_no_space() {
            return Self::new(Code::NoSpace, trouble.in_full()).hint(MAKE_ROOM);
        }
        let error = match &trouble {
            Trouble::NotFound(_) => {
                return Self::new(Code::NotFound, trouble.to_string()).hint("`dorm ls` shows the agents");
            }
            Trouble::NoSnapshot(_) => {
                return Self::new(Code::NotFound, trouble.to_string())
                    .hint("`dorm snapshots NAME` shows its snapshots");
            }
            Trouble::SameLabel(_) => Self::new(Code::Conflict, trouble.to_string())
                .hint("name one by its id; `dorm snapshots NAME` shows them"),
            Trouble::OtherIsolation { then, .. } => Self::new(Code::Conflict, trouble.to_string()).hint(format!(
                "give the agent that isolation first, by `dorm set NAME --isolation {then}`; \
                 for a copy of the files alone, `dorm fork --files-only`"
            )),
            Trouble::Refused(_) => Self::new(Code::Conflict, trouble.to_string()),
            Trouble::ShuttingDown => Self::new(Code::Unavailable, trouble.to_string())
                .hint("try again when the daemon has been started again"),
            Trouble::Store(source) => return store_error(source),
            Trouble::Damaged(_) => Self::new(Code::Conflict, trouble.to_string())
                .hint("restore the database from a backup, or delete the agent"),
            Trouble::InUse => Self::new(Code::Conflict, trouble.to_string()),
            Trouble::NoImages(_) => Self::new(Code::Conflict, trouble.to_string())
                .hint("`dorm doctor` says what is missing; `dorm pause` and `dorm stop` work without"),
            Trouble::CannotWake(_) => Self::new(Code::Unavailable, trouble.to_string()).hint(
                "its memory is still on disk. `dorm doctor` says whether something is missing; mend that, start the daemon again if \
                 it was CRIU, and try again. `dorm stop NAME` gives up its memory, so that it starts from its files; an ephemeral \
                 agent ends with that",
            ),
            Trouble::Disk { .. } => Self::new(Code::Internal, "").hint("the daemon's log says more"),
            Trouble::Engine { source, .. } => engine_error(source),
            Trouble::Bug { .. } | Trouble::Injected(_) | Trouble::MemoryLost { .. } => {
                Self::new(Code::Internal, "")
            }
        };
        Self {
            body: ErrorBody {
                message: trouble.in_full(),
                ..error.body
            },
            ..error
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        store_error(&error)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        engine_error(&error)
    }
}

fn store_error(error: &StoreError) -> ApiError {
    let code = match error {
        StoreError::NotFound { .. } => Code::NotFound,
        StoreError::AlreadyExists { .. } => Code::AlreadyExists,
        StoreError::NoSlot { .. } => Code::Unavailable,
        StoreError::Database { .. } if error.is_full() => {
            return ApiError::new(Code::NoSpace, in_full(error)).hint(MAKE_ROOM);
        }
        StoreError::Damaged { .. } | StoreError::Database { .. } | StoreError::Migrate(_) => Code::Internal,
    };
    let answer = ApiError::new(code, in_full(error));
    match error {
        StoreError::NotFound { kind: "template", .. } => {
            answer.hint("`dorm template ls` shows the templates; `dorm template build` makes one")
        }
        StoreError::AlreadyExists { .. } => answer.hint("choose another name, or delete that one first"),
        StoreError::NoSlot { .. } => answer.hint("delete agents, or raise max_agents in the configuration"),
        StoreError::Database { .. } => answer.hint("the daemon's log says more; is the disk full?"),
        StoreError::NotFound { .. } | StoreError::Damaged { .. } | StoreError::Migrate(_) => answer,
    }
}

fn engine_error(error: &EngineError) -> ApiError {
    match error {
        _ if error.is_no_space() => ApiError::new(Code::NoSpace, in_full(error)).hint(MAKE_ROOM),
        EngineError::NotRunning(_) => ApiError::new(Code::Conflict, in_full(error)),
        EngineError::AlreadyRunning(_) => ApiError::new(Code::Conflict, in_full(error)),
        EngineError::NoEngine { .. } => ApiError::new(Code::Unavailable, in_full(error)).hint(
            "`dorm doctor` says what each isolation needs; an agent can be made with another, by --isolation",
        ),
        EngineError::NoHome(_) | EngineError::NoVolume(_) => ApiError::new(Code::NotFound, in_full(error)),
        EngineError::CannotCheckpoint(_) => ApiError::new(Code::Conflict, in_full(error))
            .hint("it goes on as it was; `dorm pause` and `dorm stop` work without a memory image"),
        EngineError::Unwritten => ApiError::new(Code::Conflict, in_full(error))
            .hint("wake it and try again in a while, or take its memory along: without --files-only"),
        EngineError::Start { .. } => ApiError::new(Code::Internal, in_full(error))
            .hint("the agent's events and the daemon's log say more; starting it again is safe"),
        _ => ApiError::new(Code::Internal, in_full(error)).hint("the daemon's log says more"),
    }
}
