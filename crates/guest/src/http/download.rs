//! `GET /files`: one file, a small one at once, a large one streamed by a blocking thread.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::body::{self, Body, Failure};
use crate::files::path;
use crate::identity;
use crate::settings::Settings;

const CHUNK: usize = 256 * 1024;
/// Chunks on their way at the same time.
const IN_FLIGHT: usize = 4;

/// A file as it was found. One that fits into a chunk is read there and then: what is sent of it is as long as its
/// answer says, whatever is written to it meanwhile.
struct Found {
    size: u64,
    contents: Contents,
}

enum Contents {
    Read(Bytes),
    Unread(File),
}

/// Opens a file for reading. Anything that is not a plain file could wait for ever.
fn open(path: &std::path::Path) -> io::Result<Found> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory"));
    }
    if !metadata.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "is not a regular file",
        ));
    }
    let size = metadata.len();
    // Files of /proc and the like have contents, but no size.
    if !(1..=CHUNK as u64).contains(&size) {
        let contents = Contents::Unread(file);
        return Ok(Found { size, contents });
    }
    let mut read = Vec::with_capacity(size as usize);
    file.take(size).read_to_end(&mut read)?;
    Ok(Found {
        size: read.len() as u64,
        contents: Contents::Read(read.into()),
    })
}

