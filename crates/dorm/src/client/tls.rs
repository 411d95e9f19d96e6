//! Whom the client believes to be the daemon, where it speaks HTTPS: who has a certificate of a CA that this machine
//! trusts, that `DORM_CA` names, or that `dorm tls init` made; and the data directory's own daemon, by its very certificate,
//! whatever names that is for.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::locate;
use crate::cli::Global;
use crate::env;

/// Where `dorm tls init` puts the certificate of its CA, below the data directory.
pub(crate) const LOCAL_CA: &str = "tls/ca.pem";

/// For a daemon at `url`. Reading the machine's CAs takes a while, and is left out where there is no use for them.
pub(super) fn config(global: &Global, url: &str) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let believed = match url.starts_with("https:") {
        true => Believed::of(global, &provider)?,
        false => Believed::nobody(&provider),
    };
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(believed))
        .with_no_client_auth())
}

#[derive(Debug)]
struct Believed {
    daemon: Option<CertificateDer<'static>>,
    roots: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl Believed {
    fn nobody(provider: &Arc<CryptoProvider>) -> Self {
        Self {
            daemon: None,
            roots: None,
            provider: provider.clone(),
        }
    }

    fn of(global: &Global, provider: &Arc<CryptoProvider>) -> Result<Self> {
        let data = global.data();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(file) = std::env::var_os(env::CA).filter(|file| !file.is_empty()) {
            let file = Path::new(&file);
            let found = certificates(file).with_context(|| format!("{} cannot be used", env::CA))?;
            roots.add_parsable_certificates(found);
        }
        // Whoever may not read it has to name another.
        roots.add_parsable_certificates(certificates(&data.join(LOCAL_CA)).unwrap_or_default());
        let known = locate::daemon(&data).and_then(|daemon| daemon.certificate);
        let known = known.and_then(|file| certificates(&file).ok()?.into_iter().next());
        let verifier = match roots.is_empty() {
            true => None,
            false => Some(
                WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                    .build()
                    .context("the CAs of this machine cannot be used")?,
            ),
        };
        Ok(Self {
            daemon: known,
            roots: verifier,
            provider: provider.clone(),
        })
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found = found.with_context(|| format!("{} holds no certificates in PEM", file.display()))?;
    anyhow::ensure!(
        !found.is_empty(),
        "{} holds no certificates in PEM",
        file.display()
    );
    Ok(found)
}

impl ServerCertVerifier for Believed {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.daemon.as_ref().is_some_and(|known| known == own) {
            return Ok(ServerCertVerified::assertion());
        }
        match &self.roots {
            Some(roots) => roots.verify_server_cert(own, issuers, name, ocsp, now),
            None => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// What to do about a certificate that was not believed, if that is what an error is about.
pub(super) fn hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut error = Some(error);
    while let Some(one) = error {
        // What an I/O error was made of is not its source.
        let inner = one.downcast_ref::<std::io::Error>().and_then(|io| io.get_ref());
        match one.downcast_ref::<Error>() {
            Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                return Some(format!(
                    "set {} to a file with the certificate of its CA",
                    env::CA
                ));
            }
            Some(Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => {
                return Some("renew it, with `dorm tls renew` if `dorm tls init` made it".to_owned());
            }
            Some(Error::InvalidCertificate(_)) => {
                return Some("use a name that the certificate is for; `dorm tls show` lists them".to_owned());
            }
            Some(Error::InvalidMessage(_)) => return Some("does it speak HTTP? Then use http://".to_owned()),
            _ => error = inner.map(|inner| inner as _).or_else(|| one.source()),
        }
    }
    None
}
