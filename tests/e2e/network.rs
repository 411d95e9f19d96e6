//! What boxes reach over the network: the outside, and nothing nearer. Traffic goes to loopback and to a namespace
//! that the tests made, no further.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Outside, Server, answers_peer_address};

harness::tests![
    loopback_is_up_and_a_boxs_own,
    a_box_reaches_the_outside_with_the_hosts_address,
    the_outside_cannot_begin_a_connection_to_a_box,
    a_box_does_not_reach_the_host,
    a_box_does_not_reach_another_box,
    private_ranges_are_out_of_reach,
    a_packet_with_anothers_address_goes_nowhere,
    questions_for_hardware_addresses_leave_no_trace,
    a_box_has_no_ipv6_way_out,
    names_are_resolved_by_the_configured_server,
    two_boxes_may_use_the_same_port,
    the_network_comes_back_with_a_start,
];

/// Python that connects and prints what it read, or the error's name.
pub(crate) fn connect(agent: &Agent, to: SocketAddr) -> Result<String> {
    let script = format!(
        "import errno, socket\ntry:\n s = socket.create_connection(('{}', {}), timeout=15)\n print(s.recv(100).decode().strip() or 'nothing')\n\
         except socket.timeout: print('timeout')\nexcept OSError as e: print(errno.errorcode.get(e.errno, str(e)))",
        to.ip(),
        to.port()
    );
    agent.exec(&["python3", "-c", &script])?.text()
}

pub(crate) fn is_error(seen: &str) -> bool {
    seen == "timeout" || seen.starts_with('E')
}

/// Starts a server in a box that answers every connection with a word.
fn serve(agent: &Agent, address: &str, port: u16, word: &str) -> Result<()> {
    let script = format!(
        "import socket\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\ns.bind(('{address}', {port}))\ns.listen()\n\
         print('up', flush=True)\nwhile True:\n c, _ = s.accept()\n c.sendall(b'{word}')\n c.close()"
    );
    let run = agent.exec_with(&["-d"], &["python3", "-c", &script])?.text()?;
    harness::eventually("the box listens", || {
        Ok(agent.server.dorm(&["logs", &agent.name, &run])?.stdout().contains("up").then_some(()))
    })
}

fn loopback_is_up_and_a_boxs_own() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("loopback")?;
    serve(&agent, "127.0.0.1", 7001, "own")?;
    ensure!(connect(&agent, "127.0.0.1:7001".parse()?)? == "own");
    let host = answers_peer_address(TcpListener::bind("127.0.0.1:0")?)?;
    ensure!(connect(&agent, host)? == "ECONNREFUSED", "the host's loopback was reached");
    let api: SocketAddr = server.url.trim_start_matches("http://").parse()?;
    ensure!(connect(&agent, api)? == "ECONNREFUSED", "the daemon was reached");
    Ok(())
}

fn a_box_reaches_the_outside_with_the_hosts_address() -> Result<()> {
    let outside = Outside::get()?;
    let agent = Server::shared()?.agent("nat")?;
    let there = outside.listen(outside.public)?;
    let seen = connect(&agent, there)?;
    ensure!(seen == outside.host.to_string(), "the outside saw {seen}");
    Ok(())
}

fn the_outside_cannot_begin_a_connection_to_a_box() -> Result<()> {
    let outside = Outside::get()?;
    let agent = Server::shared()?.agent("inward")?;
    serve(&agent, "0.0.0.0", 7002, "reached")?;
    let to = SocketAddr::new(agent.address()?.parse()?, 7002);
    ensure!(connect(&agent, to)? == "reached", "the server listens");
    let reached = outside.there(move || Ok(TcpStream::connect_timeout(&to, Duration::from_secs(2)).is_ok()))?;
    ensure!(!reached, "the outside reached a box");
    Ok(())
}

