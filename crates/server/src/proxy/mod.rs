//! The traffic of boxes: every port of every agent, the guest's included, behind the daemon's one port.
//!
//! ```text
//!   request ──▶ route: by host name, by headers, by signature ──▶ access: token, key, public
//!                  │ none of these                                   │
//!                  ▼                                                 ▼
//!                 API ──▶ /v1/agents/…/guest ─────────────▶ forward ──▶ upstream: inside the box
//! ```
//!
//! The daemon is the boundary of trust: a guest asks for no token, because nothing but the daemon reaches it. What
//! opens a box stays here: neither tokens nor keys are passed on.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::api::AppState;

mod access;
mod answers;
mod forward;
mod headers;
mod route;
mod upstream;

pub(crate) use access::{BROWSER_TOKEN, is_internal};
pub(crate) use forward::{Failed, forward};
pub(crate) use headers::for_guest;
pub(crate) use route::GUEST_PORT;
pub use upstream::Proxy;

use answers::Refusal;
use route::Route;

/// Who sent a request, as the listener saw it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) address: std::net::SocketAddr,
    pub(crate) tls: bool,
}

/// Takes what is meant for a box, and leaves the rest to the API.
pub(crate) async fn front(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let answer = match route::route(&state.names, &request) {
        Route::Api => return next.run(request).await,
        Route::Box { id, port } => to_box(&state, &id, port, request).await,
        Route::Signed => signed(&state, request).await,
    };
    let response = answer.unwrap_or_else(Refusal::into_response);
    state.metrics.requested_of_box(response.status().as_u16());
    response
}

async fn to_box(state: &AppState, id: &str, port: u16, request: Request) -> Result<Response, Refusal> {
    let wants_page = answers::wants_page(request.headers());
    let refuse = |why| Refusal::new(id, port, why).page_if(wants_page);
    let found = id.parse().ok().and_then(|id| state.registry.by_id(&id));
    let agent = found.ok_or_else(|| refuse(answers::Why::NotFound))?;
    let (mut parts, body) = request.into_parts();
    if let Some(redirect) = access::admit(state, &agent, port, &mut parts)
        .await
        .map_err(refuse)?
    {
        return Ok(redirect);
    }
    let admitted = state.sandboxes.admit(&agent).await;
    admitted.map_err(|not| refuse(not.into()))?;
    headers::forward(&mut parts, &agent.reach(), port);
    let host = headers::host(&parts);
    let request = Request::from_parts(parts, body);
    match forward(&state.proxy, &agent, port, request).await {
        Ok(response) => Ok(response),
        Err(failed) => Err(answers::explain(state, &agent, refuse(failed.into()), host).await),
    }
}

/// A signed URL names no agent: it is the one whose token made the signature.
async fn signed(state: &AppState, request: Request) -> Result<Response, Refusal> {
    let id = access::signer(state, &request)?;
    to_box(state, id.as_str(), GUEST_PORT, request).await
}
