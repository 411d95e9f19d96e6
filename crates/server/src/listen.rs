//! Connections from outside: HTTP/1.1 and HTTP/2 on one port, in TLS where that is configured.
//!
//! A connection on which no request is open is closed after a while, however slowly its client sends: one that
//! never completes a head has no open request. Upgraded connections are no longer ours.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::Service as _;

use crate::held::Held;
use crate::proxy::Peer;
use crate::tls::{Accepted, Tls, use_https};

/// Between two requests, and until the first one is whole.
const IDLE: Duration = Duration::from_secs(120);
/// From the connection to the end of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(15);
/// Of the head of a request, and of what is read of a body at once.
const MOST_BUFFERED: usize = 256 * 1024;
const MOST_STREAMS: u32 = 256;
/// What one stream, and one connection, may have under way before its reader has taken it.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// A client that has gone without a word is found out after about two minutes, and keeps no agent awake.
const KEEPALIVE: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(15);

/// Takes connections until the shutdown, and gives those that are still open.
pub(crate) async fn accept(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    app: Router,
    shutdown: &CancellationToken,
) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return connections,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    connections.spawn(connection(stream, from, tls.clone(), app.clone(), shutdown.clone()));
                }
                Err(error) => {
                    // Most likely out of descriptors: let some connections end first.
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

async fn connection(
    stream: TcpStream,
    from: SocketAddr,
    tls: Option<Arc<Tls>>,
    app: Router,
    shutdown: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    let probes = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(PROBE);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&probes);
    let peer = |tls| Peer { address: from, tls };
    let Some(tls) = tls else {
        return serve(stream, peer(false), app, shutdown).await;
    };
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE, tls.accept(stream)) => accepted,
        () = shutdown.cancelled() => return,
    };
    match accepted {
        Ok(Ok(Accepted::Https(stream))) => serve(stream, peer(true), app, shutdown).await,
        Ok(Ok(Accepted::Plain(stream))) => serve(stream, peer(false), use_https(), shutdown).await,
        Ok(Ok(Accepted::Challenged)) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a handshake failed"),
        Err(_) => tracing::debug!("a handshake took too long"),
    }
}

async fn serve<S>(stream: S, peer: Peer, app: Router, shutdown: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(MOST_BUFFERED);
    http.http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MOST_BUFFERED as u32)
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(PROBE);
    let activity = Arc::new(Activity::default());
    let noted = activity.clone();
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let open = Open::of(&noted);
        request.extensions_mut().insert(peer);
        let mut app = app.clone();
        async move {
            let response = app.call(request).await?;
            Ok::<_, std::convert::Infallible>(response.map(|body| Held::new(body, open)))
        }
    });
    let mut connection = pin!(http.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = activity.idle() => return,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Whether requests are open on a connection, and since when there are none.
struct Activity {
    open: AtomicUsize,
    quiet_since: Mutex<Instant>,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            open: AtomicUsize::new(0),
            quiet_since: Mutex::new(Instant::now()),
        }
    }
}

impl Activity {
    /// Resolves when nothing was asked for too long.
    async fn idle(&self) {
        loop {
            let quiet_since = *self.quiet_since.lock().unwrap_or_else(PoisonError::into_inner);
            let quiet = match self.open.load(Ordering::Relaxed) {
                0 => quiet_since.elapsed(),
                _ => Duration::ZERO,
            };
            match IDLE.checked_sub(quiet) {
                None | Some(Duration::ZERO) => return,
                Some(left) => tokio::time::sleep(left).await,
            }
        }
    }
}

/// A request, until the end of its answer.
struct Open(Arc<Activity>);

impl Open {
    fn of(activity: &Arc<Activity>) -> Self {
        activity.open.fetch_add(1, Ordering::Relaxed);
        Self(activity.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *self.0.quiet_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_completes_a_head_is_cut_off() {
        let (mut client, server) = tokio::io::duplex(1024);
        let peer = Peer {
            address: "127.0.0.1:1".parse().unwrap(),
            tls: false,
        };
        let serving = tokio::spawn(serve(server, peer, Router::new(), CancellationToken::new()));
        client.write_all(b"GET / HTTP/1.1\r\nX-Slow: ").await.unwrap();
        let begun = Instant::now();
        while !serving.is_finished() {
            assert!(begun.elapsed() < IDLE * 2, "it is served for ever");
            let _ = client.write_all(b"x").await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(begun.elapsed() >= IDLE);
    }
}
