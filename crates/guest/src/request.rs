//! What every kind of request has in common: who it is for, and how errors are told.

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use connectrpc::ConnectError;
use http::{HeaderMap, header};

use crate::settings::Settings;
use crate::users::{self, User};

const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);

/// The name in `Authorization: Basic base64("name:")`. Other schemes are not the guest's concern.
fn basic_user(headers: &HeaderMap) -> Result<Option<String>, ConnectError> {
    let Some(value) = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()) else {
        return Ok(None);
    };
    let Some((scheme, encoded)) = value.split_once(' ') else {
        return Ok(None);
    };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let encoded = encoded.trim();
    STANDARD
        .decode(encoded)
        .or_else(|_| STANDARD_NO_PAD.decode(encoded))
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .map(|pair| pair.split(':').next().unwrap_or_default().to_owned())
        .map(|name| Some(name).filter(|n| !n.is_empty()))
        .ok_or_else(|| {
            ConnectError::unauthenticated("the Authorization header is not valid Basic authorization")
        })
}

/// The user a request is made for: the named one, else the header's, else the default.
pub(crate) fn user(
    settings: &Settings,
    headers: &HeaderMap,
    named: Option<&str>,
) -> Result<User, ConnectError> {
    let name = match named {
        Some(name) => name.to_owned(),
        None => basic_user(headers)?.unwrap_or_else(|| settings.default_user()),
    };
    users::find(&name)
        .ok_or_else(|| ConnectError::invalid_argument(format!("there is no user '{name}' in the box")))
}

/// How often a silent stream says that it lives.
pub(crate) fn keepalive(headers: &HeaderMap) -> Duration {
    let asked = headers
        .get("keepalive-ping-interval")
        .and_then(|v| v.to_str().ok()?.trim().parse().ok());
    asked
        .filter(|s: &u64| *s > 0)
        .map_or(KEEPALIVE_DEFAULT, Duration::from_secs)
}

/// Whether the file system or a quota is full.
pub(crate) fn is_full(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
        || matches!(
            e.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
}

/// A file error in the words of the Connect protocol.
pub(crate) fn file_error(path: &str, e: &io::Error) -> ConnectError {
    let message = format!("{path}: {e}");
    match e.kind() {
        io::ErrorKind::NotFound => ConnectError::not_found(message),
        io::ErrorKind::AlreadyExists => ConnectError::already_exists(message),
        io::ErrorKind::PermissionDenied => ConnectError::permission_denied(message),
        io::ErrorKind::InvalidInput
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::DirectoryNotEmpty => ConnectError::invalid_argument(message),
        _ if is_full(e) => ConnectError::resource_exhausted(message),
        _ if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::EROFS | libc::EBUSY)) => {
            ConnectError::failed_precondition(message)
        }
        _ => ConnectError::internal(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn the_user_comes_from_basic_authorization() {
        assert_eq!(
            basic_user(&with("Basic dXNlcjo=")).unwrap().as_deref(),
            Some("user")
        );
        assert_eq!(
            basic_user(&with("basic dXNlcjo")).unwrap().as_deref(),
            Some("user")
        );
        assert_eq!(basic_user(&with("Basic Og==")).unwrap(), None);
        assert_eq!(basic_user(&with("Bearer abc")).unwrap(), None);
        assert_eq!(basic_user(&HeaderMap::new()).unwrap(), None);
        assert!(basic_user(&with("Basic %%%")).is_err());
    }

    #[test]
    fn the_keepalive_interval_is_the_clients_or_90_seconds() {
        let header = |v: &str| {
            HeaderMap::from_iter([("keepalive-ping-interval".parse().unwrap(), v.parse().unwrap())])
        };
        assert_eq!(keepalive(&header("50")), Duration::from_secs(50));
        assert_eq!(keepalive(&header("0")), KEEPALIVE_DEFAULT);
        assert_eq!(keepalive(&header("soon")), KEEPALIVE_DEFAULT);
    }
}
