//! Hard cases of the way to a port of a box: clients that speak everything, too much, or go away; and boxes that go to sleep
//! while they are asked.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Sdk, Server};
use crate::scale::memory;

harness::tests![
    websockets_http2_and_trailers_go_through,
    a_head_that_is_too_large_is_refused,
    an_upload_whose_client_goes_away_ends_in_the_box_too,
    a_request_that_a_hibernation_cuts_off_is_told_to_come_again_unless_that_may_do_it_twice,
    connections_to_ports_outlive_live_snapshots_and_forks,
    bodies_that_nobody_takes_are_held_by_nobody,
];

const PORT: u16 = 8000;

/// A WebSocket that echoes, trailers, bodies that come back, and answers that never come.
const SERVER: &str = r#"
import base64, hashlib, os, pathlib, socket, struct, threading, time
def frame(kind, data):
    n = len(data)
    size = bytes([n]) if n < 126 else b'\x7e' + struct.pack('>H', n) if n < 65536 else b'\x7f' + struct.pack('>Q', n)
    return bytes([kind]) + size + data
def echo_frames(f, c):
    while True:
        kind, n = f.read(2)
        n &= 127
        if n > 125: n = int.from_bytes(f.read(2 if n == 126 else 8), 'big')
        mask, data = f.read(4), f.read(n)
        whole = int.from_bytes((mask * (n // 4 + 1))[:n], 'big') ^ int.from_bytes(data, 'big')
        c.sendall(frame(kind, whole.to_bytes(n, 'big')))
        if kind & 15 == 8: return
def handle(c):
    f = c.makefile('rb')
    while line := f.readline():
        path, headers = line.decode().split(' ')[1], {}
        while h := f.readline().strip():
            name, value = h.decode().split(':', 1)
            headers[name.lower()] = value.strip()
        pathlib.Path('/tmp/asked').touch()
        if path == '/socket':
            key = headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest())
            c.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ' + accept + b'\r\n\r\n')
            return echo_frames(f, c)
        if path == '/never': time.sleep(3600)
        while path == '/when' and not os.path.exists('/tmp/when'): time.sleep(0.05)
        if path == '/trailers':
            c.sendall(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n')
            continue
        wanted = int(headers.get('content-length', 0))
        body = f.read(wanted)
        if len(body) < wanted:
            pathlib.Path('/tmp/broken').touch()
            return
        pathlib.Path('/tmp/answering').touch()
        c.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
listener = socket.create_server(('127.0.0.1', 8000))
while True:
    threading.Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()
"#;

fn serving(server: &std::sync::Arc<Server>) -> Result<Agent> {
    let agent = server.agent("proxied")?;
    agent.exec_with(&["-d"], &["python3", "-c", SERVER])?.succeeded()?;
    harness::eventually("the box listens", || {
        let ports = server.json(&["ports", &agent.name])?;
        let open = ports.as_array().context("a list")?.iter().any(|one| one["port"] == PORT);
        Ok(open.then_some(()))
    })?;
    Ok(agent)
}

/// A connection with the head of a request for the box.
fn begin(agent: &Agent, method: &str, path: &str, more: &str) -> Result<TcpStream> {
    let (server, id) = (&agent.server, &agent.id);
    let mut stream = TcpStream::connect(server.listen)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    let key = server.key()?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {PORT}-{id}.localhost\r\nX-API-Key: {key}\r\nConnection: close\r\n{more}\r\n"
    )?;
    Ok(stream)
}

fn rest(mut stream: TcpStream) -> Result<String> {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn is_there(agent: &Agent, file: &str) -> Result<()> {
    harness::eventually(file, || Ok((agent.exec(&["test", "-e", file])?.code == 0).then_some(())))
}

fn websockets_http2_and_trailers_go_through() -> Result<()> {
    let server = Server::shared()?;
    let agent = serving(&server)?;
    let mut command = harness::script_command(&Sdk::Node, "proxy.mjs")?;
    let port = PORT.to_string();
    command.args([server.url.as_str(), agent.id.as_str(), &port, &server.key()?]);
    harness::run(command, b"")?.text().map(drop)
}

fn a_head_that_is_too_large_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let mut stream = TcpStream::connect(server.listen)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")?;
    let line = format!("X-Filler: {}\r\n", "x".repeat(1000));
    // It may have answered before it was told everything.
    let _ = (0..400).try_for_each(|_| stream.write_all(line.as_bytes()));
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"HTTP/1.1 431", "{}", String::from_utf8_lossy(&answer));
    Ok(())
}

fn an_upload_whose_client_goes_away_ends_in_the_box_too() -> Result<()> {
    let server = Server::shared()?;
    let agent = serving(&server)?;
    let mut stream = begin(&agent, "POST", "/echo", "Content-Length: 1000000000\r\n")?;
    stream.write_all(&vec![0; 1 << 20])?;
    is_there(&agent, "/tmp/asked")?;
    drop(stream);
    is_there(&agent, "/tmp/broken")
}

fn a_request_that_a_hibernation_cuts_off_is_told_to_come_again_unless_that_may_do_it_twice() -> Result<()> {
    let server = Server::shared()?;
    let agent = serving(&server)?;
    let stream = begin(&agent, "GET", "/never", "")?;
    is_there(&agent, "/tmp/asked")?;
    agent.exec(&["rm", "/tmp/asked"])?.succeeded()?;
    let posted = begin(&agent, "POST", "/never", "Content-Length: 0\r\n")?;
    is_there(&agent, "/tmp/asked")?;
    server.dorm(&["hibernate", &agent.name])?.succeeded()?;
    let answer = rest(stream)?;
    ensure!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let lower = answer.to_lowercase();
    ensure!(lower.contains("retry-after: 1") && lower.contains("ask again"), "{answer}");
    let answer = rest(posted)?;
    ensure!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    let lower = answer.to_lowercase();
    ensure!(!lower.contains("retry-after") && lower.contains("may have done"), "{answer}");
    let again = rest(begin(&agent, "GET", "/", "")?)?;
    ensure!(again.starts_with("HTTP/1.1 200"), "{again}");
    Ok(())
}

fn connections_to_ports_outlive_live_snapshots_and_forks() -> Result<()> {
    let server = Server::shared()?;
    let agent = serving(&server)?;
    let stream = begin(&agent, "POST", "/when", "Content-Length: 0\r\n")?;
    is_there(&agent, "/tmp/asked")?;
    server.dorm(&["snapshot", &agent.name])?.succeeded()?;
    let name = format!("{}-copy", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    agent.exec(&["touch", "/tmp/when"])?.succeeded()?;
    let answer = rest(stream)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // The copy has the server, and no connection of somebody else's.
    let answer = rest(begin(&server.adopt(&name)?, "GET", "/", "")?)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}

fn bodies_that_nobody_takes_are_held_by_nobody() -> Result<()> {
    const SIZE: usize = 192 << 20;
    let server = Server::start()?;
    let agent = serving(&server)?;
    let stream = begin(&agent, "POST", "/when", &format!("Content-Length: {SIZE}\r\n"))?;
    let before = memory(&server, "VmHWM:")?;
    let mut half = stream.try_clone()?;
    let sending = std::thread::spawn(move || {
        let block = vec![0; 1 << 20];
        (0..SIZE / block.len()).try_for_each(|_| half.write_all(&block))
    });
    is_there(&agent, "/tmp/asked")?;
    // The server in the box takes nothing yet: all that is under way is under way by now.
    settled(&server)?;
    agent.exec(&["touch", "/tmp/when"])?.succeeded()?;
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
    // And now nobody takes the answer.
    is_there(&agent, "/tmp/answering")?;
    settled(&server)?;
    ensure!(rest(stream)?.len() > SIZE, "the body came back");
    let grown = memory(&server, "VmHWM:")? - before;
    ensure!(grown < 64 << 20, "the daemon held {grown} bytes");
    Ok(())
}

/// Returns when the daemon's memory has stayed the same for a second.
fn settled(server: &Server) -> Result<()> {
    let mut seen = (0, 0);
    harness::eventually("the daemon has settled", || {
        let now = memory(server, "VmRSS:")?;
        seen = if now.abs_diff(seen.0) < 1 << 20 { (now, seen.1 + 1) } else { (now, 0) };
        Ok((seen.1 == 50).then_some(()))
    })
}
