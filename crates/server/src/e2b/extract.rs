//! Extractors whose refusals are in the form that the SDKs read.

use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::errors::{Error, Result};
use crate::api::AppState;
use crate::api::{self};

/// A JSON body. No body at all is read as `{}`.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        let api::Json(body) = api::Json::from_request(request, state).await?;
        Ok(Self(body))
    }
}

pub(super) struct Path<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let api::Path(path) = api::Path::from_request_parts(parts, state).await?;
        Ok(Self(path))
    }
}

pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let api::Query(query) = api::Query::from_request_parts(parts, state).await?;
        Ok(Self(query))
    }
}

/// Lets in whoever has a key.
pub(super) async fn require_key(
    State(state): State<AppState>,
    mut request: Request,
    next: Next,
) -> Result<Response> {
    let unauthorized = |message: &str| Error::new(StatusCode::UNAUTHORIZED, message);
    let secret = api::secret_in(request.headers())
        .ok_or_else(|| unauthorized("this needs an API key, in X-API-KEY"))?;
    let workspace = state.keys.check(secret).await?;
    let workspace = workspace.ok_or_else(|| unauthorized("there is no such API key"))?;
    request.extensions_mut().insert(workspace);
    Ok(next.run(request).await)
}
