//! One order: account, proof, certificate.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, ChallengeType, Identifier, LetsEncrypt, NewAccount,
    NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, KeyPair};
use tokio_util::sync::CancellationToken;

use super::super::pair::TlsError;
use super::super::put;
use super::Acme;
use super::challenge::{Challenges, DnsRecord};

/// With an order whose proofs or certificate take their time.
const PATIENCE: RetryPolicy = RetryPolicy::new().timeout(Duration::from_secs(120));
/// With each part of an order: requests have no time limit of their own, and programs for DNS have ten minutes for each name.
const LONGEST: Duration = Duration::from_secs(30 * 60);

#[derive(Debug, thiserror::Error)]
pub(super) enum AcmeError {
    #[error("the ACME server does not answer as expected")]
    Server(#[from] instant_acme::Error),
    #[error("the ACME server did not answer in time")]
    Slow,
    #[error("the daemon ends")]
    Ending,
    #[error("the ACME server refuses: {0}")]
    Refused(String),
    #[error("no key or request could be made")]
    Make(#[from] rcgen::Error),
    #[error("no key could be used")]
    Use(#[from] rustls::Error),
    #[error("{} failed", program.display())]
    Hook {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the account cannot be read")]
    Account(#[from] io::Error),
    #[error("what was obtained cannot be used")]
    Tls(#[from] TlsError),
}

/// Chain and key, in PEM. Whatever was set up for the proofs is taken away again, also if the daemon ends meanwhile.
pub(super) async fn obtain(
    acme: &Acme,
    challenges: &Challenges,
    shutdown: &CancellationToken,
) -> Result<String, AcmeError> {
    let mut order = within(shutdown, place(acme)).await?;
    let mut records = Vec::new();
    let proven = within(shutdown, prove(acme, challenges, &mut order, &mut records)).await;
    challenges.clear();
    for record in records {
        record.clear().await;
    }
    proven?;
    within(shutdown, finish(acme, &mut order)).await
}

async fn within<T>(
    shutdown: &CancellationToken,
    part: impl Future<Output = Result<T, AcmeError>>,
) -> Result<T, AcmeError> {
    tokio::select! {
        () = shutdown.cancelled() => Err(AcmeError::Ending),
        done = tokio::time::timeout(LONGEST, part) => done.unwrap_or(Err(AcmeError::Slow)),
    }
}

async fn place(acme: &Acme) -> Result<Order, AcmeError> {
    let account = account(acme).await?;
    let identifiers: Vec<_> = acme.names().into_iter().map(Identifier::Dns).collect();
    Ok(account.new_order(&NewOrder::new(&identifiers)).await?)
}

async fn finish(acme: &Acme, order: &mut Order) -> Result<String, AcmeError> {
    let key = KeyPair::generate()?;
    let request = CertificateParams::new(acme.names())?.serialize_request(&key)?;
    order.finalize_csr(request.der()).await?;
    let chain = order.poll_certificate(&PATIENCE).await?;
    Ok(format!("{}\n{}", chain.trim_end(), key.serialize_pem()))
}

/// The account of before, as every server wants one for all orders.
async fn account(acme: &Acme) -> Result<Account, AcmeError> {
    let builder = || match &acme.ca {
        Some(ca) => Account::builder_with_root(ca),
        None => Account::builder(),
    };
    let directory = match &acme.directory {
        Some(directory) => directory.clone(),
        None => LetsEncrypt::Production.url().to_owned(),
    };
    let server = &blake3::hash(directory.as_bytes()).to_hex()[..16];
    let file = acme.dir.join(format!("account-{server}.json"));
    match std::fs::read(&file) {
        Ok(kept) => {
            let credentials: AccountCredentials = serde_json::from_slice(&kept).map_err(io::Error::from)?;
            return Ok(builder()?.from_credentials(credentials).await?);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let contact = acme.contact.as_ref().map(|address| format!("mailto:{address}"));
    let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
    let new = NewAccount {
        contact: &contact,
        terms_of_service_agreed: true,
        only_return_existing: false,
    };
    let (account, credentials) = builder()?.create(&new, directory, None).await?;
    let credentials = serde_json::to_string(&credentials).map_err(io::Error::from)?;
    if let Err(error) = put(&file, &credentials, 0o600) {
        tracing::warn!(%error, file = %file.display(), "the account cannot be kept; the next order needs another");
    }
    Ok(account)
}

async fn prove(
    acme: &Acme,
    challenges: &Challenges,
    order: &mut Order,
    records: &mut Vec<DnsRecord>,
) -> Result<(), AcmeError> {
    let kind = || match acme.dns {
        Some(_) => ChallengeType::Dns01,
        None => ChallengeType::TlsAlpn01,
    };
    let mut all = order.authorizations();
    while let Some(one) = all.next().await {
        let mut one = one?;
        if one.status == AuthorizationStatus::Valid {
            continue;
        }
        let name = match one.identifier().identifier {
            Identifier::Dns(name) => name.clone(),
            other => return Err(AcmeError::Refused(format!("it wants proof for {other:?}"))),
        };
        let mut challenge = one
            .challenge(kind())
            .ok_or_else(|| AcmeError::Refused(format!("it offers no {:?} for {name}", kind())))?;
        let answer = challenge.key_authorization();
        match &acme.dns {
            Some(program) => {
                let record = DnsRecord::new(program, &name, &answer);
                records.push(record);
                records[records.len() - 1].set().await?;
            }
            None => challenges.show(&name, &answer)?,
        }
        challenge.set_ready().await?;
    }
    match order.poll_ready(&PATIENCE).await? {
        OrderStatus::Ready | OrderStatus::Valid => Ok(()),
        status => Err(AcmeError::Refused(why(order, status).await)),
    }
}

/// What the server found wrong, in its own words.
async fn why(order: &mut Order, status: OrderStatus) -> String {
    let mut found = Vec::new();
    let mut all = order.authorizations();
    while let Some(Ok(mut one)) = all.next().await {
        if one.refresh().await.is_err() {
            continue;
        }
        let name = one.identifier().to_string();
        let problems = one
            .challenges
            .iter()
            .filter_map(|challenge| challenge.error.as_ref());
        found.extend(problems.map(|problem| format!("{name}: {problem}")));
    }
    match found.is_empty() {
        true => format!("the order is {status:?}"),
        false => found.join("; "),
    }
}
