//! Showing an ACME server that the domain is ours: by a certificate that only it asks for, on our own port (TLS-ALPN-01), or
//! by a DNS record that a program of the operator sets (DNS-01).

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use instant_acme::KeyAuthorization;
use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::order::AcmeError;
use crate::tls::provider;

/// What an ACME server says in ALPN, and nobody else.
pub(crate) const PROTOCOL: &[u8] = b"acme-tls/1";
/// For a DNS record to be set and seen.
const HOOK: Duration = Duration::from_secs(600);

/// The certificates that ACME servers are to be shown now, by name.
#[derive(Debug, Default)]
pub(crate) struct Challenges(Mutex<HashMap<String, Arc<CertifiedKey>>>);

impl Challenges {
    pub(super) fn show(&self, name: &str, answer: &KeyAuthorization) -> Result<(), AcmeError> {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        params.custom_extensions = vec![CustomExtension::new_acme_identifier(answer.digest().as_ref())];
        let key = KeyPair::generate()?;
        let chain = vec![params.self_signed(&key)?.der().clone()];
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let key = provider().key_provider.load_private_key(key.into())?;
        // Without the look at whether they belong together, which stumbles over the extension that this is all about.
        let shown = CertifiedKey::new(chain, key);
        self.lock().insert(name.to_owned(), Arc::new(shown));
        Ok(())
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<CertifiedKey>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResolvesServerCert for Challenges {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.lock().get(hello.server_name()?).cloned()
    }
}

/// A record that is to be taken away again, also if setting it or what follows fails.
pub(super) struct DnsRecord {
    program: PathBuf,
    name: String,
    value: String,
}

impl DnsRecord {
    pub(super) fn new(program: &Path, domain: &str, answer: &KeyAuthorization) -> Self {
        Self {
            program: program.to_owned(),
            name: format!("_acme-challenge.{domain}"),
            value: answer.dns_value(),
        }
    }

    /// Comes back when the program says that the record can be seen.
    pub(super) async fn set(&self) -> Result<(), AcmeError> {
        self.run("set").await
    }

    pub(super) async fn clear(self) {
        if let Err(error) = self.run("clear").await {
            let error = crate::lifecycle::in_full(&error);
            tracing::warn!(%error, name = self.name, "a DNS record is left over");
        }
    }

    async fn run(&self, verb: &str) -> Result<(), AcmeError> {
        let failed = |source| AcmeError::Hook {
            program: self.program.clone(),
            source,
        };
        let running = tokio::process::Command::new(&self.program)
            .args([verb, &self.name, &self.value])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(HOOK, running)
            .await
            .map_err(|_| failed(io::ErrorKind::TimedOut.into()))?
            .map_err(failed)?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                Err(failed(io::Error::other(format!("{}: {said}", output.status))))
            }
        }
    }
}
