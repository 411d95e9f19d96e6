//! Connections into boxes.
//!
//! They are kept and used again; they are filed under the agent's id, the number of its box, and how often its
//! connections were cut, so that those to an earlier box are never used for a later one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use dorm_engine::{Engine, EngineError, GuestStream, Id};
use http::Uri;
use http::uri::{Authority, Scheme};
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::route::GUEST_PORT;
use crate::lifecycle::{Agent, Held, Link, Links, Registry};

/// Of what is read from a box at once, and so of the head of an answer.
const MOST_BUFFERED: usize = 256 * 1024;
/// Between two tries to reach a server that is still coming up.
const RETRY: Duration = Duration::from_millis(50);

/// Sends requests into boxes.
pub struct Proxy {
    client: Client<Connector, Body>,
}

impl Proxy {
    pub fn new(engine: Arc<dyn Engine>, registry: Arc<Registry>) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(32)
            .http1_max_buf_size(MOST_BUFFERED)
            .build(Connector { engine, registry });
        Self { client }
    }

    pub(super) async fn request(&self, request: Request) -> Result<http::Response<Incoming>, Error> {
        self.client.request(request).await
    }
}

/// The path and query, as they were sent, at a port of one box.
pub(super) fn box_uri(id: &Id, (generation, epoch): (u64, u64), port: u16, path: &str) -> Uri {
    let authority = Authority::try_from(format!("{id}.{generation}.{epoch}:{port}"));
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(authority.expect("an id and numbers make a host name"))
        .path_and_query(path)
        .build()
        .expect("part of a URI is a URI")
}

#[derive(Clone)]
struct Connector {
    engine: Arc<dyn Engine>,
    registry: Arc<Registry>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<BoxIo, EngineError>> + Send>>;

impl tower::Service<Uri> for Connector {
    type Response = BoxIo;
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
                .expect("a host that box_uri made");
            let port = uri.port_u16().unwrap_or(GUEST_PORT);
            let agent = registry
                .by_id(&id)
                .ok_or_else(|| EngineError::NotRunning(id.clone()))?;
            let (stream, link) = connect(&*engine, &agent, port).await?;
            Ok(BoxIo {
                cut: Box::pin(link.cut_token().cancelled_owned()),
                held: link.hold(stream),
            })
        })
    }
}

/// Those that a connection to this port is one of.
pub(super) fn links(agent: &Agent, port: u16) -> &Links {
    match port {
        GUEST_PORT => &agent.links,
        _ => &agent.port_links,
    }
}

/// Waits for a server that may still be coming up with its box.
async fn connect(
    engine: &dyn Engine,
    agent: &Agent,
    port: u16,
) -> Result<(Box<dyn GuestStream>, Link), EngineError> {
    let id = &agent.profile.id;
    loop {
        let link = links(agent, port).open();
        let connected = match port {
            GUEST_PORT => engine.connect(id).await,
            port => engine.connect_port(id, port).await,
        };
        match connected {
            Err(EngineError::PortClosed { .. }) if agent.is_coming_up() => tokio::time::sleep(RETRY).await,
            connected => return Ok((connected?, link)),
        }
    }
}

/// A connection that ends when the agent's connections are cut.
struct BoxIo {
    held: Arc<Held>,
    /// Wakes whoever waits for the stream then.
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl BoxIo {
    fn poll<T>(
        &self,
        work: impl FnOnce(Pin<&mut TokioIo<&mut Box<dyn GuestStream>>>) -> Poll<std::io::Result<T>>,
    ) -> Poll<std::io::Result<T>> {
        let polled = self.held.with(|stream| work(Pin::new(&mut TokioIo::new(stream))));
        polled.unwrap_or_else(|| {
            let why = "the agent goes to sleep";
            Poll::Ready(Err(std::io::Error::new(
                std::io::ErrorKind::ConnectionAborted,
                why,
            )))
        })
    }
}

impl Connection for BoxIo {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for BoxIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let _ = self.cut.as_mut().poll(cx);
        self.poll(|stream| stream.poll_read(cx, buffer))
    }
}

impl Write for BoxIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.poll(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.poll(|stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.poll(|stream| stream.poll_shutdown(cx))
    }

    fn is_write_vectored(&self) -> bool {
        self.held
            .with(|stream| TokioIo::new(stream).is_write_vectored())
            .unwrap_or_default()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        self.poll(|stream| stream.poll_write_vectored(cx, slices))
    }
}
