//! What those are told who speak HTTP to a port that speaks HTTPS.

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use http::header::{CACHE_CONTROL, HOST, LOCATION};
use http::{HeaderValue, Method, StatusCode};

use crate::api::{ApiError, Code};

/// Leads those who ask for a page to the right place, and tells the others: whoever sent a key or a body should
/// notice that it went unencrypted.
pub(crate) fn use_https() -> Router {
    Router::new().fallback(async |request: Request| answer(&request))
}

fn answer(request: &Request) -> Response {
    let named = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let host = named.or_else(|| request.uri().authority().map(http::uri::Authority::as_str));
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let place = host.map(|host| format!("https://{host}{path}"));
    let mut error = ApiError::new(
        Code::InvalidArgument,
        "this port speaks HTTPS, and was spoken to in HTTP",
    );
    if let Some(host) = host {
        error = error.hint(format!("use https://{host}"));
    }
    let mut response = error.into_response();
    response
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let leads = matches!(*request.method(), Method::GET | Method::HEAD);
    if let Some(place) = place.and_then(|place| HeaderValue::from_str(&place).ok())
        && leads
    {
        *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        response.headers_mut().insert(LOCATION, place);
    }
    response
}
