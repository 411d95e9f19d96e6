//! HTTPS in place of HTTP, on the daemon's one port.
//!
//! ```text
//!   connection ──▶ first byte: a handshake? ──▶ handshake with the pair of now ──▶ HTTP/1.1 or HTTP/2
//!                      │ no                                   ▲
//!                      ▼                                      │ replaced while connections go on
//!                  "use https"                    files that changed, SIGHUP, ACME
//! ```

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{Acceptor, ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

mod acme;
mod files;
mod pair;
mod plain;
#[cfg(test)]
mod tests;

pub use acme::Acme;
pub use pair::{Facts, TlsError, facts_of};
pub(crate) use plain::use_https;

use acme::Challenges;

/// The first byte of every handshake, and of no HTTP request.
const HANDSHAKE: u8 = 0x16;

/// Where the certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsConfig {
    Files(TlsFiles),
    Acme(Acme),
}

impl TlsConfig {
    /// Where the chain lies that clients are shown.
    pub(crate) fn certificate(&self) -> PathBuf {
        match self {
            Self::Files(files) => files.certificate.clone(),
            Self::Acme(acme) => acme.files().certificate,
        }
    }
}

/// A chain, the server's own certificate first, and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What connections are taken with.
pub(crate) struct Tls {
    http: Arc<ServerConfig>,
    /// For ACME servers that want to know whose the domain is.
    challenges: Arc<ServerConfig>,
}

pub(crate) enum Accepted {
    Https(Box<TlsStream<TcpStream>>),
    /// An ACME server, which has seen what it wanted to see.
    Challenged,
    /// What speaks no TLS.
    Plain(TcpStream),
}

impl Tls {
    /// Fails if there is no pair that could be used at all; what comes later must be better than what is there.
    pub(crate) fn open(config: &TlsConfig, shutdown: &CancellationToken) -> Result<Self, TlsError> {
        let challenges = Arc::new(Challenges::default());
        let current = match config {
            TlsConfig::Files(files) => {
                let current = Arc::new(Current(RwLock::new(files::first(files)?)));
                tokio::spawn(files::watch(files.clone(), current.clone(), shutdown.clone()));
                current
            }
            TlsConfig::Acme(acme) => {
                let first = acme::first(acme)?;
                let current = Arc::new(Current(RwLock::new(first.key)));
                let (kept, shown, until) = (current.clone(), challenges.clone(), shutdown.clone());
                tokio::spawn(acme::keep(acme.clone(), first.facts, kept, shown, until));
                current
            }
        };
        Ok(Self {
            http: offering(&[b"h2", b"http/1.1"], current)?,
            challenges: offering(&[acme::PROTOCOL], challenges)?,
        })
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<Accepted> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE {
            return Ok(Accepted::Plain(stream));
        }
        let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let asked = hello.client_hello().alpn();
        if asked.is_some_and(|mut asked| asked.any(|protocol| protocol == acme::PROTOCOL)) {
            hello.into_stream(self.challenges.clone()).await?;
            return Ok(Accepted::Challenged);
        }
        let stream = hello.into_stream(self.http.clone()).await?;
        Ok(Accepted::Https(Box::new(stream)))
    }
}

fn offering(protocols: &[&[u8]], pairs: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, TlsError> {
    let versions = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let mut config = versions
        .map_err(TlsError::Library)?
        .with_no_client_auth()
        .with_cert_resolver(pairs);
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Writes the file as a whole, durably, or leaves it as it was.
pub fn put(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.as_file()
        .set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    std::fs::File::open(dir)?.sync_all()
}

/// The pair that new connections get. It covers what it covers: a client that asks for another name is told by its
/// own verification, in words that say so.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl Current {
    fn replace(&self, pair: Arc<CertifiedKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = pair;
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}
