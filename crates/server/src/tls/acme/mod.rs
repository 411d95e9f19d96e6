//! A certificate from an ACME server, kept in the data directory and renewed ahead of its end.
//!
//! ```text
//!   DATA/acme/account-<server>.json   the account and its key
//!   DATA/acme/certificate.pem         chain and key in one file, which is exchanged as a whole
//! ```
//!
//! Until the first one is there, and whenever the server cannot be reached, the daemon goes on with what it has; at first that
//! is a certificate of its own making, which only clients on this machine believe.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::pair::{self, Facts, Pair, TlsError};
use super::{Current, TlsFiles, put};
use crate::lifecycle::in_full;
use crate::records::now;

mod challenge;
mod order;

pub(super) use challenge::{Challenges, PROTOCOL};
use order::AcmeError;

/// After a failure: this long, twice as long after the next, and so on. It is also the least between two certificates, as servers
/// limit how often they are asked.
const RETRY: Duration = Duration::from_secs(60);
const LONGEST_RETRY: Duration = Duration::from_secs(6 * 3600);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acme {
    /// `DATA/acme`.
    pub dir: PathBuf,
    /// Without port.
    pub domain: String,
    /// URL of the server's directory; Let's Encrypt's without.
    pub directory: Option<String>,
    /// An address that the server may write to.
    pub contact: Option<String>,
    /// The CA of the server's own certificate, where this machine does not trust it.
    pub ca: Option<PathBuf>,
    /// A program that sets DNS records, which a wildcard needs.
    pub dns: Option<PathBuf>,
}

impl Acme {
    pub(super) fn files(&self) -> TlsFiles {
        let both = self.dir.join("certificate.pem");
        TlsFiles {
            certificate: both.clone(),
            key: both,
        }
    }

    fn names(&self) -> Vec<String> {
        let second = if self.dns.is_some() { "*" } else { "api" };
        vec![self.domain.clone(), format!("{second}.{}", self.domain)]
    }
}

/// The pair that is there, or else a provisional one. What cannot be read may be a good pair, and is left alone.
pub(super) fn first(acme: &Acme) -> Result<Pair, TlsError> {
    let files = acme.files();
    match pair::load(&files) {
        Err(TlsError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) if error.is_of_content() => {
            tracing::error!(error = %in_full(&error), "the certificate from before cannot be used; another is asked for");
        }
        loaded => return loaded,
    }
    let provisional = || -> Result<String, rcgen::Error> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(acme.names())?.self_signed(&key)?;
        Ok(format!("{}{}", certificate.pem(), key.serialize_pem()))
    };
    let made = provisional().map_err(|error| TlsError::Make(error.to_string()))?;
    let write = || {
        std::fs::create_dir_all(&acme.dir)?;
        put(&files.certificate, &made, 0o600)
    };
    write().map_err(|source| TlsError::Write {
        path: files.certificate.clone(),
        source,
    })?;
    pair::of(&files, &made)
}

/// Sees to it that there is always a good one.
pub(super) async fn keep(
    acme: Acme,
    facts: Facts,
    current: Arc<Current>,
    challenges: Arc<Challenges>,
    shutdown: CancellationToken,
) {
    let mut due = Instant::now() + due_in(&facts, &acme.names(), now() / 1000);
    let mut failures = 0;
    // In use, and not on disk yet.
    let mut unsaved = None;
    loop {
        let look = match unsaved {
            Some(_) => due.min(Instant::now() + RETRY),
            None => due,
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep_until(look) => {}
        }
        if let Some(text) = unsaved.take() {
            unsaved = save(&acme, text);
        }
        if Instant::now() < due {
            continue;
        }
        let wait = match obtain(&acme, &challenges, &shutdown).await {
            Ok((text, new)) => {
                failures = 0;
                // Before anything that may fail: whoever has an issued certificate must not ask for it again.
                current.replace(new.key);
                let (names, until) = (new.facts.names.join(", "), new.facts.not_after);
                tracing::info!(names, until, "a new certificate is in use");
                unsaved = save(&acme, text);
                due_in(&new.facts, &acme.names(), now() / 1000).max(RETRY)
            }
            Err(AcmeError::Ending) => return,
            Err(error) => {
                failures += 1;
                tracing::error!(error = %in_full(&error), "no certificate was obtained; this will be tried again");
                RETRY
                    .saturating_mul(1 << (failures - 1).min(16))
                    .min(LONGEST_RETRY)
            }
        };
        due = Instant::now() + wait;
    }
}

