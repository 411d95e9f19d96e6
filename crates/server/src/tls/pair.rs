//! A certificate chain and its key: read, and looked at with the eyes of a client.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use sha2::{Digest as _, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

use super::{TlsFiles, provider};

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} cannot be read", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} holds no {what} in PEM", path.display())]
    Pem {
        path: PathBuf,
        what: &'static str,
        #[source]
        source: pem::Error,
    },
    #[error("{} holds no certificate that can be read: {why}", path.display())]
    Certificate { path: PathBuf, why: String },
    #[error("the key in {} does not belong to the first certificate in {}", key.display(), certificate.display())]
    OtherKey { certificate: PathBuf, key: PathBuf },
    #[error(
        "certificate {number} in {} was not issued by the one that follows it: the server's own comes first, then who issued it",
        path.display()
    )]
    Order { path: PathBuf, number: usize },
    #[error("no certificate can be made: {0}")]
    Make(String),
    #[error("{} cannot be written", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("TLS cannot be set up")]
    Library(#[source] rustls::Error),
}

impl TlsError {
    /// Whether the files could be read and what is in them is no pair.
    pub(super) fn is_of_content(&self) -> bool {
        match self {
            Self::Pem { source, .. } => !matches!(source, pem::Error::Io(_)),
            Self::Certificate { .. } | Self::OtherKey { .. } | Self::Order { .. } | Self::Library(_) => true,
            Self::File { .. } | Self::Make(_) | Self::Write { .. } => false,
        }
    }
}

/// What is to be known of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The names and addresses that it is for.
    pub names: Vec<String>,
    pub issuer: String,
    /// Unix seconds.
    pub not_before: i64,
    pub not_after: i64,
    /// Of the server's own certificate, in hex.
    pub sha256: String,
    /// Whether the issuer of the last certificate is itself, or one that this machine trusts.
    pub complete: bool,
    /// Whether nobody but itself vouches for it.
    pub self_signed: bool,
}

impl Facts {
    /// Why clients would refuse it now, if they would.
    pub fn trouble(&self, now: i64) -> Option<&'static str> {
        if now > self.not_after {
            Some("it has expired")
        } else if now < self.not_before {
            Some("it is not valid yet; is the clock right?")
        } else {
            None
        }
    }
}

pub(super) struct Pair {
    pub(super) key: Arc<CertifiedKey>,
    pub(super) facts: Facts,
}

pub(super) fn load(files: &TlsFiles) -> Result<Pair, TlsError> {
    pair(files, open(&files.certificate)?, open(&files.key)?)
}

/// Of a text that is to be in the files, or is there already.
pub(super) fn of(files: &TlsFiles, text: &str) -> Result<Pair, TlsError> {
    pair(files, text.as_bytes(), text.as_bytes())
}

fn pair(files: &TlsFiles, certificate: impl Read, key: impl Read) -> Result<Pair, TlsError> {
    let chain = chain(&files.certificate, certificate)?;
    let facts = facts(&files.certificate, &chain)?;
    let key = PrivateKeyDer::from_pem_reader(key).map_err(|source| TlsError::Pem {
        path: files.key.clone(),
        what: "private key",
        source,
    })?;
    let key = match CertifiedKey::from_der(chain, key, &provider()) {
        Err(rustls::Error::InconsistentKeys(_)) => {
            return Err(TlsError::OtherKey {
                certificate: files.certificate.clone(),
                key: files.key.clone(),
            });
        }
        other => other.map_err(TlsError::Library)?,
    };
    Ok(Pair {
        key: Arc::new(key),
        facts,
    })
}

/// Of the chain in a file.
pub fn facts_of(path: &Path) -> Result<Facts, TlsError> {
    facts(path, &chain(path, open(path)?)?)
}

fn open(path: &Path) -> Result<File, TlsError> {
    File::open(path).map_err(|source| TlsError::File {
        path: path.to_owned(),
        source,
    })
}

fn chain(path: &Path, text: impl Read) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_reader_iter(text)
        .collect::<Result<Vec<_>, _>>()
        .and_then(|chain| match chain.is_empty() {
            true => Err(pem::Error::NoItemsFound),
            false => Ok(chain),
        })
        .map_err(|source| TlsError::Pem {
            path: path.to_owned(),
            what: "certificate",
            source,
        })
}

fn facts(path: &Path, chain: &[CertificateDer<'_>]) -> Result<Facts, TlsError> {
    let parsed: Result<Vec<X509Certificate<'_>>, _> = chain
        .iter()
        .map(|der| parse_x509_certificate(der).map(|(_, certificate)| certificate))
        .collect();
    let parsed = parsed.map_err(|error| TlsError::Certificate {
        path: path.to_owned(),
        why: error.to_string(),
    })?;
    let astray = parsed
        .windows(2)
        .position(|two| two[0].issuer() != two[1].subject());
    if let Some(before) = astray {
        return Err(TlsError::Order {
            path: path.to_owned(),
            number: before + 1,
        });
    }
    let (own, last) = (&parsed[0], &parsed[parsed.len() - 1]);
    let digest = Sha256::digest(&chain[0]);
    Ok(Facts {
        names: names(own),
        issuer: own.issuer().to_string(),
        not_before: own.validity().not_before.timestamp(),
        not_after: own.validity().not_after.timestamp(),
        sha256: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        self_signed: own.issuer() == own.subject(),
        complete: last.issuer() == last.subject() || is_known_root(last.issuer().as_raw()),
    })
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(alternatives)) = certificate.subject_alternative_name() else {
        return Vec::new();
    };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes)
                .ok()
                .map(|v4| std::net::IpAddr::from(v4).to_string()),
            _ => <[u8; 16]>::try_from(*bytes)
                .ok()
                .map(|v6| std::net::IpAddr::from(v6).to_string()),
        },
        _ => None,
    };
    alternatives.value.general_names.iter().filter_map(name).collect()
}

/// Whether this machine trusts a root of this name.
fn is_known_root(subject: &[u8]) -> bool {
    let roots = rustls_native_certs::load_native_certs().certs;
    roots
        .iter()
        .any(|root| parse_x509_certificate(root).is_ok_and(|(_, root)| root.subject().as_raw() == subject))
}
