//! HTTPS in place of HTTP, on the daemon's one port.
//!
//! ```text
//!   connection ──▶ first byte: a handshake? ──▶ handshake with the pair of now ──▶ HTTP/1.1 or HTTP/2
//!                      │ no                                   ▲
//!                      ▼                                      │ replaced while connections go on
//!                  "use https"                    files that changed, SIGHUP
//! ```

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{Acceptor, ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

mod files;
mod pair;
mod plain;
#[cfg(test)]
mod tests;

pub use pair::{Facts, TlsError, facts_of};
pub(crate) use plain::use_https;

/// The first byte of every handshake, and of no HTTP request.
const HANDSHAKE: u8 = 0x16;

/// Where the certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsConfig {
    Files(TlsFiles),
}

impl TlsConfig {
    /// Where the chain lies that clients are shown.
    pub(crate) fn certificate(&self) -> PathBuf {
        match self {
            Self::Files(files) => files.certificate.clone(),
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
}

pub(crate) enum Accepted {
    Https(Box<TlsStream<TcpStream>>),
    /// What speaks no TLS.
    Plain(TcpStream),
}

impl Tls {
    /// Fails if there is no pair that could be used at all; what comes later must be better than what is there.
    pub(crate) fn open(config: &TlsConfig, shutdown: &CancellationToken) -> Result<Self, TlsError> {
        let TlsConfig::Files(files) = config;
        let current = Arc::new(Current(RwLock::new(files::first(files)?)));
        tokio::spawn(files::watch(files.clone(), current.clone(), shutdown.clone()));
        let versions = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let mut http = versions
            .map_err(TlsError::Library)?
            .with_no_client_auth()
            .with_cert_resolver(current);
        http.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { http: Arc::new(http) })
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<Accepted> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE {
            return Ok(Accepted::Plain(stream));
        }
        let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let stream = hello.into_stream(self.http.clone()).await?;
        Ok(Accepted::Https(Box::new(stream)))
    }
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
