//! Certificates from a real ACME server: Pebble, on loopback.

use std::{fs, io};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::harness::{self, Record, Server, Skip};
use crate::tls::{DOMAIN, ask, connect_to, server};

harness::tests![a_certificate_is_obtained_by_acme_kept_and_exchanged_for_a_wildcard];

struct Pebble {
    process: Child,
    address: SocketAddr,
    management: SocketAddr,
    /// Its own, which nobody else vouches for.
    certificate: PathBuf,
}

impl Drop for Pebble {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program() -> Result<PathBuf> {
    let set_up = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup-pebble");
    let output = Command::new(set_up).output()?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Skip(format!("Pebble cannot be had: {}", why.trim())).into());
    }
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

impl Pebble {
    /// On the address of the server, which is nobody else's.
    fn start(server: &Server) -> Result<Self> {
        let program = program()?;
        let dir = server.data.join("pebble");
        fs::create_dir(&dir)?;
        let (certificate, key) = (dir.join("certificate.pem"), dir.join("key.pem"));
        let own = rcgen::generate_simple_self_signed(vec![server.listen.ip().to_string()])?;
        fs::write(&certificate, own.cert.pem())?;
        fs::write(&key, own.signing_key.serialize_pem())?;
        let at = |port| SocketAddr::new(server.listen.ip(), port);
        let (address, management) = (at(14000), at(15000));
        let config = json!({"pebble": {
            "listenAddress": address, "managementListenAddress": management,
            "certificate": certificate, "privateKey": key,
            "httpPort": 5002, "tlsPort": server.listen.port(),
            "ocspResponderURL": "", "externalAccountBindingRequired": false,
        }});
        fs::write(dir.join("config.json"), config.to_string())?;
        let log = dir.join("log");
        let output = fs::File::create(&log)?;
        let process = Command::new(program)
            .arg("-config")
            .arg(dir.join("config.json"))
            .args(["-dnsserver", &at(53).to_string()])
            .env_clear()
            .env("PEBBLE_VA_NOSLEEP", "1")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        let mut pebble = Self {
            process,
            address,
            management,
            certificate,
        };
        harness::eventually("Pebble answers", || {
            if let Some(status) = pebble.process.try_wait()? {
                bail!("Pebble ended with {status}: {}", fs::read_to_string(&log)?);
            }
            Ok((pebble.connect(management).is_ok() && pebble.connect(address).is_ok()).then_some(()))
        })?;
        Ok(pebble)
    }

    fn connect(&self, address: SocketAddr) -> Result<impl io::Read + io::Write> {
        connect_to(address, &self.certificate, &address.ip().to_string(), &[])
    }

    /// The CA that it issues certificates with.
    fn root(&self) -> Result<String> {
        let mut stream = self.connect(self.management)?;
        let answer = ask(&mut stream, "GET", "localhost", "/roots/0")?;
        let begin = answer.find("-----BEGIN").with_context(|| answer.clone())?;
        let end = answer.rfind("-----END CERTIFICATE-----").context("it ends")?;
        Ok(format!("{}-----END CERTIFICATE-----\n", &answer[begin..end]))
    }
}

/// Writes the daemon's configuration anew, with ACME in place of files.
fn configure(server: &Server, pebble: &Pebble, more: &str) -> Result<()> {
    let file = server.data.join("config.toml");
    let text = fs::read_to_string(&file)?;
    let rest = text.split("[tls]").next().unwrap_or_default();
    let (address, ca) = (pebble.address, pebble.certificate.display());
    let tls =
        format!("[tls]\nacme = true\nacme_directory = \"https://{address}/dir\"\nacme_ca = \"{ca}\"\n{more}");
    Ok(fs::write(file, format!("{rest}{tls}"))?)
}

fn shown(server: &Server) -> Result<Value> {
    server.json(&["tls", "show"])
}

fn obtained(server: &Server, name: &str) -> Result<Value> {
    harness::eventually("a certificate is obtained", || {
        let shown = shown(server)?;
        let issued = shown["issuer"].as_str().is_some_and(|issuer| issuer.contains("Pebble"));
        let named = shown["names"].as_array().is_some_and(|names| names.iter().any(|one| one == name));
        Ok((issued && named).then_some(shown))
    })
}

fn a_certificate_is_obtained_by_acme_kept_and_exchanged_for_a_wildcard() -> Result<()> {
    let server = server()?;
    server.sigterm()?;
    let IpAddr::V4(address) = server.listen.ip() else {
        bail!("the harness gives IPv4 addresses");
    };
    let texts = server.data.join("texts");
    let of = texts.clone();
    harness::resolve(UdpSocket::bind((address, 53))?, move |name| {
        if name.starts_with("_acme-challenge.") {
            let texts = fs::read_to_string(&of).unwrap_or_default();
            let of_name = texts.lines().filter_map(|line| line.strip_prefix(&format!("{name} ")));
            return Some(Record::Texts(of_name.map(str::to_owned).collect()));
        }
        Some(Record::Address(address))
    });
    let pebble = Pebble::start(&server)?;
    configure(&server, &pebble, "")?;
    server.launch(&[])?;
    let first = obtained(&server, "api.dorm.test")?;
    let root = server.data.join("root.pem");
    fs::write(&root, pebble.root()?)?;
    let mut stream = harness::eventually("it is used", || Ok(connect_to(server.listen, &root, DOMAIN, &[]).ok()))?;
    ensure!(ask(&mut stream, "GET", DOMAIN, "/healthz")?.starts_with("HTTP/1.1 200"), "by its name");

    // With DNS records there is a wildcard. Another certificate is obtained, by the same account.
    server.sigterm()?;
    let hook = server.data.join("hook");
    let script = format!(
        "#!/bin/sh\ncase $1 in\nset) echo \"$2 $3\" >> {0} ;;\nclear) grep -vxF \"$2 $3\" {0} > {0}.new; mv {0}.new {0} ;;\nesac\n",
        texts.display()
    );
    fs::write(&hook, script)?;
    fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    configure(&server, &pebble, &format!("acme_dns = \"{}\"\n", hook.display()))?;
    server.launch(&[])?;
    let second = obtained(&server, "*.dorm.test")?;
    ensure!(second["sha256"] != first["sha256"], "it is another");
    let by_wildcard = || connect_to(server.listen, &root, "3000-abcdefghijklmnopqrst.dorm.test", &[]);
    harness::eventually("the wildcard is used", || Ok(by_wildcard().ok().map(drop)))?;
    ensure!(fs::read_to_string(&texts)?.is_empty(), "the records are taken away");
    let files = fs::read_dir(server.data.join("acme"))?.flatten().map(|entry| entry.file_name());
    let accounts = files.filter(|name| name.to_string_lossy().starts_with("account-"));
    ensure!(accounts.count() == 1, "one account is enough");

    // What was obtained is there after a crash, whether or not anybody could give another.
    drop(pebble);
    server.kill9()?;
    server.launch(&[])?;
    ensure!(shown(&server)?["sha256"] == second["sha256"], "it is kept");
    by_wildcard().map(drop)
}
