//! A pair that others put into files, and renew there.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::sign::CertifiedKey;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::pair::{self, Facts, TlsError};
use super::{Current, TlsFiles};
use crate::records::now;

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// An expired certificate is no reason to leave agents unreachable to those who know it: it is complained of.
pub(super) fn first(files: &TlsFiles) -> Result<Arc<CertifiedKey>, TlsError> {
    let pair = pair::load(files)?;
    complain(files, &pair.facts);
    Ok(pair.key)
}

fn complain(files: &TlsFiles, facts: &Facts) {
    let path = files.certificate.display();
    if let Some(trouble) = facts.trouble(now() / 1000) {
        tracing::error!("clients will refuse the certificate in {path}: {trouble}");
    }
    if !facts.complete {
        tracing::warn!(
            "the chain in {path} does not lead to a root that this machine trusts: add the certificates of those \
             who issued it, or clients will have to know {}",
            facts.issuer
        );
    }
}

/// Takes what is new in the files. One of the two may be there before the other.
pub(super) async fn watch(files: TlsFiles, current: Arc<Current>, shutdown: CancellationToken) {
    let mut hangup = signal(SignalKind::hangup()).ok();
    let mut seen = state_of(&files);
    loop {
        let asked = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let by_signal = tokio::select! {
            () = shutdown.cancelled() => return,
            _ = asked => true,
            () = tokio::time::sleep(LOOK_EVERY) => false,
        };
        let found = state_of(&files);
        if !by_signal && found == seen {
            continue;
        }
        seen = found;
        match pair::load(&files) {
            Ok(new) if new.facts.trouble(now() / 1000).is_some() => {
                complain(&files, &new.facts);
                tracing::error!("the certificate from before stays in use");
            }
            Ok(new) => {
                complain(&files, &new.facts);
                current.replace(new.key);
                let until = new.facts.not_after;
                tracing::info!(
                    until,
                    "the certificate in {} is in use",
                    files.certificate.display()
                );
            }
            Err(error) => {
                let error = crate::lifecycle::in_full(&error);
                tracing::warn!(%error, "the new certificate cannot be used; the one from before stays in use");
            }
        }
    }
}

type Seen = Option<(SystemTime, u64)>;

fn state_of(files: &TlsFiles) -> [Seen; 2] {
    let of = |path: &Path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.modified().ok()?, meta.len()))
    };
    [of(&files.certificate), of(&files.key)]
}
