//! HTTPS on the daemon's own port, and the unmodified E2B SDKs as they are meant to be used: with a domain and nothing else.

use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::harness::{self, Options, Record, Sdk, Server};

harness::tests![
    https_is_spoken_and_http_is_told_so,
    a_renewed_certificate_is_used_without_a_restart,
    the_cli_believes_its_own_daemon_and_whom_it_is_told_to,
    a_local_ca_is_not_replaced_by_accident,
    a_certificate_that_cannot_be_used_is_refused_at_the_start,
    the_e2b_sdks_need_a_domain_and_nothing_else,
];

pub(crate) const DOMAIN: &str = "dorm.test";

pub(crate) fn server() -> Result<Arc<Server>> {
    Server::start_with(&Options {
        domain: Some(DOMAIN),
        ..Options::default()
    })
}

/// A connection to the server under this name, as a client that trusts its CA makes it.
fn connect(server: &Server, name: &str, protocols: &[&str]) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    connect_to(server.listen, &server.data.join("tls/ca.pem"), name, protocols)
}

pub(crate) fn connect_to(
    address: SocketAddr,
    ca: &Path,
    name: &str,
    protocols: &[&str],
) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca)?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let name = ServerName::try_from(name.to_owned())?;
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut stream = StreamOwned::new(ClientConnection::new(Arc::new(config), name)?, socket);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    Ok(stream)
}

/// The whole answer to a request.
pub(crate) fn ask(stream: &mut (impl std::io::Read + std::io::Write), method: &str, host: &str, path: &str) -> Result<String> {
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn plainly(server: &Server, method: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(server.listen)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    ask(&mut stream, method, DOMAIN, path)
}

fn https_is_spoken_and_http_is_told_so() -> Result<()> {
    let server = server()?;
    for name in [DOMAIN, "api.dorm.test", "3000-abcdefghijklmnopqrst.dorm.test", "localhost", "127.0.0.1"] {
        let mut stream = connect(&server, name, &["http/1.1"]).context(name)?;
        let answer = ask(&mut stream, "GET", name, "/healthz")?;
        let expected = if name.starts_with("3000-") { "HTTP/1.1 502" } else { "HTTP/1.1 200" };
        ensure!(answer.starts_with(expected), "{name}: {answer}");
    }
    ensure!(connect(&server, "dorm.example", &[]).is_err(), "it is for no other name");
    let both = connect(&server, DOMAIN, &["h2", "http/1.1"])?;
    ensure!(both.conn.alpn_protocol() == Some(b"h2"), "HTTP/2 is preferred");

    let led = plainly(&server, "GET", "/v1/info?a=b")?;
    ensure!(led.starts_with("HTTP/1.1 307") && led.contains("https://dorm.test/v1/info?a=b"), "{led}");
    let told = plainly(&server, "POST", "/v1/agents")?;
    ensure!(told.starts_with("HTTP/1.1 400") && told.contains("speaks HTTPS"), "{told}");
    let agent = server.json(&["new", "secure"])?;
    let url = server.dorm(&["url", "secure", "3000"])?.text()?;
    let id = agent["id"].as_str().context("an id")?;
    ensure!(url == format!("https://3000-{id}.dorm.test"), "{url}");
    server.dorm(&["rm", "--yes", "secure"])?.succeeded()?;
    Ok(())
}

fn a_renewed_certificate_is_used_without_a_restart() -> Result<()> {
    let server = server()?;
    let shown = || -> Result<Vec<u8>> {
        let stream = connect(&server, DOMAIN, &[])?;
        Ok(stream.conn.peer_certificates().context("it has shown one")?[0].to_vec())
    };
    let (before, mut open) = (shown()?, connect(&server, DOMAIN, &[])?);
    server.dorm(&["tls", "renew"])?.succeeded()?;
    harness::eventually("the new certificate is used", || Ok((shown()? != before).then_some(())))?;
    let answer = ask(&mut open, "GET", DOMAIN, "/healthz")?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "an open connection goes on: {answer}");

    // A key of another certificate is not taken, and does no harm.
    let key = server.data.join("tls/key.pem");
    std::fs::copy(server.data.join("tls/ca-key.pem"), &key)?;
    let now = shown()?;
    let pid = rustix::process::Pid::from_raw(server.pid()?).context("a process has a pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::HUP)?;
    harness::eventually("the wrong key is complained of", || {
        Ok(server.log_text()?.contains("does not belong").then_some(()))
    })?;
    ensure!(shown()? == now, "what was good stays in use");
    Ok(())
}

fn the_cli_believes_its_own_daemon_and_whom_it_is_told_to() -> Result<()> {
    let server = server()?;
    // Its certificate is for no such address, but known by its file.
    server.dorm(&["ls", "--url", &server.url])?.succeeded()?;
    let elsewhere = harness::World::get().root.join("elsewhere");
    let key = server.key()?;
    let from_elsewhere = |url: &str, ca: Option<&str>| {
        let mut command = server.command(&["ls", "--url", url]);
        command.env("DORM_DATA", &elsewhere).env("DORM_API_KEY", &key);
        if let Some(ca) = ca {
            command.env("DORM_CA", server.data.join(ca));
        }
        harness::run(command, b"")
    };
    from_elsewhere(&server.url, None)?.refused(6, &["UnknownIssuer", "DORM_CA"])?;
    from_elsewhere(&server.url, Some("tls/ca.pem"))?.refused(6, &["not valid for name", "dorm tls show"])?;
    from_elsewhere(&server.url, Some("tls/key.pem"))?.refused(1, &["DORM_CA", "no certificates"])?;
    let plain = server.url.replace("https:", "http:");
    from_elsewhere(&plain, None)?.refused(1, &["speaks HTTPS", "use https://"])?;
    let mut named = in_domain(&server)?;
    named.arg(harness::binary()).args(["ls", "--url", "https://dorm.test"]);
    named.env("DORM_DATA", &elsewhere).env("DORM_API_KEY", &key);
    named.env("DORM_CA", server.data.join("tls/ca.pem"));
    harness::run(named, b"")?.succeeded()?;

    let shown = server.json(&["tls", "show"])?;
    ensure!(shown["valid"] == true && shown["complete"] == true, "{shown}");
    Ok(())
}

fn a_local_ca_is_not_replaced_by_accident() -> Result<()> {
    let server = server()?;
    let ca = || std::fs::read(server.data.join("tls/ca.pem"));
    let before = ca()?;
    server.dorm(&["tls", "init", DOMAIN])?.refused(4, &["already", "--force"])?;
    ensure!(ca()? == before, "it was left as it was");
    server.dorm(&["tls", "init", "not a domain", "--force"])?.refused(2, &["no domain name"])?;
    let said = server.dorm(&["tls", "init", DOMAIN, "--force"])?.text()?;
    for word in ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "E2B_DOMAIN=dorm.test ", "*.dorm.test"] {
        ensure!(said.contains(word), "{word} is missing: {said}");
    }
    ensure!(ca()? != before, "it was to be replaced");
    harness::eventually("the daemon takes the new one", || {
        Ok(connect(&server, DOMAIN, &[]).is_ok().then_some(()))
    })
}

