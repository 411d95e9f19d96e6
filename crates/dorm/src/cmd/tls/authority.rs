//! A CA in four files. It can vouch for its one domain and for this machine, and for nobody else, whoever gets its key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, SigningKey,
};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Some clients take no certificate that is good for more than 825 days.
const LONGEST: u32 = 820;
const CA_LIFE: u32 = 3650;

pub(super) struct Files {
    dir: PathBuf,
    pub(super) ca: PathBuf,
    pub(super) ca_key: PathBuf,
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Files {
    pub(super) fn below(dir: PathBuf) -> Self {
        Self {
            ca: dir.join("ca.pem"),
            ca_key: dir.join("ca-key.pem"),
            certificate: dir.join("certificate.pem"),
            key: dir.join("key.pem"),
            dir,
        }
    }
}

/// A CA, and a certificate of it for the domain, what is below it, and this machine.
pub(super) fn make(files: &Files, domain: &str) -> Result<()> {
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&files.dir);
    made.with_context(|| format!("cannot make {}", files.dir.display()))?;
    let (params, key) = (authority(domain)?, KeyPair::generate()?);
    let ca = params.self_signed(&key)?;
    let names: Vec<String> = [domain, &format!("*.{domain}"), "localhost", "127.0.0.1", "::1"]
        .map(str::to_owned)
        .into();
    let issuer = Issuer::from_params(&params, &key);
    // The CA comes last: a run that was cut off before this can be repeated.
    write_leaf(files, &names, &issuer, &ca.pem())?;
    put(&files.ca_key, &key.serialize_pem(), 0o600)?;
    put(&files.ca, &ca.pem(), 0o644)
}

/// A new certificate and key, for `names`.
pub(super) fn renew(files: &Files, names: &[String]) -> Result<()> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let ca = read(&files.ca)?;
    let key = KeyPair::from_pem(&read(&files.ca_key)?)
        .with_context(|| format!("{} holds no key", files.ca_key.display()))?;
    let issuer =
        Issuer::from_ca_cert_pem(&ca, &key).with_context(|| format!("{} holds no CA", files.ca.display()))?;
    write_leaf(files, names, &issuer, &ca)
}

fn write_leaf(files: &Files, names: &[String], issuer: &Issuer<'_, impl SigningKey>, ca: &str) -> Result<()> {
    let (certificate, key) = leaf(names, issuer)?;
    // A daemon that looks in between finds that they do not belong together, and looks again.
    put(&files.key, &key.serialize_pem(), 0o600)?;
    put(&files.certificate, &format!("{}{ca}", certificate.pem()), 0o644)
}

fn authority(domain: &str) -> Result<CertificateParams> {
    let mut ca = CertificateParams::new(Vec::new())?;
    ca.distinguished_name
        .push(DnType::CommonName, format!("dorm, for {domain}"));
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let own =
        |address: IpAddr, prefix| GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, prefix));
    ca.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![
            GeneralSubtree::DnsName(domain.to_owned()),
            GeneralSubtree::DnsName("localhost".to_owned()),
            own(Ipv4Addr::LOCALHOST.into(), 8),
            own(Ipv6Addr::LOCALHOST.into(), 128),
        ],
        excluded_subtrees: Vec::new(),
    });
    valid_for(&mut ca, CA_LIFE)?;
    Ok(ca)
}

fn leaf(names: &[String], issuer: &Issuer<'_, impl SigningKey>) -> Result<(Certificate, KeyPair)> {
    let mut leaf = CertificateParams::new(names)?;
    if let Some(name) = names.first() {
        leaf.distinguished_name.push(DnType::CommonName, name.as_str());
    }
    leaf.use_authority_key_identifier_extension = true;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    valid_for(&mut leaf, LONGEST)?;
    let key = KeyPair::generate()?;
    Ok((leaf.signed_by(&key, issuer)?, key))
}

/// From yesterday on, for clients whose clocks are a little behind.
fn valid_for(params: &mut CertificateParams, days: u32) -> Result<()> {
    let now = rcgen::date_time_ymd(1970, 1, 1) + SystemTime::now().duration_since(UNIX_EPOCH)?;
    params.not_before = now - DAY;
    params.not_after = now + DAY * days;
    Ok(())
}

fn put(path: &Path, text: &str, mode: u32) -> Result<()> {
    dorm_server::tls::put(path, text, mode).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_are_for_their_owner_alone_and_a_renewal_keeps_the_ca() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::below(dir.path().join("tls"));
        make(&files, "dorm.test").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            [&files.ca, &files.ca_key, &files.certificate, &files.key].map(|file| mode(file)),
            [0o644, 0o600, 0o644, 0o600]
        );
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let before = (read(&files.ca), read(&files.certificate), read(&files.key));
        let facts = dorm_server::tls::facts_of(&files.certificate).unwrap();
        assert!(facts.complete);
        assert!(
            facts.names.contains(&"*.dorm.test".to_owned()),
            "{:?}",
            facts.names
        );
        renew(&files, &facts.names).unwrap();
        assert_eq!(read(&files.ca), before.0);
        assert_ne!(read(&files.certificate), before.1);
        assert_ne!(read(&files.key), before.2);
        assert_eq!(
            dorm_server::tls::facts_of(&files.certificate).unwrap().names,
            facts.names
        );
    }
}
