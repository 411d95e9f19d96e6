//! Bodies of answers, and errors as `{code, message}`.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use connectrpc::{ConnectError, ConnectRpcBody};
use http::{HeaderMap, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::Full;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::request;
use crate::settings::Settings;
use crate::users::User;

pub(crate) enum Body {
    Full(Full<Bytes>),
    Rpc(ConnectRpcBody),
    /// What a blocking thread reads or makes, of a known length or not.
    Chunks {
        from: mpsc::Receiver<io::Result<Bytes>>,
        left: Option<u64>,
    },
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Body::Full(full) => Pin::new(full).poll_frame(cx).map_err(|e| match e {}),
            Body::Rpc(rpc) => Pin::new(rpc).poll_frame(cx).map_err(|e| match e {}),
            Body::Chunks { from, left } => {
                let chunk = ready!(from.poll_recv(cx));
                if let (Some(left), Some(Ok(chunk))) = (left, &chunk) {
                    *left = left.saturating_sub(chunk.len() as u64);
                }
                Poll::Ready(chunk.map(|c| c.map(Frame::data)))
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(full) => full.size_hint(),
            Body::Rpc(rpc) => rpc.size_hint(),
            Body::Chunks { left, .. } => left.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::Full(Full::default()));
    *response.status_mut() = status;
    response
}

pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::Full(Full::new(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}

/// An answer that says what is wrong.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    message: String,
}

#[derive(Serialize)]
struct Told<'a> {
    code: u16,
    message: &'a str,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn file(path: &str, e: &io::Error) -> Self {
        let status = match e.kind() {
            io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
            io::ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
            io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData
            | io::ErrorKind::AlreadyExists
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::UnexpectedEof => StatusCode::BAD_REQUEST,
            _ if request::is_full(e) => StatusCode::INSUFFICIENT_STORAGE,
            _ if matches!(
                e.raw_os_error(),
                Some(libc::ELOOP | libc::EROFS | libc::ETXTBSY | libc::ENXIO)
            ) =>
            {
                StatusCode::BAD_REQUEST
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{path}: {e}"))
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        json(
            self.status,
            &Told {
                code: self.status.as_u16(),
                message: &self.message,
            },
        )
    }
}

/// The decoded query of a request. Of a name given twice, the first counts.
pub(crate) fn query(uri: &http::Uri) -> Result<HashMap<String, String>, Failure> {
    let decode = |text: &str| {
        let text = text.replace('+', " ");
        let text = percent_encoding::percent_decode_str(&text)
            .decode_utf8()
            .map(|t| t.into_owned());
        text.map_err(|_| Failure::bad_request("the query is not UTF-8"))
    };
    let mut query = HashMap::new();
    for pair in uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
    {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (key, value) = (decode(key)?, decode(value)?);
        query.entry(key).or_insert(value);
    }
    Ok(query)
}

/// The user of a plain request, who may also be named in its query.
pub(crate) fn user(
    settings: &Settings,
    headers: &HeaderMap,
    query: &HashMap<String, String>,
) -> Result<User, Failure> {
    let named = query
        .get("username")
        .map(String::as_str)
        .filter(|n| !n.is_empty());
    request::user(settings, headers, named)
        .map_err(|e: ConnectError| Failure::new(StatusCode::UNAUTHORIZED, e.message.unwrap_or_default()))
}

/// The path that a query must name.
pub(crate) fn path(query: &HashMap<String, String>) -> Result<&str, Failure> {
    let path = query.get("path").filter(|p| !p.is_empty());
    let path = path.ok_or_else(|| Failure::bad_request("the query names no path"))?;
    if path.contains('\0') {
        return Err(Failure::bad_request("the path holds a NUL byte"));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = query(
            &"/files?path=%2Fa%20b+c&username=user&path=x&flag"
                .parse()
                .unwrap(),
        )
        .unwrap();
        assert_eq!(query["path"], "/a b c");
        assert_eq!(query["username"], "user");
        assert_eq!(query["flag"], "");
        assert!(super::query(&"/files?path=%ff".parse().unwrap()).is_err());
    }
}