fn a_certificate_that_cannot_be_used_is_refused_at_the_start() -> Result<()> {
    let server = server()?;
    server.sigterm()?;
    std::fs::copy(server.data.join("tls/ca-key.pem"), server.data.join("tls/key.pem"))?;
    let mut daemon = server.spawn(&[])?;
    let status = daemon.wait()?;
    ensure!(!status.success(), "it started with another's key");
    let log = server.log_text()?;
    ensure!(log.contains("HTTPS cannot be offered") && log.contains("does not belong"), "{log}");
    server.dorm(&["tls", "renew"])?.succeeded()?;
    server.launch(&[])
}

/// A command that resolves all names of the domain to the server, and nothing else.
fn in_domain(server: &Server) -> Result<Command> {
    let IpAddr::V4(address) = server.listen.ip() else {
        bail!("the harness gives IPv4 addresses");
    };
    let resolv_conf = server.data.join("resolv.conf");
    if !resolv_conf.exists() {
        harness::resolve(UdpSocket::bind((address, 53))?, move |name| {
            let ours = name == DOMAIN || name.ends_with(".dorm.test");
            ours.then_some(Record::Address(address))
        });
        std::fs::write(&resolv_conf, format!("nameserver {address}\n"))?;
    }
    let mut command = Command::new("unshare");
    let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script]).arg(resolv_conf);
    command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    Ok(command)
}

fn the_e2b_sdks_need_a_domain_and_nothing_else() -> Result<()> {
    let server = server()?;
    let ca = server.data.join("tls/ca.pem");
    let scripts = [
        (Sdk::Python, "sandboxes.py"),
        (Sdk::Python, "files.py"),
        (Sdk::Python, "templates_async.py"),
        (Sdk::OldPython, "old.py"),
        (Sdk::Node, "inside.mjs"),
    ];
    for (sdk, script) in scripts {
        let mut command = in_domain(&server)?;
        let program = harness::script_command(&sdk, script)?;
        command.arg(program.get_program()).args(program.get_args());
        command
            .env("PYTHONFAULTHANDLER", "1")
            .env("DORM_E2E_SLOWNESS", harness::slowness().to_string())
            .env("E2B_DOMAIN", DOMAIN)
            .env("E2B_API_KEY", server.key()?)
            .env("SSL_CERT_FILE", &ca)
            .env("NODE_EXTRA_CA_CERTS", &ca);
        harness::run(command, b"")?.text().context(script)?;
    }
    Ok(())
}