fn a_box_does_not_reach_the_host() -> Result<()> {
    let agent = Server::shared()?.agent("no-host")?;
    let listener = answers_peer_address(TcpListener::bind("0.0.0.0:0")?)?;
    let mut addresses = host_addresses()?;
    ensure!(addresses.iter().any(|a| !a.is_loopback()), "this host has no address to try: {addresses:?}");
    addresses.extend([Ipv4Addr::new(169, 254, 1, 1), Ipv4Addr::UNSPECIFIED]);
    for address in addresses {
        let to = SocketAddr::new(address.into(), listener.port());
        if !address.is_unspecified() && !address.is_link_local() {
            let here = TcpStream::connect_timeout(&to, Duration::from_secs(5));
            ensure!(here.is_ok(), "the host itself does not reach {to}");
        }
        let seen = connect(&agent, to)?;
        ensure!(is_error(&seen), "the box reached {to} as {seen}");
    }
    Ok(())
}

fn host_addresses() -> Result<Vec<Ipv4Addr>> {
    let output = std::process::Command::new("ip").args(["-j", "-4", "addr"]).output()?;
    let interfaces: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let infos = interfaces.as_array().into_iter().flatten().flat_map(|i| i["addr_info"].as_array().cloned().unwrap_or_default());
    Ok(infos.filter_map(|info| info["local"].as_str()?.parse().ok()).collect())
}

/// Runs a script of the host's root in the box's network namespace.
fn in_network_of(agent: &Agent, script: &str) -> Result<()> {
    let pid = agent.pid()?.to_string();
    let mut nsenter = std::process::Command::new("nsenter");
    let status = nsenter.args(["--net", "--target", &pid, "sh", "-c", script]).status()?;
    ensure!(status.success(), "{script}: {status}");
    Ok(())
}

fn a_box_does_not_reach_another_box() -> Result<()> {
    let server = Server::shared()?;
    let (a, b) = (server.agent("neighbour-a")?, server.agent("neighbour-b")?);
    serve(&b, "0.0.0.0", 7003, "reached")?;
    let to = SocketAddr::new(b.address()?.parse()?, 7003);
    ensure!(connect(&b, to)? == "reached", "the neighbour reaches itself");
    let seen = connect(&a, to)?;
    ensure!(is_error(&seen), "the box reached its neighbour: {seen}");
    // It may not make a route of its own, and if it could, that would not help it.
    let change = format!("ip route add {}/32 dev eth0", to.ip());
    let neighbour = format!("ip neigh add {} lladdr ee:ee:ee:ee:ee:ee dev eth0", to.ip());
    let both = format!("{change} && {neighbour}");
    if harness::engines::in_machines() {
        // Root in a machine is root.
        a.root(&both)?.succeeded()?;
    } else {
        ensure!(a.root(&change)?.code != 0, "the box changed its routes");
        in_network_of(&a, &both)?;
    }
    let seen = connect(&a, to)?;
    ensure!(is_error(&seen), "the box reached its neighbour by a route of its own: {seen}");
    Ok(())
}

fn private_ranges_are_out_of_reach() -> Result<()> {
    let outside = Outside::get()?;
    let agent = Server::shared()?.agent("private")?;
    let there = outside.listen(outside.private)?;
    ensure!(TcpStream::connect_timeout(&there, Duration::from_secs(5)).is_ok(), "the host reaches it");
    let seen = connect(&agent, there)?;
    ensure!(is_error(&seen), "the box reached {there} as {seen}");
    Ok(())
}

