//! `POST /files`: files written in place, as a program in the box would, so that modes, links and watchers behave.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyStream;
use hyper::body::Incoming;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::body::{self, Body, Failure};
use super::gzip;
use crate::files::{entry, ops, path};
use crate::identity;
use crate::settings::Settings;
use crate::users::User;

/// Chunks on their way to the writing thread.
const IN_FLIGHT: usize = 8;

pub(super) type Bytestream = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

type Metadata = BTreeMap<String, String>;

#[derive(Serialize)]
struct Written {
    path: String,
    name: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: Metadata,
}

/// The body's bytes, unpacked if they came compressed. May be asked again after their end.
pub(super) fn bytes_of(headers: &HeaderMap, body: Incoming) -> Result<Bytestream, Failure> {
    let plain = BodyStream::new(body).filter_map(|frame| async {
        match frame {
            Ok(frame) => frame.into_data().ok().map(Ok),
            Err(e) => Some(Err(io::Error::other(e))),
        }
    });
    match headers.get(header::CONTENT_ENCODING).map(|v| v.as_bytes()) {
        None | Some(b"identity") => Ok(Box::pin(plain.fuse())),
        Some(b"gzip") => Ok(Box::pin(gzip::decode(Box::pin(plain)).fuse())),
        Some(other) => Err(Failure::bad_request(format!(
            "content encoding '{}' is not known",
            String::from_utf8_lossy(other)
        ))),
    }
}

/// `X-Metadata-Name: value` becomes the metadata `name`.
fn metadata(headers: &HeaderMap) -> Result<Metadata, Failure> {
    let named = headers
        .iter()
        .filter_map(|(k, v)| Some((k.as_str().strip_prefix("x-metadata-")?, v)));
    named
        .map(|(key, value)| match value.to_str() {
            Ok(value) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
            _ => Err(Failure::bad_request(format!(
                "metadata '{key}' is not plain text"
            ))),
        })
        .collect()
}

/// A file being written by a blocking thread, with the rights of its user.
struct Writer {
    chunks: mpsc::Sender<Bytes>,
    thread: JoinHandle<io::Result<()>>,
    path: PathBuf,
    metadata: Metadata,
}

impl Writer {
    fn start(user: User, path: PathBuf, metadata: Metadata) -> Self {
        let (chunks, received) = mpsc::channel(IN_FLIGHT);
        let (target, tags) = (path.clone(), metadata.clone());
        let thread =
            tokio::task::spawn_blocking(move || identity::with(&user, || write(&target, received, &tags)));
        Self {
            chunks,
            thread,
            path,
            metadata,
        }
    }

    /// False if the thread has given up; `finish` says why.
    async fn send(&self, bytes: Bytes) -> bool {
        self.chunks.send(bytes).await.is_ok()
    }

    async fn finish(self) -> Result<Written, Failure> {
        drop(self.chunks);
        let path = self.path.to_string_lossy().into_owned();
        match self.thread.await.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(()) => Ok(Written {
                name: path::name(&self.path),
                path,
                r#type: "file",
                metadata: self.metadata,
            }),
            Err(e) => Err(Failure::file(&path, &e)),
        }
    }
}

fn write(path: &Path, mut chunks: mpsc::Receiver<Bytes>, metadata: &Metadata) -> io::Result<()> {
    // Without waiting, because a pipe would wait for its reader.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let open = || {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o666)
            .custom_flags(flags)
            .open(path)
    };
    let mut file = match (open(), path.parent()) {
        (Err(e), Some(parent)) if e.kind() == io::ErrorKind::NotFound => {
            ops::make_folders(parent)?;
            open()?
        }
        (opened, _) => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "is not a regular file",
        ));
    }
    while let Some(chunk) = chunks.blocking_recv() {
        file.write_all(&chunk)?;
    }
    for (key, value) in metadata {
        entry::set_metadata(path, key, value)?;
    }
    Ok(())
}

pub(super) async fn answer(
    settings: &Settings,
    request: Request<Incoming>,
) -> Result<Response<Body>, Failure> {
    let query = body::query(request.uri())?;
    let user = body::user(settings, request.headers(), &query)?;
    let metadata = metadata(request.headers())?;
    let (parts, body) = request.into_parts();
    let named = query
        .contains_key("path")
        .then(|| body::path(&query))
        .transpose()?;
    let content_type = parts
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    let mut bytes = bytes_of(&parts.headers, body)?;
    let written = match multer::parse_boundary(content_type) {
        Ok(boundary) => multipart(&user, named, &metadata, &mut bytes, boundary).await,
        Err(_) if content_type.is_empty() || content_type.starts_with("application/octet-stream") => {
            let path = named.ok_or_else(|| Failure::bad_request("the query names no path"))?;
            single(&user, path, metadata, &mut bytes).await.map(|w| vec![w])
        }
        Err(_) => Err(Failure::bad_request(format!(
            "a file comes as multipart/form-data or application/octet-stream, not as '{content_type}'"
        ))),
    };
    crate::memory::trim_soon();
    match written {
        Ok(written) => {
            // A form may end before the body does: if the rest came after the answer, it would meet a closed connection.
            while let Some(Ok(_)) = bytes.next().await {}
            Ok(body::json(StatusCode::OK, &written))
        }
        Err(failure) => {
            drain(bytes);
            Err(failure)
        }
    }
}

/// Reads on, beside the answer, what is left of a body after an error: a connection that is closed while the client still
/// sends would keep the answer from it. A client that has the answer has no reason to go on sending.
pub(super) fn drain(mut bytes: Bytestream) {
    tokio::spawn(async move { while let Some(Ok(_)) = bytes.next().await {} });
}

fn cut_off(e: impl std::fmt::Display) -> Failure {
    Failure::bad_request(format!("the body cannot be read: {e}"))
}

async fn single(
    user: &User,
    given: &str,
    metadata: Metadata,
    bytes: &mut Bytestream,
) -> Result<Written, Failure> {
    let writer = Writer::start(user.clone(), path::resolve(user, given), metadata);
    while let Some(chunk) = bytes.next().await {
        if !writer.send(chunk.map_err(cut_off)?).await {
            break;
        }
    }
    writer.finish().await
}

async fn multipart(
    user: &User,
    named: Option<&str>,
    metadata: &Metadata,
    bytes: &mut Bytestream,
    boundary: String,
) -> Result<Vec<Written>, Failure> {
    let mut parts = multer::Multipart::new(bytes, boundary);
    let mut written = Vec::new();
    while let Some(mut field) = parts.next_field().await.map_err(cut_off)? {
        if field.name() != Some("file") {
            continue;
        }
        if named.is_some() && !written.is_empty() {
            return Err(Failure::bad_request(
                "the query names one path, but the body holds several files",
            ));
        }
        let given = named
            .or(field.file_name())
            .filter(|p| !p.is_empty() && !p.contains('\0'));
        let given =
            given.ok_or_else(|| Failure::bad_request("a file has no path: give it as its filename"))?;
        let writer = Writer::start(user.clone(), path::resolve(user, given), metadata.clone());
        while let Some(chunk) = field.chunk().await.map_err(cut_off)? {
            if !writer.send(chunk).await {
                break;
            }
        }
        written.push(writer.finish().await?);
    }
    if written.is_empty() {
        return Err(Failure::bad_request("the body holds no field 'file'"));
    }
    Ok(written)
}
