//! Where the daemon is, and with which key to speak to it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::cli::Global;
use crate::env;
use crate::exit::{Exit, Failure};

pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:3676";

/// What a running daemon leaves in its data directory.
#[derive(Debug, Deserialize)]
pub(crate) struct Daemon {
    pub(crate) pid: i32,
    pub(crate) url: String,
    /// The file with its own certificate, where it speaks HTTPS.
    #[serde(default)]
    pub(crate) certificate: Option<PathBuf>,
}

pub(crate) fn daemon(data: &Path) -> Option<Daemon> {
    serde_json::from_slice(&std::fs::read(data.join("daemon.json")).ok()?).ok()
}

/// `--url` or DORM_URL, else that of the data directory's daemon, else the default.
pub(crate) fn url(global: &Global) -> Result<String> {
    let url = match &global.url {
        Some(url) if !url.is_empty() => url.clone(),
        _ => daemon(&global.data()).map_or_else(|| DEFAULT_URL.to_owned(), |daemon| daemon.url),
    };
    let url = url.trim_end_matches('/');
    let refuse = |why: &str| {
        Failure::new(
            Exit::Usage,
            format!("`{url}` cannot be used as the daemon's URL: {why}"),
        )
    };
    let uri: http::Uri = url
        .parse()
        .map_err(|e| refuse("it is not well-formed").cause(anyhow::Error::new(e)))?;
    match uri.scheme_str() {
        Some("http" | "https") => Ok(url.to_owned()),
        _ => Err(refuse("it has no scheme")
            .hint(format!("write it like {DEFAULT_URL}"))
            .into()),
    }
}

/// DORM_API_KEY, else the data directory's first key. None at all is left to the server to refuse.
pub(crate) fn key(data: &Path) -> Result<Option<String>> {
    if let Some(key) = std::env::var_os(env::API_KEY) {
        let key = key
            .into_string()
            .map_err(|_| anyhow::anyhow!("{} is not UTF-8", env::API_KEY))?;
        if !key.is_empty() {
            return Ok(Some(key));
        }
    }
    let path = data.join("api-key");
    match std::fs::read_to_string(&path) {
        Ok(key) => Ok(Some(key.trim().to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Why the daemon may be out of reach, as a next step.
pub(crate) fn unreachable_hint(global: &Global) -> String {
    match (&global.url, daemon(&global.data())) {
        (None, Some(daemon)) if !Path::new(&format!("/proc/{}", daemon.pid)).exists() => {
            format!(
                "the daemon of {} (pid {}) has ended; start it with `dorm serve`",
                global.data().display(),
                daemon.pid
            )
        }
        (None, None) => format!(
            "no daemon runs on {}; start one with `dorm serve`, or name another by --data or --url",
            global.data().display()
        ),
        _ => format!(
            "check the address, or start the daemon with `dorm serve` ({} names another)",
            env::URL
        ),
    }
}
