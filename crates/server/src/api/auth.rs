//! Lets in whoever has a key, and says which workspace it opens.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::errors::{ApiError, ApiResult, Code};
use super::state::AppState;

pub(crate) const API_KEY: &str = "x-api-key";

pub(super) async fn require_key(
    State(state): State<AppState>,
    mut request: Request,
    next: Next,
) -> ApiResult<Response> {
    let secret = secret_in(request.headers()).ok_or_else(|| {
        ApiError::new(Code::Unauthorized, "this needs an API key").hint(
            "send it as X-API-KEY or as a bearer token; the first one lies in api-key in the data directory",
        )
    })?;
    let workspace = state.keys.check(secret).await?.ok_or_else(|| {
        ApiError::new(Code::Unauthorized, "there is no such API key").hint("`dorm key create` makes one")
    })?;
    request.extensions_mut().insert(workspace);
    Ok(next.run(request).await)
}

pub(crate) fn secret_in(headers: &HeaderMap) -> Option<&str> {
    match headers.get(API_KEY) {
        Some(key) => key.to_str().ok(),
        None => bearer(headers.get(AUTHORIZATION)?.to_str().ok()?),
    }
}

/// The token, if the value of an `Authorization` header is a bearer token.
pub(crate) fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
