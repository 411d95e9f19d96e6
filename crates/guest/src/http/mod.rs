//! The HTTP server: the two RPC services, envd's plain routes, and dorm's own under `/dorm`.

mod body;
mod download;
mod gzip;
mod info;
mod metrics;
mod processes;
mod tarball;
mod upload;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use connectrpc::compression::CompressionPolicy;
use connectrpc::{ConnectRpcService, Limits, Router};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tower::Service as _;

use crate::files;
use crate::run::{self, Runs};
use crate::settings::Settings;
use body::{Body, Failure};

/// Longest request of the RPC services. Files go another way.
const MAX_MESSAGE: usize = 8 << 20;
#[derive(Clone)]
pub(crate) struct Server {
    settings: Arc<Settings>,
    rpc: ConnectRpcService,
    metrics: Arc<metrics::Sampler>,
}

impl Server {
    pub(crate) fn new(settings: Arc<Settings>, runs: Arc<Runs>) -> Self {
        let processes = run::service::Service {
            runs: runs.clone(),
            settings: settings.clone(),
        };
        let router = Router::new()
            .add_service(Arc::new(processes))
            .add_service(Arc::new(files::service::Service::new(settings.clone())));
        let limits = Limits::default()
            .with_max_request_body_size(MAX_MESSAGE)
            .with_max_message_size(MAX_MESSAGE);
        // The way to the daemon is memory: compressing would cost more than it saves.
        let rpc = ConnectRpcService::new(router)
            .with_limits(limits)
            .with_compression_policy(CompressionPolicy::disabled());
        Self {
            settings,
            rpc,
            metrics: Arc::default(),
        }
    }

    /// Serves one connection, to its end.
    pub(crate) async fn connection(self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let service = hyper::service::service_fn(move |request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        // A connection that ends early is the client's affair.
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    async fn answer(mut self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path();
        if path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/") {
            let Ok(response) = self.rpc.call(request).await;
            return response.map(Body::Rpc);
        }
        let answer = match (request.method(), path) {
            (&Method::GET | &Method::HEAD, "/health") => Ok(body::empty(StatusCode::NO_CONTENT)),
            (&Method::GET, "/metrics") => self.metrics.answer(),
            (&Method::GET, "/envs") => Ok(body::json(StatusCode::OK, &self.settings.env())),
            (&Method::POST, "/init") => info::init(&self.settings, request).await,
            (&Method::GET | &Method::HEAD, "/files") => download::answer(&self.settings, request).await,
            (&Method::POST, "/files") => upload::answer(&self.settings, request).await,
            (&Method::GET, "/dorm/version") => Ok(info::version()),
            (&Method::GET, "/dorm/processes") => processes::answer().await,
            (&Method::GET, "/dorm/tar") => tarball::pack(&self.settings, request).await,
            (&Method::POST, "/dorm/tar") => tarball::unpack(&self.settings, request).await,
            (
                _,
                "/health" | "/metrics" | "/envs" | "/init" | "/files" | "/dorm/version" | "/dorm/processes"
                | "/dorm/tar",
            ) => Err(Failure::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "the route does not have this method",
            )),
            (_, path) => Err(Failure::new(
                StatusCode::NOT_FOUND,
                format!("there is no route {path}"),
            )),
        };
        answer.unwrap_or_else(Failure::into_response)
    }
}

pub(crate) fn bind(path: &std::path::Path) -> io::Result<std::os::unix::net::UnixListener> {
    let listener = std::os::unix::net::UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
