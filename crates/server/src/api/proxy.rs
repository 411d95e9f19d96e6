//! `/v1/agents/{agent}/guest/…`: to the guest of a box, which is started if there is none.
//!
//! Bodies stream both ways, with neither limit nor timeout. Connections to a guest are kept and used
//! again; they are filed under the agent's id and the number of its box, so that those to an earlier box
//! are never used for a later one.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use dorm_engine::{Engine, EngineError, GuestStream, Id};
use http::header::{
    AUTHORIZATION, CONNECTION, EXPECT, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::auth::{API_KEY, bearer};
use super::errors::{ApiError, ApiResult, Code};
use super::extract::Path;
use super::state::AppState;
use crate::lifecycle::{Link, OpenRequest, Registry, in_full};
use crate::records::{State as AgentState, Workspace};

/// Connections to guests.
pub struct Guests {
    client: Client<Connector, Body>,
}

impl Guests {
    pub fn new(engine: Arc<dyn Engine>, registry: Arc<Registry>) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(60))
            .pool_max_idle_per_host(8)
            .build(Connector { engine, registry });
        Self { client }
    }
}

pub(super) async fn to_guest(
    State(state): State<AppState>,
    Extension(workspace): Extension<Workspace>,
    Path((agent, _)): Path<(String, String)>,
    mut request: Request,
) -> ApiResult<Response> {
    let agent = state.registry.get(&workspace, &agent)?;
    // Counted before the state is looked at: a box with an open request is not idle.
    let open = agent.open_request();
    agent.ensure_running().await?;
    let which = (agent.generation(), agent.links.epoch());
    *request.uri_mut() = guest_uri(&agent.profile.id, which, request.uri());
    *request.version_mut() = http::Version::HTTP_11;
    forward_headers(request.headers_mut());
    let mut asking = pin!(state.guests.client.request(request));
    let mut published = agent.subscribe();
    let answered = loop {
        let paused = async {
            let seen = published.wait_for(|now| now.status.state == AgentState::Standby);
            seen.await.is_ok()
        };
        tokio::select! {
            answered = &mut asking => break answered,
            // Paused in the very moment in which the request came: it would not be answered.
            _ = paused => agent.ensure_running().await?,
        }
    };
    let response = answered.map_err(|error| {
        ApiError::new(
            Code::Unavailable,
            format!("the guest did not answer: {}", in_full(&error)),
        )
        .status(StatusCode::BAD_GATEWAY)
        .hint("the box may just have ended; trying again starts it anew")
    })?;
    let (mut parts, body) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    Ok(Response::from_parts(
        parts,
        Body::new(Guarded { body, _open: open }),
    ))
}

/// The same path and query, as they were sent, below the guest's root.
fn guest_uri(id: &Id, (generation, epoch): (u64, u64), uri: &Uri) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    // "/v1/agents/{agent}/guest" lies before the fifth slash.
    let at = whole.match_indices('/').nth(4).map_or(whole.len(), |(at, _)| at);
    let authority = Authority::try_from(format!("{id}.{generation}.{epoch}"));
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(authority.expect("an id and numbers make a host name"))
        .path_and_query(&whole[at..])
        .build()
        .expect("part of a URI is a URI")
}

fn forward_headers(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
    headers.remove(HOST);
    headers.remove(EXPECT);
    // The key is for the daemon. A basic `Authorization` names the user of a run, and is the guest's.
    headers.remove(API_KEY);
    let is_key = |value: &HeaderValue| value.to_str().is_ok_and(|v| bearer(v).is_some());
    let users: Vec<HeaderValue> = headers
        .get_all(AUTHORIZATION)
        .iter()
        .filter(|v| !is_key(v))
        .cloned()
        .collect();
    headers.remove(AUTHORIZATION);
    for user in users {
        headers.append(AUTHORIZATION, user);
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    let fixed = [
        CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ];
    for name in fixed {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
}

/// A response that keeps its request open until its end.
struct Guarded {
    body: Incoming,
    _open: OpenRequest,
}

impl http_body::Body for Guarded {
    type Data = bytes::Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[derive(Clone)]
struct Connector {
    engine: Arc<dyn Engine>,
    registry: Arc<Registry>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<GuestIo, EngineError>> + Send>>;

impl tower::Service<Uri> for Connector {
    type Response = GuestIo;
    type Error = EngineError;
    type Future = Connecting;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), EngineError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Connecting {
        let (engine, registry) = (self.engine.clone(), self.registry.clone());
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let id: Id = host
                .split('.')
                .next()
                .unwrap_or_default()
                .parse()
                .expect("a host that guest_uri made");
            let agent = registry
                .by_id(&id)
                .ok_or_else(|| EngineError::NotRunning(id.clone()))?;
            let link = agent.links.open();
            let stream = TokioIo::new(engine.connect(&id).await?);
            Ok(GuestIo {
                stream,
                cut: Box::pin(link.cut.clone().cancelled_owned()),
                _link: link,
            })
        })
    }
}

/// A connection that ends when the agent's connections are cut.
struct GuestIo {
    stream: TokioIo<Box<dyn GuestStream>>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _link: Link,
}

impl Connection for GuestIo {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for GuestIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            let why = "the agent goes to sleep";
            return Poll::Ready(Err(std::io::Error::new(
                std::io::ErrorKind::ConnectionAborted,
                why,
            )));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for GuestIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }
}
