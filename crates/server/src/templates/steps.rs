//! The steps of a recipe that are done inside the template, by its own programs, as root of its box.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use super::report::{Lines, Report};
use super::script::Placed;
use super::{Result, TemplateError, recipe};
use crate::api::types::RecipeFile;
use crate::guest_client::{GuestClient, Next, Run};

/// Where Debian and most others keep the bundle of all trusted certificates.
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
const HOST_BUNDLE: &str = "/usr/local/share/ca-certificates/dorm/host.pem";
/// What is read of a template's own certificates, which may be anything. Distributions have some 200 KiB.
const MAX_BUNDLE: usize = 16 << 20;
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// Programs that look elsewhere by default are told by these.
const BUNDLE_VARIABLES: [&str; 5] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "CURL_CA_BUNDLE",
];

/// One file for each certificate, which is all that update-ca-certificates takes. Where that is missing, the bundle is
/// extended by hand.
const TRUST: &str = r#"
cd /usr/local/share/ca-certificates/dorm
rm -f ./*.crt
n=0 out=
while IFS= read -r line; do
    case $line in
        '-----BEGIN CERTIFICATE-----'*) n=$((n + 1)); out=$(printf '%03d.crt' "$n"); : >"$out" ;;
    esac
    if [ -n "$out" ]; then printf '%s\n' "$line" >>"$out"; fi
    case $line in
        '-----END CERTIFICATE-----'*) out= ;;
    esac
done <host.pem
if command -v update-ca-certificates >/dev/null 2>&1; then
    rm -f host.pem
    update-ca-certificates
else
    mkdir -p /etc/ssl/certs
    cat host.pem >>/etc/ssl/certs/ca-certificates.crt
fi
echo "$n certificates"
"#;

const INSTALL: &str = r#"
apt-get -q update
apt-get -q install -y --no-install-recommends -- "$@"
"#;

pub(super) const MAKE_USER: &str = r#"
if cut -d: -f1 /etc/passwd | grep -qxF -- "$1"; then exit 0; fi
shell=/bin/sh
if [ -x /bin/bash ]; then shell=/bin/bash; fi
if command -v useradd >/dev/null 2>&1; then useradd --create-home --shell "$shell" -- "$1"
elif command -v adduser >/dev/null 2>&1; then adduser -D -s "$shell" -- "$1"
else
    printf '%s:x:1000:1000::/home/%s:%s\n' "$1" "$1" "$shell" >>/etc/passwd
    printf '%s:x:1000:\n' "$1" >>/etc/group
    mkdir -p "/home/$1"
    chown 1000:1000 "/home/$1"
fi
"#;

const OWN: &str = r#"chown -h -- "$2" "$1"; chmod -- "$3" "$1""#;

const CLEAN_UP: &str = r#"
if command -v apt-get >/dev/null 2>&1; then apt-get clean; fi
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
"#;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum BoxStep {
    TrustHost(HostCa),
    Install(Vec<String>),
    Files(Vec<RecipeFile>),
    Run(String),
    Instruction(Placed),
    User(String),
    CleanUp,
}

impl BoxStep {
    pub(super) fn title(&self) -> String {
        match self {
            Self::TrustHost(_) => "Trust the host's certificates".to_owned(),
            Self::Install(packages) => shortened(&format!("Install {}", packages.join(" "))),
            Self::Files(files) if files.len() == 1 => shortened(&format!("Write {}", files[0].path)),
            Self::Files(files) => format!("Write {} files", files.len()),
            Self::Run(command) => shortened(&format!("Run {}", command.trim())),
            Self::Instruction(placed) => placed.title(),
            Self::User(user) => format!("Make sure of user {user}"),
            Self::CleanUp => "Clean up".to_owned(),
        }
    }

    pub(super) async fn perform(&self, guest: &GuestClient, report: &mut Report) -> Result<()> {
        match self {
            Self::TrustHost(ca) => {
                let missing = ca.missing_in(&trusted(guest).await?);
                if missing.is_empty() {
                    report.line("all of them are trusted already").await;
                    return Ok(());
                }
                guest.write_file(HOST_BUNDLE, missing.concat().into()).await?;
                script(guest, report, TRUST, &[]).await
            }
            Self::Install(packages) => {
                let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
                script(guest, report, INSTALL, &packages).await
            }
            Self::Files(files) => {
                for file in files {
                    guest
                        .write_file(&file.path, recipe::content(file)?.into())
                        .await?;
                    let owner = file.owner.as_deref().unwrap_or("root:root");
                    let mode = file.mode.as_deref().unwrap_or("0644");
                    script(guest, report, OWN, &[&file.path, owner, mode]).await?;
                }
                Ok(())
            }
            Self::Run(command) => script(guest, report, command, &[]).await,
            Self::Instruction(placed) => placed.perform(guest, report).await,
            Self::User(user) => script(guest, report, MAKE_USER, &[user]).await,
            Self::CleanUp => script(guest, report, CLEAN_UP, &[]).await,
        }
    }
}

/// The bundle of the template as it is; nothing if it has none.
async fn trusted(guest: &GuestClient) -> Result<String> {
    let script = format!("if [ -e {BUNDLE} ]; then cat {BUNDLE}; fi");
    let run = Run {
        command: "/bin/sh",
        args: &["-c", &script],
        user: "root",
        workdir: Some("/"),
        env: BTreeMap::new(),
    };
    let mut running = guest.start(&run).await?;
    let mut bundle = Vec::new();
    while let Next::Output(output) = running.next().await? {
        bundle.extend_from_slice(&output);
        if bundle.len() > MAX_BUNDLE {
            let long = std::io::Error::other(format!("{BUNDLE} is longer than {} MiB", MAX_BUNDLE >> 20));
            return Err(TemplateError::io("read the certificates of the template")(long));
        }
    }
    Ok(String::from_utf8_lossy(&bundle).into_owned())
}

/// Runs `script` with `args` as its parameters, up to the first command that fails.
async fn script(guest: &GuestClient, report: &mut Report, script: &str, args: &[&str]) -> Result<()> {
    let args: Vec<&str> = ["-e", "-c", script, "sh"]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    let run = Run {
        command: "/bin/sh",
        args: &args,
        user: "root",
        workdir: Some("/"),
        env: BTreeMap::from([("DEBIAN_FRONTEND".to_owned(), "noninteractive".to_owned())]),
    };
    self::run(guest, report, &run).await
}

/// Runs a command, whose output is reported line by line.
pub(super) async fn run(guest: &GuestClient, report: &mut Report, run: &Run<'_>) -> Result<()> {
    let mut lines = Lines::default();
    let mut running = guest.start(run).await?;
    let exit = loop {
        match running.next().await? {
            Next::Output(output) => {
                for line in lines.push(&output) {
                    report.line(line).await;
                }
            }
            Next::End(exit) => break exit,
        }
    };
    if let Some(line) = lines.rest() {
        report.line(line).await;
    }
    if exit.succeeded() {
        Ok(())
    } else {
        Err(TemplateError::Command {
            exit,
            tail: report.tail(),
        })
    }
}

pub(super) fn shortened(title: &str) -> String {
    const LONGEST: usize = 72;
    let mut lines = title.lines();
    let first = lines.next().unwrap_or_default();
    if first.chars().count() <= LONGEST && lines.next().is_none() {
        return first.to_owned();
    }
    first.chars().take(LONGEST).chain(['…']).collect()
}

/// The certificates that the host trusts, among them perhaps a company's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostCa {
    bundle: String,
    hash: String,
}

impl HostCa {
    pub(super) async fn read(bundle: &Path) -> Result<Self> {
        let bundle = tokio::fs::read_to_string(bundle).await;
        Ok(Self::new(
            bundle.map_err(TemplateError::io("read the host's certificates"))?,
        ))
    }

    pub(super) fn new(bundle: String) -> Self {
        let hash = blake3::hash(bundle.as_bytes()).to_hex().to_string();
        Self { bundle, hash }
    }

    pub(super) fn hash(&self) -> &str {
        &self.hash
    }

    /// The certificates that are not in `bundle`, each as PEM.
    fn missing_in(&self, bundle: &str) -> Vec<String> {
        let theirs: HashSet<String> = certificates(bundle).collect();
        certificates(&self.bundle)
            .filter(|certificate| !theirs.contains(certificate))
            .collect()
    }

    pub(super) fn env() -> impl Iterator<Item = (String, String)> {
        BUNDLE_VARIABLES
            .into_iter()
            .map(|variable| (variable.to_owned(), BUNDLE.to_owned()))
    }
}

/// The certificates of a bundle, without the remarks that may stand between them.
fn certificates(bundle: &str) -> impl Iterator<Item = String> {
    bundle.split(BEGIN).skip(1).filter_map(|rest| {
        let (body, _) = rest.split_once(END)?;
        let body: Vec<&str> = body.split_whitespace().collect();
        Some(format!("{BEGIN}\n{}\n{END}\n", body.join("\n")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certificates_that_the_template_does_not_trust_are_added() {
        let pem = |body: &str| format!("{BEGIN}\n{body}\n{END}\n");
        let host = HostCa::new(format!(
            "# Company\n{}\r\n{}{}",
            pem("AAAA\r\nBBBB"),
            pem("CCCC"),
            pem("DDDD")
        ));
        assert_eq!(host.missing_in(""), [pem("AAAA\nBBBB"), pem("CCCC"), pem("DDDD")]);
        assert_eq!(host.missing_in(&pem("CCCC")), [pem("AAAA\nBBBB"), pem("DDDD")]);
        assert!(host.missing_in(&host.bundle).is_empty());
    }

    #[test]
    fn titles_are_one_short_line() {
        let run = |command: &str| BoxStep::Run(command.to_owned()).title();
        assert_eq!(run("make\n"), "Run make");
        assert_eq!(run("make\nmake install"), "Run make…");
        assert_eq!(run(&"x".repeat(200)).chars().count(), 73);
    }
}