/// Sends from an address that is not the box's, then from its own; the second must be the first to arrive.
fn spoof(agent: &Agent, socket: &std::net::UdpSocket, address: &str) -> Result<()> {
    let to = socket.local_addr()?;
    let script = format!(
        "python3 - <<'END'\nimport socket, struct\nto = ('{}', {})\n\
         data = struct.pack('>HHHH', 4000, to[1], 15, 0) + b'spoofed'\n\
         head = struct.pack('>BBHHHBBH', 0x45, 0, 20 + len(data), 0, 0, 64, 17, 0)\n\
         packet = head + socket.inet_aton('{address}') + socket.inet_aton(to[0]) + data\n\
         raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)\n\
         for _ in range(5): raw.sendto(packet, (to[0], 0))\n\
         t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nt.sendto(b'honest', to)\nEND",
        to.ip(),
        to.port(),
    );
    agent.root(&script)?.succeeded()?;
    let mut buffer = [0; 64];
    let (length, from) = socket.recv_from(&mut buffer).context("not even the honest packet came")?;
    ensure!(&buffer[..length] == b"honest", "{from} sent {:?}", String::from_utf8_lossy(&buffer[..length]));
    Ok(())
}

fn a_packet_with_anothers_address_goes_nowhere() -> Result<()> {
    let outside = Outside::get()?;
    let server = Server::shared()?;
    let (agent, other) = (server.agent("spoofer")?, server.agent("spoofed")?);
    let socket = outside.udp(outside.public, 0)?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    spoof(&agent, &socket, "198.51.100.7")?;
    spoof(&agent, &socket, &other.address()?)?;
    spoof(&agent, &socket, &outside.host.to_string())
}

fn questions_for_hardware_addresses_leave_no_trace() -> Result<()> {
    let agent = Server::shared()?.agent("asker")?;
    let host = host_addresses()?.into_iter().find(|a| !a.is_loopback()).context("an address of the host")?;
    let script = format!(
        "import socket, struct\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))\ns.bind(('eth0', 0))\n\
         mac = s.getsockname()[4]\nfor n in range(200):\n s.send(b'\\xff' * 6 + mac + struct.pack('>HHHBBH', 0x0806, 1, 0x800, 6, 4, 1)\n  \
         + mac + bytes([198, 51, 100, n]) + bytes(6) + socket.inet_aton('{host}'))\ns.settimeout(0.5)\n\
         try:\n print(len(s.recv(100)))\nexcept socket.timeout: print('silence')"
    );
    ensure!(agent.exec_with(&["-u", "root"], &["python3", "-c", &script])?.text()? == "silence");
    let neighbours = std::fs::read_to_string("/proc/net/arp")?;
    ensure!(!neighbours.contains("198.51.100."), "{neighbours}");
    Ok(())
}

fn a_box_has_no_ipv6_way_out() -> Result<()> {
    let agent = Server::shared()?.agent("six")?;
    let routes = agent.root_text("ip -6 route show default; ip -6 addr show scope global")?;
    ensure!(routes.is_empty(), "{routes}");
    Ok(())
}

fn names_are_resolved_by_the_configured_server() -> Result<()> {
    Outside::get()?;
    let agent = Server::shared()?.agent("names")?;
    let conf = agent.root_text("grep -v '^#' /etc/resolv.conf")?;
    ensure!(conf.contains("nameserver 169.254.1.1"), "{conf}");
    let found = agent.root_text("getent ahostsv4 some-name.example | head -1")?;
    ensure!(found.starts_with("203.0.113.99"), "{found}");
    Ok(())
}

fn two_boxes_may_use_the_same_port() -> Result<()> {
    let server = Server::shared()?;
    let (a, b) = (server.agent("port-a")?, server.agent("port-b")?);
    serve(&a, "0.0.0.0", 8080, "first")?;
    serve(&b, "0.0.0.0", 8080, "second")?;
    ensure!(connect(&a, "127.0.0.1:8080".parse()?)? == "first" && connect(&b, "127.0.0.1:8080".parse()?)? == "second");
    Ok(())
}

fn the_network_comes_back_with_a_start() -> Result<()> {
    let outside = Outside::get()?;
    let agent = Server::shared()?.agent("again")?;
    let there = outside.listen(outside.public)?;
    let address = agent.address()?;
    agent.stop()?;
    agent.start()?;
    ensure!(agent.address()? == address, "the address changed");
    ensure!(connect(&agent, there)? == outside.host.to_string());
    Ok(())
}
