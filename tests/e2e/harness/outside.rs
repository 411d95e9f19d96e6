//! A machine on the internet, as far as boxes can tell: a network namespace behind an interface of the host, with an address
//! kept for documentation, a private one, and servers that the tests choose.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, Result};

use super::world::{World, command};

pub(crate) struct Outside {
    namespace: String,
    /// The host's address on the way there: what NAT makes of a box's.
    pub(crate) host: Ipv4Addr,
    /// A public address, as addresses kept for documentation are taken to be.
    pub(crate) public: Ipv4Addr,
    pub(crate) private: Ipv4Addr,
    /// A second public address of the same machine.
    pub(crate) other: Ipv4Addr,
}

static OUTSIDE: OnceLock<Result<Outside, String>> = OnceLock::new();

/// Eight addresses out of 203.0.113.0/24 for each run.
fn address(last: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(203, 0, 113, 0).to_bits() + World::get().slot * 8 + last)
}

/// Where the tests' servers send the DNS queries of boxes.
pub(crate) fn resolver_address() -> Ipv4Addr {
    address(2)
}

fn names(pid: &str) -> (String, String) {
    (format!("dorm-e2e-{pid}"), format!("e2e{pid}"))
}

impl Outside {
    pub(crate) fn get() -> Result<&'static Outside> {
        let made = OUTSIDE.get_or_init(|| Self::make().map_err(|e| format!("{e:#}")));
        made.as_ref()
            .map_err(|e| anyhow::anyhow!("the outside cannot be made: {e}"))
    }

    fn make() -> Result<Self> {
        World::get().goes_on()?;
        let (namespace, interface) = names(&std::process::id().to_string());
        let private = Ipv4Addr::new(10, 99, World::get().slot as u8, 2);
        let outside = Self {
            namespace,
            host: address(1),
            public: address(2),
            private,
            other: address(3),
        };
        let ip = |args: &str| command("ip", &args.split(' ').collect::<Vec<_>>());
        let (ns, host, public) = (&outside.namespace, outside.host, outside.public);
        ip(&format!("netns add {ns}"))?;
        ip(&format!(
            "link add {interface} type veth peer name eth0 netns {ns}"
        ))?;
        ip(&format!("addr add {host}/29 dev {interface}"))?;
        ip(&format!("link set {interface} up"))?;
        ip(&format!("route add {private}/32 dev {interface}"))?;
        ip(&format!("-n {ns} addr add {public}/29 dev eth0"))?;
        ip(&format!("-n {ns} addr add {private}/32 dev eth0"))?;
        ip(&format!("-n {ns} addr add {}/29 dev eth0", outside.other))?;
        ip(&format!("-n {ns} link set lo up"))?;
        ip(&format!("-n {ns} link set eth0 up"))?;
        ip(&format!("-n {ns} route add default via {host}"))?;
        outside.resolve_names()?;
        Ok(outside)
    }

    /// Does something on a thread that is out there. Sockets made by it stay there.
    pub(crate) fn there<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let namespace = std::fs::File::open(Path::new("/run/netns").join(&self.namespace))?;
        let thread = std::thread::spawn(move || {
            use std::os::fd::AsFd;
            rustix::thread::move_into_link_name_space(namespace.as_fd(), None)?;
            act()
        });
        thread.join().expect("the test's own code does not panic")
    }

    pub(crate) fn listen(&self, address: Ipv4Addr) -> Result<SocketAddr> {
        let listener = self.there(move || Ok(TcpListener::bind((address, 0))?))?;
        answers_peer_address(listener)
    }

    pub(crate) fn udp(&self, address: Ipv4Addr, port: u16) -> Result<UdpSocket> {
        self.there(move || UdpSocket::bind((address, port)).context("cannot bind out there"))
    }
}