async fn obtain(
    acme: &Acme,
    challenges: &Challenges,
    shutdown: &CancellationToken,
) -> Result<(String, Pair), AcmeError> {
    let text = order::obtain(acme, challenges, shutdown).await?;
    let pair = pair::of(&acme.files(), &text)?;
    Ok((text, pair))
}

/// Gives back what could not be written.
fn save(acme: &Acme, text: String) -> Option<String> {
    let path = acme.files().certificate;
    let error = put(&path, &text, 0o600).err()?;
    tracing::error!(%error, path = %path.display(), "the new certificate cannot be kept; this will be tried again");
    Some(text)
}

/// When two thirds of its time are over; at once if it is not for the names that are wanted, or nobody vouches for it.
fn due_in(facts: &Facts, wanted: &[String], now: i64) -> Duration {
    let fits = wanted.iter().all(|name| facts.names.contains(name));
    if !fits || facts.self_signed {
        return Duration::ZERO;
    }
    let at = facts.not_after - (facts.not_after - facts.not_before) / 3;
    Duration::from_secs((at - now).max(0).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_renewed_when_a_third_of_its_time_is_left_and_at_once_if_it_does_not_fit() {
        let day = 24 * 3600;
        let mut facts = Facts {
            names: vec!["a.test".to_owned(), "api.a.test".to_owned()],
            issuer: "CN=somebody".to_owned(),
            not_before: 1_000_000,
            not_after: 1_000_000 + 90 * day,
            sha256: String::new(),
            complete: true,
            self_signed: false,
        };
        let names = facts.names.clone();
        let days =
            |facts: &Facts, at: i64| due_in(facts, &names, 1_000_000 + at * day).as_secs() as i64 / day;
        assert_eq!(days(&facts, 0), 60);
        assert_eq!(days(&facts, 59), 1);
        assert_eq!(due_in(&facts, &names, 1_000_000 + 61 * day), Duration::ZERO);
        let more = ["a.test".to_owned(), "*.a.test".to_owned()];
        assert_eq!(due_in(&facts, &more, 1_000_000), Duration::ZERO);
        facts.self_signed = true;
        assert_eq!(due_in(&facts, &names, 1_000_000), Duration::ZERO);
    }

    fn below(data: &tempfile::TempDir) -> Acme {
        Acme {
            dir: data.path().join("acme"),
            domain: "a.test".to_owned(),
            directory: None,
            contact: None,
            ca: None,
            dns: Some("/bin/true".into()),
        }
    }

    #[test]
    fn a_daemon_without_a_certificate_begins_with_one_of_its_own_and_keeps_it() {
        let data = tempfile::tempdir().unwrap();
        let acme = below(&data);
        let made = first(&acme).unwrap().facts;
        assert_eq!(made.names, ["a.test", "*.a.test"]);
        assert!(made.self_signed);
        assert_eq!(first(&acme).unwrap().facts, made);
        std::fs::write(acme.files().certificate, "torn").unwrap();
        assert_ne!(first(&acme).unwrap().facts, made);
    }

    #[test]
    fn what_cannot_be_read_is_not_written_over() {
        let data = tempfile::tempdir().unwrap();
        let acme = below(&data);
        std::fs::create_dir_all(acme.files().certificate).unwrap();
        let refused = first(&acme).err();
        assert!(matches!(refused, Some(TlsError::Pem { .. })), "{refused:?}");
    }

    #[test]
    fn what_could_not_be_written_is_written_later() {
        let data = tempfile::tempdir().unwrap();
        let acme = below(&data);
        let unsaved = save(&acme, "issued".to_owned()).expect("there is no folder yet");
        std::fs::create_dir(&acme.dir).unwrap();
        assert_eq!(save(&acme, unsaved), None);
        assert_eq!(
            std::fs::read_to_string(acme.files().certificate).unwrap(),
            "issued"
        );
    }
}
