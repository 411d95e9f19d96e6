//! Errors as the E2B SDKs read them: `{code, message}`, where the code is the status.

use axum::response::{IntoResponse, Response};
use dorm_engine::EngineError;
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use serde_json::json;

use crate::api::ApiError;
use crate::lifecycle::Trouble;
use crate::store::StoreError;

/// Seconds after which one may ask again for what there was no room for.
const LATER: u32 = 5;

#[derive(Debug)]
pub(super) struct Error {
    pub(super) status: StatusCode,
    pub(super) message: String,
    retry: Retry,
}

/// What an SDK makes of it: without a word it tries again after a 429, 502, 503 or 504.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retry {
    Silent,
    Later,
    Never,
}

pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            retry: Retry::Silent,
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn no_sandbox(id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("sandbox {id:?} was not found"))
    }

    pub(super) fn too_many(message: impl Into<String>) -> Self {
        Self {
            retry: Retry::Later,
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// As a part of an answer.
    pub(super) fn to_json(&self) -> serde_json::Value {
        json!({ "code": self.status.as_u16(), "message": self.message })
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        if self.status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(message = %self.message, "a request failed");
        }
        let mut response = (self.status, axum::Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        match self.retry {
            Retry::Silent => {}
            Retry::Later => {
                headers.insert(RETRY_AFTER, HeaderValue::from(LATER));
            }
            Retry::Never => {
                headers.insert("should-retry", HeaderValue::from_static("false"));
            }
        }
        response
    }
}

impl From<ApiError> for Error {
    fn from(error: ApiError) -> Self {
        let message = match error.body.hint {
            Some(hint) => format!("{} ({hint})", error.body.message),
            None => error.body.message,
        };
        Self::new(error.status, message)
    }
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        let no_memory = match &trouble {
            Trouble::NoImages(_) | Trouble::CannotWake(_) => true,
            Trouble::Engine { source, .. } => matches!(**source, EngineError::CannotCheckpoint(_)),
            _ => false,
        };
        let no_room = match &trouble {
            Trouble::Store(error) => matches!(**error, StoreError::NoSlot { .. }),
            _ => false,
        };
        let error = Self::from(ApiError::from(trouble));
        if no_memory {
            // Not a conflict, which the SDKs read as "paused already".
            return Self {
                status: StatusCode::SERVICE_UNAVAILABLE,
                retry: Retry::Never,
                ..error
            };
        }
        if no_room {
            return Self::too_many(error.message);
        }
        error
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::from(Trouble::from(error))
    }
}
