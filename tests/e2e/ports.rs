//! Ports of boxes as URLs: real servers in boxes, reached through the daemon.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Reply, Server};

harness::tests![
    a_server_on_the_boxs_loopback_is_a_url,
    a_server_on_ipv6_alone_is_reached_too,
    a_port_that_is_not_public_needs_a_token,
    a_closed_port_is_said_to_be_closed,
    a_sleeping_agent_is_woken_by_a_request_for_its_port,
    ports_are_listed_with_what_listens,
    an_upgraded_connection_carries_bytes_both_ways_and_a_hibernation_ends_it,
    an_event_stream_arrives_as_it_is_sent,
    large_bodies_go_through_both_ways,
];

/// Answers with what it was asked; echoes bodies; upgrades to an echo; sends events as they come.
const SERVER: &str = r#"
import http.server, socket, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *_): pass
    def do_GET(self):
        if self.path == '/upgrade':
            self.send_response(101)
            self.send_header('Connection', 'Upgrade')
            self.send_header('Upgrade', 'echo')
            self.end_headers()
            self.close_connection = True
            while True:
                data = self.connection.recv(65536)
                if not data: return
                self.connection.sendall(data.upper())
        if self.path == '/events':
            self.send_response(200)
            self.send_header('Content-Type', 'text/event-stream')
            self.send_header('Connection', 'close')
            self.end_headers()
            self.wfile.write(b'data: first\n\n')
            self.wfile.flush()
            time.sleep(3600)
        body = f'{self.path} {self.headers.get("Host")} {self.headers.get("X-Forwarded-For")}'.encode()
        self.answer(body)
    def do_POST(self):
        if self.headers.get('Content-Length'):
            self.answer(self.rfile.read(int(self.headers['Content-Length'])))
    def answer(self, body):
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"#;

fn serve(agent: &Agent, address: &str, port: u16) -> Result<()> {
    let port_text = port.to_string();
    agent.exec_with(&["-d"], &["python3", "-c", SERVER, address, &port_text])?.succeeded()?;
    harness::eventually("the box listens", || {
        let ports = agent.server.json(&["ports", &agent.name])?;
        let open = ports.as_array().context("a list")?.iter().any(|one| one["port"] == port);
        Ok(open.then_some(()))
    })
}

fn host(agent: &Agent, port: u16) -> String {
    format!("{port}-{}.localhost", agent.id)
}

fn get(agent: &Agent, port: u16, path: &str, headers: &[(&str, &str)]) -> Result<Reply> {
    let host = host(agent, port);
    let headers = [&[("host", host.as_str())], headers].concat();
    agent.server.http_with("GET", path, &headers, b"")
}

/// A connection to the daemon on which a request was sent.
fn open(agent: &Agent, port: u16, head: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(agent.server.url.trim_start_matches("http://"))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "{head}\r\nHost: {}\r\n\r\n", host(agent, port))?;
    Ok(stream)
}

fn read_until(stream: &mut TcpStream, end: &str) -> Result<String> {
    let mut text = String::new();
    while !text.contains(end) {
        let mut some = [0; 1024];
        let n = stream.read(&mut some)?;
        ensure!(n > 0, "ended after {text:?}");
        text += &String::from_utf8_lossy(&some[..n]);
    }
    Ok(text)
}

