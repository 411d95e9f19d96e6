//! `/volumecontent/{id}`: the files of a volume, for whoever has its token.

use std::io::{self, Read as _};

use axum::body::{Body as Stream, BodyDataStream};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use dorm_engine::Id;
use dorm_engine::home::tree::{Attributes, Entry, Kind, Tree, Upload};
use futures_util::StreamExt as _;
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::errors::{Error, Result};
use super::extract::{Body, Path, Query};
use crate::api::AppState;

const CHUNK: usize = 256 * 1024;

#[derive(Debug, Deserialize)]
pub(super) struct Where {
    path: String,
    depth: Option<usize>,
    #[serde(flatten)]
    attributes: Wanted,
    #[serde(default)]
    force: Option<bool>,
}

/// Numbers come as text in a query.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    uid: Option<Number>,
    gid: Option<Number>,
    mode: Option<Number>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "Value")]
struct Number(u32);

impl TryFrom<Value> for Number {
    type Error = String;

    fn try_from(value: Value) -> std::result::Result<Self, String> {
        let number = match &value {
            Value::String(text) => text.parse().ok(),
            other => other.as_u64(),
        };
        let fits = number.and_then(|number| u32::try_from(number).ok());
        fits.map(Self).ok_or_else(|| format!("{value} is no such number"))
    }
}

impl From<Wanted> for Attributes {
    fn from(wanted: Wanted) -> Self {
        let number = |number: Option<Number>| number.map(|Number(number)| number);
        Self {
            uid: number(wanted.uid),
            gid: number(wanted.gid),
            mode: number(wanted.mode),
        }
    }
}

/// The files of the volume, if the request carries its token.
async fn open(state: &AppState, headers: &HeaderMap, id: &str) -> Result<Tree> {
    let unauthorized = || Error::new(StatusCode::UNAUTHORIZED, "this needs the token of the volume");
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let token = bearer
        .and_then(|value| value.strip_prefix("Bearer "))
        .ok_or_else(unauthorized)?;
    let id: Id = id.parse().map_err(|_| unauthorized())?;
    if !state.tokens.is_volume(&id, token) {
        return Err(unauthorized());
    }
    let gone = || Error::new(StatusCode::NOT_FOUND, format!("there is no volume {id}"));
    state.volumes.by_id(&id).await?.ok_or_else(gone)?;
    Ok(state.volumes.files(&id).await?)
}

fn failed(path: &str) -> impl Fn(io::Error) -> Error {
    move |error| {
        let status = match error.kind() {
            io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
            io::ErrorKind::AlreadyExists => StatusCode::CONFLICT,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
            io::ErrorKind::ResourceBusy => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_REQUEST,
        };
        Error::new(status, format!("{path}: {error}"))
    }
}

/// File systems block.
async fn blocking<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(failed(path))
}

fn on_wire(entry: &Entry) -> Value {
    let time = |millis| {
        jiff::Timestamp::from_millisecond(millis)
            .unwrap_or_default()
            .to_string()
    };
    let mut value = json!({
        "name": entry.name,
        "type": match entry.kind {
            Kind::File => "file",
            Kind::Directory => "directory",
            Kind::Symlink => "symlink",
            Kind::Other => "unknown",
        },
        "path": entry.path,
        "size": entry.size,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "atime": time(entry.atime),
        "mtime": time(entry.mtime),
        "ctime": time(entry.ctime),
    });
    if let Some(target) = &entry.target {
        value["target"] = json!(target);
    }
    value
}

pub(super) async fn stat(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
) -> Result<axum::Json<Value>> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let entry = blocking(&at.path, move || files.stat(&path)).await?;
    Ok(axum::Json(on_wire(&entry)))
}

pub(super) async fn list(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
) -> Result<axum::Json<Vec<Value>>> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let entries = blocking(&at.path, move || files.list(&path, at.depth.unwrap_or(1))).await?;
    Ok(axum::Json(entries.iter().map(on_wire).collect()))
}

pub(super) async fn make_dir(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
) -> Result<(StatusCode, axum::Json<Value>)> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let (attributes, force) = (at.attributes.into(), at.force.unwrap_or(false));
    let entry = blocking(&at.path, move || files.make_dir(&path, attributes, force)).await?;
    Ok((StatusCode::CREATED, axum::Json(on_wire(&entry))))
}

pub(super) async fn remove(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
) -> Result<StatusCode> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    blocking(&at.path, move || files.remove(&path)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn change(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
    Body(wanted): Body<Wanted>,
) -> Result<axum::Json<Value>> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let attributes = wanted.into();
    let entry = blocking(&at.path, move || files.change(&path, attributes)).await?;
    Ok(axum::Json(on_wire(&entry)))
}

pub(super) async fn read(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
) -> Result<Response> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let (file, start, length) = blocking(&at.path, move || {
        let mut file = files.read(&path)?;
        let length = file.metadata()?.len();
        // What fits into a chunk is as long as it says, whatever a box writes meanwhile.
        let mut start = Vec::with_capacity(length.min(CHUNK as u64) as usize);
        (&mut file)
            .take(length.min(CHUNK as u64))
            .read_to_end(&mut start)?;
        let length = if length > CHUNK as u64 {
            length
        } else {
            start.len() as u64
        };
        Ok((file, start, length))
    })
    .await?;
    // A file that grows meanwhile is sent as long as it was.
    let rest = tokio::fs::File::from_std(file).take(length.saturating_sub(start.len() as u64));
    let rest = futures_util::stream::try_unfold(rest, |mut file| async move {
        let mut chunk = Vec::with_capacity(CHUNK);
        (&mut file).take(CHUNK as u64).read_to_end(&mut chunk).await?;
        Ok::<_, io::Error>((!chunk.is_empty()).then(|| (Bytes::from(chunk), file)))
    });
    let chunks = futures_util::stream::once(async { Ok(Bytes::from(start)) }).chain(rest);
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
    ];
    Ok((headers, Stream::from_stream(chunks)).into_response())
}

pub(super) async fn write(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Query(at): Query<Where>,
    headers: HeaderMap,
    body: Stream,
) -> Result<(StatusCode, axum::Json<Value>)> {
    let (files, path) = (open(&state, &headers, &id).await?, at.path.clone());
    let (attributes, force) = (at.attributes.into(), at.force.unwrap_or(false));
    let upload = blocking(&at.path, move || files.write(&path, attributes, force)).await?;
    let upload = receive(upload, body.into_data_stream(), &at.path).await?;
    let entry = blocking(&at.path, move || upload.finish()).await?;
    Ok((StatusCode::CREATED, axum::Json(on_wire(&entry))))
}

async fn receive(upload: Upload, mut body: BodyDataStream, path: &str) -> Result<Upload> {
    let file = upload.file.try_clone().map_err(failed(path))?;
    let mut file = tokio::fs::File::from_std(file);
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|error| Error::invalid(format!("the upload broke off: {error}")))?;
        file.write_all(&chunk).await.map_err(failed(path))?;
    }
    file.flush().await.map_err(failed(path))?;
    Ok(upload)
}
