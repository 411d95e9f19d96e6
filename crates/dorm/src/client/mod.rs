//! The HTTP client that every command uses: requests to `/v1` with the key, errors as [`Failure`]s.

pub(crate) mod connect;
pub(crate) mod events;
pub(crate) mod guest;
pub(crate) mod locate;
pub(crate) mod process;
pub(crate) mod tls;
pub(crate) mod wire;

use anyhow::{Context, Result};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::Global;
use crate::exit::{Exit, Failure};

pub(crate) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Longest JSON answer that is read into memory.
const MAX_ANSWER: usize = 64 << 20;
const MAX_ERROR: usize = 1 << 20;

const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// For one segment of a path, or one value of a query.
pub(crate) fn encode(text: impl AsRef<[u8]>) -> String {
    percent_encode(text.as_ref(), UNRESERVED).to_string()
}

pub(crate) fn full(data: impl Into<Bytes>) -> Body {
    Full::new(data.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

pub(crate) fn streamed(
    chunks: impl futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static,
) -> Body {
    use futures_util::TryStreamExt;
    StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync()
}

pub(crate) struct Client {
    url: String,
    key: Option<String>,
    unreachable: String,
    http: Pool<HttpsConnector<HttpConnector>, Body>,
}

impl Client {
    pub(crate) fn new(global: &Global) -> Result<Self> {
        let url = locate::url(global)?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(std::time::Duration::from_secs(10)));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls::config(global, &url)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self {
            url,
            key: locate::key(&global.data())?,
            unreachable: locate::unreachable_hint(global),
            http: Pool::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .build(connector),
        })
    }

    /// A request with the key. `path` begins with a slash and is encoded already.
    pub(crate) fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let mut builder = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            builder = builder.header("x-api-key", key);
        }
        builder
    }

    /// Sends, and turns every answer that is not a success into a [`Failure`].
    pub(crate) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>> {
        let response = self.http.request(request).await.map_err(|e| self.broken(e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ERROR).collect().await;
        let body = body.map(|b| b.to_bytes()).unwrap_or_default();
        Err(refusal(status, &body, self.key.is_some()).into())
    }

    fn broken(&self, error: hyper_util::client::legacy::Error) -> Failure {
        let source: Option<&hyper::Error> = std::error::Error::source(&error).and_then(|e| e.downcast_ref());
        if source.is_some_and(hyper::Error::is_user) {
            // What was to be sent could not be read: that has nothing to do with the daemon.
            return Failure::new(Exit::Error, "cannot read what is to be sent").cause(innermost(&error));
        }
        let message = if error.is_connect() {
            format!("cannot reach the daemon at {}", self.url)
        } else {
            format!("the connection to the daemon at {} broke", self.url)
        };
        Failure::new(Exit::Unreachable, message)
            .hint(tls::hint(&error).unwrap_or_else(|| self.unreachable.clone()))
            .cause(innermost(&error))
    }

    async fn read<T: DeserializeOwned>(&self, request: Request<Body>) -> Result<T> {
        let response = self.send(request).await?;
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let body = body
            .map_err(|e| anyhow::anyhow!("{e}"))
            .context("the daemon's answer broke off")?
            .to_bytes();
        // An empty answer (204) reads as JSON's null, which is what `()` is made of.
        let text: &[u8] = if body.is_empty() { b"null" } else { &body };
        serde_json::from_slice(text).context("the daemon's answer is not what this version of dorm expects")
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.read(self.request(Method::GET, path).body(full(""))?).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.tell(Method::POST, path, body).await
    }

    pub(crate) async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.tell(Method::PUT, path, body).await
    }

    pub(crate) async fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.tell(Method::PATCH, path, body).await
    }

    async fn tell<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        let request = self
            .request(method, path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(full(serde_json::to_vec(body)?))?;
        self.read(request).await
    }

    /// For answers that carry nothing a command needs.
    pub(crate) async fn delete(&self, path: &str) -> Result<()> {
        let response = self
            .send(self.request(Method::DELETE, path).body(full(""))?)
            .await?;
        drop(response.into_body().collect().await);
        Ok(())
    }

    pub(crate) fn guest<'a>(&'a self, agent: &str, user: Option<&str>) -> guest::Guest<'a> {
        guest::Guest::new(self, agent, user)
    }
}

/// The path of an agent's resource.
pub(crate) fn agent_path(agent: &str, rest: &str) -> String {
    format!("/v1/agents/{}{rest}", encode(agent))
}

fn innermost(error: &dyn std::error::Error) -> anyhow::Error {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    anyhow::anyhow!("{error}")
}

/// Reads dorm's `{code, message, hint}`, Connect's `{code, message}` and envd's, whose code is a number.
fn refusal(status: StatusCode, body: &[u8], with_key: bool) -> Failure {
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |name: &str| value.get(name).and_then(|v| v.as_str()).filter(|s| !s.is_empty());
    let exit = text("code")
        .and_then(Exit::from_code)
        .unwrap_or_else(|| Exit::from_status(status));
    let message = match text("message") {
        Some(message) => message.to_owned(),
        None => {
            let body = String::from_utf8_lossy(body);
            let body = body.trim();
            if body.is_empty() {
                format!("the daemon answered {status}")
            } else {
                format!("the daemon answered {status}: {body}")
            }
        }
    };
    let hint = match (text("hint"), exit) {
        (Some(hint), _) => Some(hint.to_owned()),
        (None, Exit::Unauthorized) if !with_key => {
            Some("set DORM_API_KEY, or run as the user who can read the data directory's api-key".to_owned())
        }
        (None, Exit::Unauthorized) => {
            Some("the key that was sent is not known there; see `dorm key ls`".to_owned())
        }
        _ => None,
    };
    Failure::new(exit, message).hint_opt(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_follows_the_code_in_the_body_before_the_status() {
        let of = |status: u16, body: &str| {
            refusal(StatusCode::from_u16(status).unwrap(), body.as_bytes(), true).exit()
        };
        assert_eq!(
            of(400, r#"{"code":"already_exists","message":"x"}"#),
            Exit::Conflict
        );
        assert_eq!(of(404, r#"{"code":404,"message":"x"}"#), Exit::NotFound);
        assert_eq!(of(401, ""), Exit::Unauthorized);
        assert_eq!(of(500, "<html>"), Exit::Error);
    }

    #[test]
    fn paths_are_encoded_byte_by_byte() {
        assert_eq!(encode("/a b/ü&?"), "%2Fa%20b%2F%C3%BC%26%3F");
    }
}
