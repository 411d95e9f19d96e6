//! Servers that do one thing and nothing else, on loopback and on threads of their own: what the daemon is compared with.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_util::io::ReaderStream;

use super::files::BLOCK;
use crate::client::Body;

/// Ends with the process.
pub(super) fn serve<F>(answer: impl Fn(Request<Incoming>) -> F + Clone + Send + 'static) -> Result<SocketAddr>
where
    F: Future<Output = Result<Response<Body>>> + 'static,
{
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::spawn(move || {
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, take(listener, answer))
    });
    Ok(address)
}

async fn take<F>(
    listener: std::net::TcpListener,
    answer: impl Fn(Request<Incoming>) -> F + Clone + 'static,
) -> std::io::Result<Infallible>
where
    F: Future<Output = Result<Response<Body>>> + 'static,
{
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let answer = answer.clone();
        let service = service_fn(move |request| {
            let answering = answer(request);
            async move { Ok::<_, Infallible>(answering.await.unwrap_or_else(|_| failed())) }
        });
        tokio::task::spawn_local(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

fn failed() -> Response<Body> {
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

/// Answers at once, with nothing.
pub(super) fn nothing() -> Result<SocketAddr> {
    serve(|_| async {
        let mut response = Response::new(empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    })
}

/// Passes everything on, and what comes back too.
pub(super) fn reverse_proxy(to: SocketAddr) -> Result<SocketAddr> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
    serve(move |mut request| {
        let client = client.clone();
        async move {
            let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
            *request.uri_mut() = format!("http://{to}{path}").parse::<Uri>()?;
            let response = client.request(request).await?;
            Ok(response.map(|body| body.map_err(std::io::Error::other).boxed_unsync()))
        }
    })
}

/// Gives a file, or takes it.
pub(super) fn file_server(file: PathBuf) -> Result<SocketAddr> {
    serve(move |request| {
        let file = file.clone();
        async move {
            if request.method() == Method::PUT {
                let mut out = tokio::fs::File::create(&file).await?;
                out.set_max_buf_size(BLOCK);
                let mut body = request.into_body();
                while let Some(frame) = body.frame().await {
                    if let Ok(data) = frame.context("the upload broke off")?.into_data() {
                        out.write_all(&data).await?;
                    }
                }
                out.flush().await?;
                return Ok(Response::new(empty()));
            }
            let mut from = tokio::fs::File::open(&file).await?;
            from.set_max_buf_size(BLOCK);
            let length = from.metadata().await?.len();
            let blocks = ReaderStream::with_capacity(from, BLOCK).map_ok(Frame::<Bytes>::data);
            let response = Response::builder().header(http::header::CONTENT_LENGTH, length);
            Ok(response.body(StreamBody::new(blocks).boxed_unsync())?)
        }
    })
}
