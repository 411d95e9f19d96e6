//! `dorm tls`: a local certificate authority, for trials and for networks without a public one.

mod authority;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dorm_server::tls::{Facts, facts_of};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::client::locate;
use crate::config::{self, Layer};
use crate::exit::{Exit, Failure};
use crate::output;
use authority::Files;

/// Browsers take every name below `localhost` for this machine; a certificate for `*.localhost` itself is believed
/// by nobody, as a wildcard needs two labels after it.
const TRIAL_DOMAIN: &str = "dorm.localhost";
const DAY: i64 = 24 * 3600;

/// Certificates: make them for trials, renew and show them
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: sudo dorm tls init dorm.test && sudo dorm tls show")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make a local CA, and a certificate of it for a domain and all names below it
    Init {
        /// Without port [default: the configuration's `domain`, else dorm.localhost]
        domain: Option<String>,
        #[command(flatten)]
        place: Place,
        /// Replace a CA that is there. Clients have to be told of the new one
        #[arg(long)]
        force: bool,
    },
    /// Make a new certificate of the local CA, for the same names. A running daemon takes it within seconds
    Renew {
        #[command(flatten)]
        place: Place,
    },
    /// Show what a certificate is for, and until when it is valid
    Show {
        /// A file in PEM [default: the one of the running daemon, else that of DATA/tls]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
struct Place {
    /// Where the files are [default: DATA/tls]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Place {
    fn files(self, global: &Global) -> Files {
        Files::below(self.dir.unwrap_or_else(|| global.data().join("tls")))
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<()> {
    match args.what {
        What::Init { domain, place, force } => init(global, domain, &place.files(global), force),
        What::Renew { place } => {
            let files = place.files(global);
            let names = facts_of(&files.certificate)?.names;
            authority::renew(&files, &names)?;
            let facts = facts_of(&files.certificate)?;
            match global.json {
                true => output::json(&told(&files.certificate, &facts)),
                false => output::line(format!(
                    "{}, valid until {}",
                    names.join(", "),
                    date(facts.not_after)
                )),
            }
        }
        What::Show { file } => show(global, file),
    }
}

fn init(global: &Global, domain: Option<String>, files: &Files, force: bool) -> Result<()> {
    let configured = || {
        let settings = config::load(Layer::default(), None, &global.data(), |name| {
            std::env::var(name).ok()
        });
        settings.map(|settings| settings.server)
    };
    let (domain, port) = match domain {
        Some(domain) => (domain, configured().map_or(3676, |server| server.listen.port())),
        None => {
            let server = configured()?;
            let port = server.listen.port();
            (server.domain.unwrap_or_else(|| TRIAL_DOMAIN.to_owned()), port)
        }
    };
    let name = domain.split(':').next().unwrap_or_default().to_ascii_lowercase();
    let is_name =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if !name.split('.').all(is_name) {
        return Err(Failure::new(Exit::Usage, format!("`{domain}` is no domain name")).into());
    }
    if files.ca.exists() && !force {
        return Err(
            Failure::new(Exit::Conflict, format!("there is a CA already: {}", files.ca.display()))
                .hint("`dorm tls renew` makes a new certificate of it; --force replaces it; --dir puts another elsewhere")
                .into(),
        );
    }
    authority::make(files, &name)?;
    let facts = facts_of(&files.certificate)?;
    if global.json {
        let mut made = told(&files.certificate, &facts);
        made["domain"] = json!(name);
        made["key"] = json!(files.key);
        made["ca"] = json!(files.ca);
        return output::json(&made);
    }
    output::line(directions(files, &name, &facts, port))
}

fn directions(files: &Files, name: &str, facts: &Facts, port: u16) -> String {
    let (ca, certificate, key) = (
        files.ca.display(),
        files.certificate.display(),
        files.key.display(),
    );
    let shown = if port == 443 {
        name.to_owned()
    } else {
        format!("{name}:{port}")
    };
    let leads = match name == "localhost" || name.ends_with(".localhost") {
        true => {
            "Browsers take these names for this machine; for other programs put them into /etc/hosts or a resolver."
        }
        false => "These names have to lead to the daemon, by DNS or /etc/hosts.",
    };
    format!(
        "Made a CA that is good for {name} and this machine alone, and a certificate of it for\n  {}\n\
         valid until {}. {leads}\n\n\
         The daemon's configuration:\n\n  domain = \"{name}\"\n  [tls]\n  certificate = \"{certificate}\"\n  key = \"{key}\"\n\n\
         Who has to trust it:\n\n  \
         dorm            needs nothing on this machine; elsewhere export DORM_CA={ca}\n  \
         curl            curl --cacert {ca}\n  \
         Python          export SSL_CERT_FILE={ca}\n  \
         Node            export NODE_EXTRA_CA_CERTS={ca}\n  \
         this machine    cp {ca} /usr/local/share/ca-certificates/dorm.crt && update-ca-certificates\n  \
         browsers        import it as an authority\n\n\
         The E2B SDKs, besides one of the above:\n\n  \
         export E2B_DOMAIN={shown} E2B_API_KEY=...\n\n\
         {} can sign for these names: it stays with the daemon.",
        facts.names.join(", "),
        date(facts.not_after),
        files.ca_key.display(),
    )
}

fn show(global: &Global, file: Option<PathBuf>) -> Result<()> {
    let of_daemon = || locate::daemon(&global.data()).and_then(|daemon| daemon.certificate);
    let file = file
        .or_else(of_daemon)
        .unwrap_or_else(|| Files::below(global.data().join("tls")).certificate);
    if !file.exists() {
        return Err(
            Failure::new(Exit::NotFound, format!("there is no {}", file.display()))
                .hint("`dorm tls init` makes a certificate; or name a file")
                .into(),
        );
    }
    let facts = facts_of(&file).with_context(|| format!("{} cannot be used", file.display()))?;
    if global.json {
        return output::json(&told(&file, &facts));
    }
    let now = Timestamp::now().as_second();
    let state = match facts.trouble(now) {
        Some(trouble) => trouble.to_owned(),
        None => format!("{} days left", (facts.not_after - now) / DAY),
    };
    let chain = match facts.complete {
        true => "leads to its root",
        false => "does not lead to a root that this machine trusts",
    };
    output::fields(&[
        ("file", file.display().to_string()),
        ("names", facts.names.join(", ")),
        ("issuer", facts.issuer.clone()),
        ("from", date(facts.not_before)),
        ("until", format!("{} ({state})", date(facts.not_after))),
        ("chain", chain.to_owned()),
        ("sha256", facts.sha256.clone()),
    ])
}

fn told(file: &Path, facts: &Facts) -> Value {
    let now = Timestamp::now().as_second();
    json!({
        "certificate": file,
        "names": facts.names,
        "issuer": facts.issuer,
        "not_before": facts.not_before * 1000,
        "not_after": facts.not_after * 1000,
        "complete": facts.complete,
        "valid": facts.trouble(now).is_none(),
        "sha256": facts.sha256,
    })
}

fn date(seconds: i64) -> String {
    Timestamp::from_second(seconds).map_or_else(
        |_| seconds.to_string(),
        |time| time.strftime("%Y-%m-%d").to_string(),
    )
}