impl Outside {
    /// Resolves names for boxes, for as long as the runner lives.
    fn resolve_names(&self) -> Result<()> {
        let socket = self.udp(resolver_address(), 53)?;
        let (public, other, private) = (self.public, self.other, self.private);
        resolve(socket, move |name| match name {
            "some-name.example" => Some(Record::Address(Ipv4Addr::new(203, 0, 113, 99))),
            "private.example" => Some(Record::Address(private)),
            "other.example" => Some(Record::Address(other)),
            name if name.ends_with("here.example") => Some(Record::Address(public)),
            _ => None,
        });
        Ok(())
    }

    /// Sends something now and then to whoever is connected.
    pub(crate) fn ticks(&self, address: Ipv4Addr) -> Result<SocketAddr> {
        let listener = self.there(move || Ok(TcpListener::bind((address, 0))?))?;
        let at = listener.local_addr()?;
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    while stream.write_all(b"tick\n").is_ok() {
                        std::thread::sleep(std::time::Duration::from_millis(50));
                    }
                });
            }
        });
        Ok(at)
    }
}

/// What a name has, for those who ask for this kind.
pub(crate) enum Record {
    Address(Ipv4Addr),
    Texts(Vec<String>),
}

/// Answers DNS queries, for as long as the runner lives.
pub(crate) fn resolve(socket: UdpSocket, record_of: impl Fn(&str) -> Option<Record> + Send + 'static) {
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let query = &buffer[..length];
            let given = record_of(&name_in(query));
            // Who has ended does not wait for its answer.
            let _ = socket.send_to(&answer(query, given), from);
        }
    });
}

/// The name that a DNS query asks for.
fn name_in(query: &[u8]) -> String {
    let (mut labels, mut rest) = (Vec::new(), query.get(12..).unwrap_or_default());
    while let Some((length @ 1.., after)) = rest.split_first()
        && let Some((label, next)) = after.split_at_checked(usize::from(*length))
    {
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        rest = next;
    }
    labels.join(".")
}

/// The answer to a DNS query: what there is of the kind that was asked for, and no such name without a record.
fn answer(query: &[u8], record: Option<Record>) -> Vec<u8> {
    let name = query[12..].iter().position(|b| *b == 0).unwrap_or(0) + 13;
    let question = &query[12..name + 4];
    let code = if record.is_some() { 0x80 } else { 0x83 };
    let (kind, values): (u8, Vec<Vec<u8>>) = match record {
        None => (0, Vec::new()),
        Some(Record::Address(address)) => (1, vec![address.octets().to_vec()]),
        Some(Record::Texts(texts)) => {
            let text = |text: String| [&[text.len() as u8], text.as_bytes()].concat();
            (16, texts.into_iter().map(text).collect())
        }
    };
    let given: Vec<_> = match question.ends_with(&[0, kind, 0, 1]) {
        true => values,
        false => Vec::new(),
    };
    let count = given.len() as u8;
    let mut reply = [&query[..2], &[0x81, code, 0, 1, 0, count, 0, 0, 0, 0], question].concat();
    for value in given {
        reply.extend([0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 60, 0, value.len() as u8]);
        reply.extend(value);
    }
    reply
}

/// Answers every connection with the address it came from, for as long as the runner lives.
pub(crate) fn answers_peer_address(listener: TcpListener) -> Result<SocketAddr> {
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let peer =
                |mut stream: TcpStream| stream.write_all(stream.peer_addr()?.ip().to_string().as_bytes());
            // A client that has gone has nothing to complain of.
            let _ = peer(stream);
        }
    });
    Ok(address)
}

/// Removes the namespace and, with it, the interfaces of the run with this work directory.
pub(super) fn destroy(root: &Path) {
    let name = root.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(pid) = name.strip_prefix("dorm-e2e-") else {
        return;
    };
    let (namespace, interface) = names(pid);
    if Path::new("/run/netns").join(&namespace).exists() {
        let _ = command("ip", &["link", "delete", &interface]);
        let _ = command("ip", &["netns", "delete", &namespace]);
    }
}
