//! Who may reach what of an agent. What opens a box is taken out of the request on the way.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use dorm_engine::Id;
use http::header::{AUTHORIZATION, LOCATION, REFERRER_POLICY, SET_COOKIE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, StatusCode, Uri};

use super::answers::{self, Refusal, Why};
use super::route::GUEST_PORT;
use super::{Peer, headers};
use crate::api::{API_KEY, AppState, bearer};
use crate::keys::is_key;
use crate::lifecycle::Agent;
use crate::records::now;
use crate::tokens::{BadSignature, Operation, Signed};

const ACCESS_TOKEN: &str = "x-access-token";
const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";
/// Name of the cookie, and of the query parameter, that carry a traffic token for browsers.
pub(crate) const BROWSER_TOKEN: &str = "dorm_token";
const COOKIE_SECONDS: u32 = 30 * 24 * 3600;

/// Lets a request in, or says why not. A link with a token answers itself: with a cookie, and the same
/// place without the token.
pub(super) async fn admit(
    state: &AppState,
    agent: &Arc<Agent>,
    port: u16,
    parts: &mut Parts,
) -> Result<Option<Response>, Why> {
    let id = &agent.profile.id;
    let has_key = take_key(state, agent, parts).await?;
    let access = take(parts, ACCESS_TOKEN, |token| state.tokens.is_access(id, token));
    if port == GUEST_PORT {
        parts.headers.remove(ACCESS_TOKEN);
        let opened = has_key || access == Given::Right;
        return admit_to_guest(state, id, opened, access, parts).map(|()| None);
    }
    let traffic = take(parts, TRAFFIC_TOKEN, |token| state.tokens.is_traffic(id, token));
    parts.headers.remove(TRAFFIC_TOKEN);
    let cookies = headers::take_cookies(&mut parts.headers, BROWSER_TOKEN);
    let by_cookie = cookies.iter().any(|token| state.tokens.is_traffic(id, token));
    let linked = take_from_query(&mut parts.uri);
    let by_link = linked
        .as_deref()
        .is_some_and(|token| state.tokens.is_traffic(id, token));
    if by_link && parts.method == Method::GET && answers::wants_page(&parts.headers) {
        return Ok(Some(remember(parts, &linked.unwrap_or_default())));
    }
    let opened = has_key || access == Given::Right || traffic == Given::Right || by_cookie || by_link;
    if opened || agent.reach().public {
        return Ok(None);
    }
    match traffic == Given::Wrong || linked.is_some() {
        true => Err(Why::WrongTrafficToken),
        false => Err(Why::NeedsTrafficToken),
    }
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Given {
    Nothing,
    Wrong,
    Right,
}

/// Removes a header whose value is right. Another one may be the box's own affair.
fn take(parts: &mut Parts, name: &'static str, is_right: impl Fn(&str) -> bool) -> Given {
    let Some(value) = parts.headers.get(name) else {
        return Given::Nothing;
    };
    if !value.to_str().is_ok_and(is_right) {
        return Given::Wrong;
    }
    parts.headers.remove(name);
    Given::Right
}

/// Whether the request has a key of the agent's workspace. Keys are removed, whose ever they are.
async fn take_key(state: &AppState, agent: &Agent, parts: &mut Parts) -> Result<bool, Why> {
    let mut found = Vec::new();
    for value in parts.headers.get_all(API_KEY) {
        found.extend(value.to_str().ok().filter(|key| is_key(key)).map(str::to_owned));
    }
    for value in parts.headers.get_all(AUTHORIZATION) {
        let token = value.to_str().ok().and_then(bearer);
        found.extend(token.filter(|key| is_key(key)).map(str::to_owned));
    }
    if found.is_empty() {
        return Ok(false);
    }
    headers::remove_values(
        &mut parts.headers,
        API_KEY.parse().expect("a header name"),
        is_key,
    );
    headers::remove_values(&mut parts.headers, AUTHORIZATION, |value| {
        bearer(value).is_some_and(is_key)
    });
    for key in found {
        let checked = state.keys.check(&key).await;
        let workspace = checked.map_err(|error| Why::Failed(error.to_string()))?;
        if workspace.as_ref() == Some(&agent.profile.workspace) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn admit_to_guest(state: &AppState, id: &Id, opened: bool, token: Given, parts: &Parts) -> Result<(), Why> {
    let path = parts.uri.path();
    if is_internal(path) {
        return Err(Why::Internal);
    }
    if opened || path == "/health" {
        return Ok(());
    }
    if path == "/files"
        && token == Given::Nothing
        && let Some(request) = SignedUrl::of(&parts.method, &parts.uri)
    {
        return state
            .tokens
            .check(id, &request.signed(), now() / 1000)
            .map_err(Why::BadSignature);
    }
    Err(Why::NeedsAccessToken)
}

/// Only the daemon sets up a guest.
pub(crate) fn is_internal(path: &str) -> bool {
    path.trim_end_matches('/') == "/init"
}

/// The agent whose token a signed URL was made with.
pub(super) fn signer(state: &AppState, request: &Request) -> Result<Id, Refusal> {
    let refuse = |why| Refusal::new("", GUEST_PORT, why);
    let url = SignedUrl::of(request.method(), request.uri()).ok_or_else(|| refuse(Why::NeedsAccessToken))?;
    for agent in state.registry.all() {
        match state.tokens.check(&agent.profile.id, &url.signed(), now() / 1000) {
            Ok(()) => return Ok(agent.profile.id.clone()),
            Err(BadSignature::Wrong) => {}
            Err(expired) => return Err(refuse(Why::BadSignature(expired))),
        }
    }
    Err(refuse(Why::BadSignature(BadSignature::Wrong)))
}

/// The parts of a signed URL, decoded.
struct SignedUrl {
    path: String,
    operation: Operation,
    user: String,
    signature: String,
    expiration: Option<String>,
}

impl SignedUrl {
    fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let operation = match *method {
            Method::GET | Method::HEAD => Operation::Read,
            Method::POST | Method::PUT => Operation::Write,
            _ => return None,
        };
        let query = uri.query().unwrap_or_default().as_bytes();
        let mut url = Self {
            path: String::new(),
            operation,
            user: String::new(),
            signature: String::new(),
            expiration: None,
        };
        for (name, value) in form_urlencoded::parse(query) {
            match &*name {
                "path" => url.path = value.into_owned(),
                "username" => url.user = value.into_owned(),
                "signature" => url.signature = value.into_owned(),
                "signature_expiration" => url.expiration = Some(value.into_owned()),
                _ => {}
            }
        }
        (!url.signature.is_empty()).then_some(url)
    }

    fn signed(&self) -> Signed<'_> {
        Signed {
            path: &self.path,
            operation: self.operation,
            user: &self.user,
            signature: &self.signature,
            expiration: self.expiration.as_deref(),
        }
    }
}

/// Removes the token from the query, and gives it.
fn take_from_query(uri: &mut Uri) -> Option<String> {
    let query = uri.query()?;
    let is_token = |pair: &&str| pair.split('=').next() == Some(BROWSER_TOKEN);
    let token = query.split('&').find(is_token)?.split_once('=')?.1.to_owned();
    let rest: Vec<_> = query.split('&').filter(|pair| !is_token(pair)).collect();
    let path = uri.path();
    let whole = match rest.is_empty() {
        true => path.to_owned(),
        false => format!("{path}?{}", rest.join("&")),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(whole).ok()?);
    *uri = Uri::from_parts(parts).ok()?;
    Some(token)
}

/// A browser keeps the token as a cookie that no page can read, and its address bar does not show it.
fn remember(parts: &Parts, token: &str) -> Response {
    let tls = parts.extensions.get::<Peer>().is_some_and(|peer| peer.tls);
    let (scheme, secure) = if tls { ("https", "; Secure") } else { ("http", "") };
    let host = headers::host(parts).unwrap_or_default();
    // Whole: a path that begins with two slashes would lead elsewhere.
    let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let cookie =
        format!("{BROWSER_TOKEN}={token}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; SameSite=Lax{secure}");
    Response::builder()
        .status(StatusCode::FOUND)
        .header(LOCATION, format!("{scheme}://{host}{path}"))
        .header(SET_COOKIE, cookie)
        .header(REFERRER_POLICY, "no-referrer")
        .body(Body::empty())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_leaves_the_query_and_nothing_else_does() {
        let cases = [
            ("/a?dorm_token=x", "/a"),
            ("/a?b=1&dorm_token=x&c=%20", "/a?b=1&c=%20"),
            ("http://h/a?dorm_token=x&b", "http://h/a?b"),
        ];
        for (before, after) in cases {
            let mut uri: Uri = before.parse().unwrap();
            assert_eq!(take_from_query(&mut uri).as_deref(), Some("x"));
            assert_eq!(uri.to_string(), after);
        }
        let mut uri: Uri = "/a?my_dorm_token=x".parse().unwrap();
        assert_eq!(take_from_query(&mut uri), None);
    }

    #[test]
    fn only_the_daemon_reaches_what_sets_up_a_guest() {
        assert!(is_internal("/init"));
        assert!(is_internal("/init/"));
        assert!(!is_internal("/initial"));
    }
}