fn a_server_on_the_boxs_loopback_is_a_url() -> Result<()> {
    let agent = Server::shared()?.agent_with("url", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    let reply = get(&agent, 3000, "/a%20b?c=1", &[])?;
    ensure!(reply.status == 200, "{}", reply.text());
    ensure!(reply.text() == format!("/a%20b?c=1 {} 127.0.0.1", host(&agent, 3000)), "{}", reply.text());
    let by_header = [("e2b-sandbox-id", agent.id.as_str()), ("e2b-sandbox-port", "3000")];
    let reply = agent.server.http_with("GET", "/x", &by_header, b"")?;
    ensure!(reply.status == 200 && reply.text().starts_with("/x "), "{}", reply.text());
    Ok(())
}

fn a_server_on_ipv6_alone_is_reached_too() -> Result<()> {
    let agent = Server::shared()?.agent_with("six", &["--public"])?;
    serve(&agent, "::1", 3001)?;
    let reply = get(&agent, 3001, "/", &[])?;
    ensure!(reply.status == 200, "{}", reply.text());
    Ok(())
}

fn a_port_that_is_not_public_needs_a_token() -> Result<()> {
    let agent = Server::shared()?.agent("private")?;
    serve(&agent, "127.0.0.1", 3000)?;
    ensure!(get(&agent, 3000, "/", &[])?.status == 403);
    let shown = agent.server.json(&["url", &agent.name, "3000"])?;
    let token = shown["token"].as_str().context("a token")?;
    ensure!(get(&agent, 3000, "/", &[("e2b-traffic-access-token", token)])?.status == 200);
    let link = agent.server.dorm(&["url", &agent.name, "3000", "--token"])?.text()?;
    let query = link.split_once("/?").context("a query")?.1;
    let reply = get(&agent, 3000, &format!("/page?{query}"), &[])?;
    ensure!(reply.status == 200 && reply.text().starts_with("/page "), "{}", reply.text());
    let other = agent.server.agent("stranger")?;
    ensure!(get(&other, 3000, "/", &[("e2b-traffic-access-token", token)])?.status == 403);
    Ok(())
}

fn a_closed_port_is_said_to_be_closed() -> Result<()> {
    let agent = Server::shared()?.agent_with("closed", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    let reply = get(&agent, 4000, "/", &[])?;
    ensure!(reply.status == 502 && reply.text().contains("port is not open"), "{}", reply.text());
    let page = get(&agent, 4000, "/", &[("accept", "text/html")])?;
    ensure!(page.text().contains(&format!("//3000-{}.localhost/", agent.id)), "{}", page.text());
    let unknown = [("host", "3000-aaaaaaaaaaaaaaaaaaaa.localhost")];
    let reply = agent.server.http_with("GET", "/", &unknown, b"")?;
    ensure!(reply.status == 502 && reply.text().contains("was not found"), "{}", reply.text());
    Ok(())
}

fn a_sleeping_agent_is_woken_by_a_request_for_its_port() -> Result<()> {
    let agent = Server::shared()?.agent_with("sleeper", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    ensure!(get(&agent, 3000, "/before", &[])?.status == 200);
    for verb in ["pause", "hibernate"] {
        agent.server.dorm(&[verb, &agent.name])?.succeeded()?;
        let reply = get(&agent, 3000, "/after", &[])?;
        ensure!(reply.status == 200, "after {verb}: {}", reply.text());
        ensure!(agent.state()? == "running");
    }
    Ok(())
}

fn ports_are_listed_with_what_listens() -> Result<()> {
    let agent = Server::shared()?.agent("listed")?;
    ensure!(agent.server.json(&["ports", &agent.name])?.as_array().is_some_and(Vec::is_empty));
    serve(&agent, "127.0.0.1", 3000)?;
    serve(&agent, "0.0.0.0", 3005)?;
    let ports = agent.server.json(&["ports", &agent.name])?;
    ensure!(ports[0]["port"] == 3000 && ports[0]["addresses"][0] == "127.0.0.1", "{ports}");
    ensure!(ports[1]["port"] == 3005 && ports[1]["addresses"][0] == "0.0.0.0", "{ports}");
    let url = agent.server.dorm(&["url", &agent.name, "3005"])?.text()?;
    ensure!(ports[1]["url"] == url, "{url}");
    agent.server.dorm(&["pause", &agent.name])?.succeeded()?;
    ensure!(agent.server.json(&["ports", &agent.name])? == ports);
    Ok(())
}

fn an_upgraded_connection_carries_bytes_both_ways_and_a_hibernation_ends_it() -> Result<()> {
    let agent = Server::shared()?.agent_with("upgraded", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    let mut stream = open(&agent, 3000, "GET /upgrade HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: echo")?;
    let head = read_until(&mut stream, "\r\n\r\n")?;
    ensure!(head.starts_with("HTTP/1.1 101") && head.to_lowercase().contains("upgrade: echo"), "{head}");
    for word in ["one", "two"] {
        stream.write_all(word.as_bytes())?;
        ensure!(read_until(&mut stream, &word.to_uppercase())? == word.to_uppercase());
    }
    agent.server.dorm(&["hibernate", &agent.name])?.succeeded()?;
    let mut rest = Vec::new();
    ensure!(matches!(stream.read_to_end(&mut rest), Ok(0) | Err(_)), "{rest:?}");
    ensure!(get(&agent, 3000, "/again", &[])?.status == 200);
    Ok(())
}

fn an_event_stream_arrives_as_it_is_sent() -> Result<()> {
    let agent = Server::shared()?.agent_with("events", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    let mut stream = open(&agent, 3000, "GET /events HTTP/1.1")?;
    let text = read_until(&mut stream, "data: first")?;
    ensure!(text.contains("text/event-stream"), "{text}");
    let shown = agent.server.json(&["why", &agent.name])?;
    ensure!(shown["because"].to_string().contains("request"), "{shown}");
    Ok(())
}

fn large_bodies_go_through_both_ways() -> Result<()> {
    let agent = Server::shared()?.agent_with("large", &["--public"])?;
    serve(&agent, "127.0.0.1", 3000)?;
    let body: Vec<u8> = (0..20 << 20).map(|n: u32| (n >> 8) as u8 ^ n as u8).collect();
    let reply = agent.server.http_with("POST", "/", &[("host", &host(&agent, 3000))], &body)?;
    ensure!(reply.status == 200 && reply.body == body, "{} bytes came back", reply.body.len());
    Ok(())
}
