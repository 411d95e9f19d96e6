//! Archives of the files that a build copies. The link is all that is needed to upload one, and serves until one is there: who is
//! cut off may try again.

use axum::Extension;
use axum::body::Body as Stream;
use axum::extract::{Request, State};
use dorm_engine::Id;
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;

use super::super::errors::{Error, Result};
use super::super::extract::Path;
use super::MAX_LINKS;
use crate::api::{ApiError, AppState};
use crate::proxy::Peer;
use crate::records::Workspace;

#[derive(Clone)]
pub(super) struct Link {
    token: String,
    workspace: Workspace,
    hash: String,
}

fn check_hash(hash: &str) -> Result<()> {
    let fits = (8..=128).contains(&hash.len()) && hash.bytes().all(|b| b.is_ascii_hexdigit());
    match fits {
        true => Ok(()),
        false => Err(Error::invalid(format!("{hash:?} is no hash of files"))),
    }
}

pub(in crate::e2b) async fn upload_link(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((_, hash)): Path<(String, String)>,
    request: Request,
) -> Result<(StatusCode, axum::Json<Value>)> {
    check_hash(&hash)?;
    let present = state.templates.upload(&workspace, &hash).is_some();
    let origin = origin(&request).ok_or_else(|| Error::invalid("the request names no host"))?;
    let token = format!("{}{}", Id::random(), Id::random());
    let url = format!("{origin}/templates/uploads/{token}");
    let mut known = state.builds.known();
    known.links.push_back(Link {
        token,
        workspace,
        hash,
    });
    if known.links.len() > MAX_LINKS {
        known.links.pop_front();
    }
    Ok((
        StatusCode::CREATED,
        axum::Json(json!({ "present": present, "url": url })),
    ))
}

/// Scheme and host by which the client has reached this server, perhaps by way of another that speaks TLS.
fn origin(request: &Request) -> Option<String> {
    let headers = request.headers();
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let forwarded = text("x-forwarded-proto").filter(|proto| ["http", "https"].contains(proto));
    let tls = request.extensions().get::<Peer>().is_some_and(|peer| peer.tls);
    let scheme = forwarded.unwrap_or(if tls { "https" } else { "http" });
    let named = text("x-forwarded-host")
        .filter(|_| forwarded.is_some())
        .or_else(|| text(HOST.as_str()));
    let host = named.or_else(|| request.uri().authority().map(http::uri::Authority::as_str))?;
    Some(format!("{scheme}://{host}"))
}

pub(in crate::e2b) async fn upload(
    State(state): State<AppState>,
    Path(token): Path<String>,
    headers: HeaderMap,
    body: Stream,
) -> Result<StatusCode> {
    let same = |link: &Link| bool::from(link.token.as_bytes().ct_eq(token.as_bytes()));
    let found = state.builds.known().links.iter().find(|link| same(link)).cloned();
    let Some(Link { workspace, hash, .. }) = found else {
        let message = "this link is not known, or was used already";
        return Err(Error::new(StatusCode::FORBIDDEN, message));
    };
    let length = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let taken = state
        .templates
        .take_upload(&workspace, &hash, length, body.into_data_stream())
        .await;
    taken.map_err(ApiError::from)?;
    state.builds.known().links.retain(|link| !same(link));
    Ok(StatusCode::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_where_the_client_is() {
        let of = |headers: &[(&str, &str)], tls: bool| {
            let mut request = Request::builder().uri("/x");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let mut request = request.body(Stream::empty()).unwrap();
            let address = "127.0.0.1:9".parse().unwrap();
            request.extensions_mut().insert(Peer { address, tls });
            origin(&request)
        };
        assert_eq!(
            of(&[("host", "127.0.0.1:3676")], false).unwrap(),
            "http://127.0.0.1:3676"
        );
        assert_eq!(
            of(&[("host", "api.example.org")], true).unwrap(),
            "https://api.example.org"
        );
        let forwarded = [
            ("host", "10.0.0.1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "dorm.example"),
        ];
        assert_eq!(of(&forwarded, false).unwrap(), "https://dorm.example");
        assert_eq!(
            of(&[("host", "a"), ("x-forwarded-proto", "javascript")], false).unwrap(),
            "http://a"
        );
        assert_eq!(of(&[], false), None);
    }
}