pub(super) async fn answer(
    settings: &Settings,
    request: Request<Incoming>,
) -> Result<Response<Body>, Failure> {
    let query = body::query(request.uri())?;
    let user = body::user(settings, request.headers(), &query)?;
    let path = path::resolve(&user, body::path(&query)?);
    if !accepts_identity(request.headers()) {
        return Err(Failure::new(
            StatusCode::NOT_ACCEPTABLE,
            "files are sent as they are, which is not accepted",
        ));
    }
    let (opened, told) = (path.clone(), path.display().to_string());
    let Found { size, contents } = identity::run(user, move || open(&opened))
        .await
        .map_err(|e| Failure::file(&told, &e))?;

    let known = (size > 0).then_some(size);
    let range = match (request.headers().get(header::RANGE), known) {
        (Some(value), Some(size)) => parse_range(value, size)?,
        _ => None,
    };
    let length = range.map_or(known, |(first, last)| Some(last - first + 1));
    let first = range.map_or(0, |(first, _)| first);
    let body = match contents {
        Contents::Read(all) => {
            let end = first + length.unwrap_or(0);
            Body::Full(Full::new(all.slice(first as usize..end as usize)))
        }
        Contents::Unread(_) if request.method() == http::Method::HEAD => Body::Full(Full::default()),
        Contents::Unread(mut file) => {
            if first > 0 {
                file.seek(SeekFrom::Start(first))
                    .map_err(|e| Failure::file(&told, &e))?;
            }
            let (sender, from) = mpsc::channel(IN_FLIGHT);
            tokio::task::spawn_blocking(move || read_all(file, length, &sender));
            crate::memory::trim_soon();
            Body::Chunks { from, left: length }
        }
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_DISPOSITION, disposition(&path::name(&path)));
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    if let (Some((first, last)), Some(size)) = (range, known) {
        let value = format!("bytes {first}-{last}/{size}");
        headers.insert(header::CONTENT_RANGE, value.parse().expect("digits are valid"));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

/// Buffers that come back when their bytes have been sent, so that a large file needs only a few.
type Pool = Arc<Mutex<Vec<Box<[u8]>>>>;

struct Pooled {
    buf: Option<Box<[u8]>>,
    len: usize,
    pool: Pool,
}

impl AsRef<[u8]> for Pooled {
    fn as_ref(&self) -> &[u8] {
        self.buf.as_deref().map_or(&[], |b| &b[..self.len])
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        self.pool
            .lock()
            .expect("no holder panics")
            .extend(self.buf.take());
    }
}

fn read_all(mut file: File, length: Option<u64>, sender: &mpsc::Sender<io::Result<Bytes>>) {
    let pool = Pool::default();
    let chunk = length.map_or(CHUNK, |l| usize::try_from(l).unwrap_or(CHUNK).min(CHUNK));
    let mut left = length.unwrap_or(u64::MAX);
    while left > 0 {
        let spare = pool.lock().expect("no holder panics").pop();
        let mut buf = spare.unwrap_or_else(|| vec![0; chunk].into_boxed_slice());
        let want = usize::try_from(left).unwrap_or(chunk).min(chunk);
        let read = loop {
            match file.read(&mut buf[..want]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        let bytes = match read {
            Ok(0) if length.is_none() => return,
            Ok(0) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file has become shorter",
            )),
            Ok(n) => {
                left -= n as u64;
                Ok(Bytes::from_owner(Pooled {
                    buf: Some(buf),
                    len: n,
                    pool: pool.clone(),
                }))
            }
            Err(e) => Err(e),
        };
        let failed = bytes.is_err();
        if sender.blocking_send(bytes).is_err() || failed {
            return;
        }
    }
}

fn accepts_identity(headers: &HeaderMap) -> bool {
    let Some(accepted) = headers.get(header::ACCEPT_ENCODING).and_then(|v| v.to_str().ok()) else {
        return true;
    };
    let refused = |coding: &str| {
        accepted.split(',').any(|part| {
            let mut fields = part.split(';').map(str::trim);
            fields.next() == Some(coding)
                && fields.any(|f| matches!(f, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
        })
    };
    let named = accepted
        .split(',')
        .any(|p| p.split(';').next().map(str::trim) == Some("identity"));
    !refused("identity") && (named || !refused("*"))
}

/// First and last byte of a `Range` with one range; others are answered with the whole file.
fn parse_range(value: &HeaderValue, size: u64) -> Result<Option<(u64, u64)>, Failure> {
    let Some(range) = value.to_str().ok().and_then(|v| v.strip_prefix("bytes=")) else {
        return Ok(None);
    };
    let Some((first, last)) = range.trim().split_once('-') else {
        return Ok(None);
    };
    let parsed = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) => Some((first, last.min(size - 1))),
        (Ok(first), Err(_)) if last.is_empty() => Some((first, size - 1)),
        (Err(_), Ok(tail)) if first.is_empty() => Some((size.saturating_sub(tail), size - 1)),
        _ => None,
    };
    match parsed {
        Some((first, last)) if first > last => Err(Failure::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            format!("the file has {size} bytes"),
        )),
        parsed => Ok(parsed),
    }
}

fn disposition(name: &str) -> HeaderValue {
    let encoded = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    HeaderValue::from_str(&format!("inline; filename*=UTF-8''{encoded}"))
        .unwrap_or_else(|_| HeaderValue::from_static("inline"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_understood() {
        let range = |v: &str| parse_range(&v.parse().unwrap(), 100).map_err(|f| f.status);
        assert_eq!(range("bytes=0-9"), Ok(Some((0, 9))));
        assert_eq!(range("bytes=90-"), Ok(Some((90, 99))));
        assert_eq!(range("bytes=-10"), Ok(Some((90, 99))));
        assert_eq!(range("bytes=50-500"), Ok(Some((50, 99))));
        assert_eq!(range("bytes=0-1,5-6"), Ok(None));
        assert_eq!(range("lines=1-2"), Ok(None));
        assert_eq!(range("bytes=100-"), Err(StatusCode::RANGE_NOT_SATISFIABLE));
    }

    #[test]
    fn a_client_may_refuse_plain_bytes() {
        let with = |v: &str| HeaderMap::from_iter([(header::ACCEPT_ENCODING, v.parse().unwrap())]);
        assert!(accepts_identity(&HeaderMap::new()));
        assert!(accepts_identity(&with("gzip, deflate")));
        assert!(accepts_identity(&with("identity, *;q=0")));
        assert!(!accepts_identity(&with("gzip, identity;q=0")));
        assert!(!accepts_identity(&with("gzip, *;q=0")));
    }
}
