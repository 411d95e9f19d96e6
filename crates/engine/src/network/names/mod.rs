//! Names that boxes may reach.
//!
//! The DNS queries of a box whose policy allows names come here instead of to the host's resolver. They are passed on
//! to that; and before an answer for an allowed name goes to the box, the addresses in it are made reachable. Where
//! a policy denies everything else, other names are refused: a question is a message, too.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::gate::{self, Gate, Lease};
use super::policy::{Name, Policy};

mod message;

/// How long a resolver may take before the next is asked.
const PATIENCE: Duration = Duration::from_secs(4);
/// A TCP connection without a question for so long is closed.
const IDLE: Duration = Duration::from_secs(10);
/// Questions of one box that are under way at once.
const AT_ONCE: usize = 64;
/// Programs keep addresses for longer than a name server says, and an hour is the longest that one is trusted for.
const LEASE_SECONDS: std::ops::RangeInclusive<u64> = 300..=3600;
/// An address is leased anew once less than this is left of what a new answer gives.
const RENEW_BELOW: u64 = 240;
/// Longest message over UDP or TCP.
const MAX_MESSAGE: usize = 65_535;

#[derive(Debug)]
pub(super) struct Names {
    upstream: Vec<Ipv4Addr>,
    gate: Arc<Gate>,
    boxes: RwLock<HashMap<Ipv4Addr, Arc<Asker>>>,
}

/// A box that may reach names.
#[derive(Debug)]
struct Asker {
    interface: String,
    names: Vec<Name>,
    only_these: bool,
    at_once: Arc<Semaphore>,
    /// By address: the name that gave it, and until when.
    leases: Mutex<HashMap<Ipv4Addr, (String, Instant)>>,
}

/// The sockets that boxes' queries are sent to, before anybody answers.
#[derive(Debug)]
pub(super) struct Ears {
    udp: UdpSocket,
    tcp: TcpListener,
    pub(super) address: SocketAddrV4,
}

impl Ears {
    pub(super) async fn bind(address: Ipv4Addr) -> io::Result<Self> {
        let mut tries = 0;
        loop {
            let udp = UdpSocket::bind((address, 0)).await?;
            let port = udp.local_addr()?.port();
            match TcpListener::bind((address, port)).await {
                Ok(tcp) => {
                    return Ok(Self {
                        udp,
                        tcp,
                        address: SocketAddrV4::new(address, port),
                    });
                }
                Err(error) if tries == 16 => return Err(error),
                Err(_) => tries += 1,
            }
        }
    }
}

impl Names {
    /// Answers until the runtime ends.
    pub(super) fn serve(ears: Option<Ears>, upstream: Vec<Ipv4Addr>, gate: Arc<Gate>) -> Arc<Self> {
        let names = Arc::new(Self {
            upstream,
            gate,
            boxes: RwLock::default(),
        });
        if let Some(ears) = ears {
            tokio::spawn(names.clone().over_udp(Arc::new(ears.udp)));
            tokio::spawn(names.clone().over_tcp(ears.tcp));
        }
        names
    }

    /// Answers the box at `address` from now on as `policy` says. The addresses that its names gave and that it may
    /// still reach; `None` if nothing is known of it.
    pub(super) fn apply(&self, interface: &str, address: Ipv4Addr, policy: &Policy) -> Option<Vec<Lease>> {
        let names = policy.names();
        let mut boxes = self.boxes.write().unwrap_or_else(PoisonError::into_inner);
        let before = boxes
            .remove(&address)
            .filter(|asker| asker.interface == interface);
        let known = before.as_ref().map(|asker| asker.leases());
        if !names.is_empty() {
            let asker = Asker {
                interface: interface.to_owned(),
                only_these: policy.denies_everything_else(),
                at_once: Arc::new(Semaphore::new(AT_ONCE)),
                leases: Mutex::new(known.clone().unwrap_or_default()),
                names: names.clone(),
            };
            asker
                .leases
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|_, (name, _)| names.iter().any(|allowed| allowed.matches(name)));
            boxes.insert(address, Arc::new(asker));
        }
        let now = Instant::now();
        known.map(|known| {
            let leases = known.iter().filter_map(|(address, (name, until))| {
                let left = until.saturating_duration_since(now).as_secs();
                (left > 0).then_some((name.as_str(), (*address, left)))
            });
            gate::still_allowed(leases, &names)
        })
    }

    pub(super) fn forget(&self, interface: &str) {
        let mut boxes = self.boxes.write().unwrap_or_else(PoisonError::into_inner);
        boxes.retain(|_, asker| asker.interface != interface);
    }

    fn asker(&self, from: SocketAddr) -> Option<Arc<Asker>> {
        let SocketAddr::V4(from) = from else { return None };
        let boxes = self.boxes.read().unwrap_or_else(PoisonError::into_inner);
        boxes.get(from.ip()).cloned()
    }

    async fn over_udp(self: Arc<Self>, socket: Arc<UdpSocket>) {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            // An error belongs to an answer that could not be delivered.
            let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
                continue;
            };
            let Some(asker) = self.asker(from) else { continue };
            // Who asks more than that at once asks again.
            let Ok(permit) = asker.at_once.clone().try_acquire_owned() else {
                continue;
            };
            let (names, socket, query) = (self.clone(), socket.clone(), buffer[..length].to_vec());
            tokio::spawn(async move {
                if let Some(reply) = names.answer(&asker, &query, false).await {
                    let _ = socket.send_to(&reply, from).await;
                }
                drop(permit);
            });
        }
    }

    async fn over_tcp(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok((mut stream, from)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Some(asker) = self.asker(from) else { continue };
            let Ok(permit) = asker.at_once.clone().try_acquire_owned() else {
                continue;
            };
            let names = self.clone();
            tokio::spawn(async move {
                while let Ok(Ok(query)) = timeout(IDLE, read(&mut stream)).await {
                    let Some(reply) = names.answer(&asker, &query, true).await else {
                        break;
                    };
                    if !matches!(timeout(IDLE, write(&mut stream, &reply)).await, Ok(Ok(()))) {
                        break;
                    }
                }
                drop(permit);
            });
        }
    }

    async fn answer(&self, asker: &Arc<Asker>, query: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let question = message::question(query)?;
        let allowed = asker.names.iter().any(|name| name.matches(&question.name));
        if asker.only_these && !allowed {
            return message::refusal(query, &question);
        }
        let failed = || message::failure(query, Some(&question), message::SERVER_FAILURE);
        let Some(reply) = self.ask(query, &question, tcp).await else {
            return failed();
        };
        if allowed && let Err(error) = self.lease(asker, &question.name, &reply, &question).await {
            tracing::warn!(%error, name = question.name, "an allowed name could not be made reachable");
            return failed();
        }
        Some(reply)
    }

    async fn lease(
        &self,
        asker: &Arc<Asker>,
        name: &str,
        reply: &[u8],
        question: &message::Question,
    ) -> io::Result<()> {
        let now = Instant::now();
        let given = message::addresses(reply, question);
        let wanted: Vec<Lease> = {
            let leases = asker.leases.lock().unwrap_or_else(PoisonError::into_inner);
            let enough = |address: &Ipv4Addr, seconds: u64| {
                leases
                    .get(address)
                    .is_some_and(|(_, until)| *until > now + Duration::from_secs(seconds.min(RENEW_BELOW)))
            };
            given
                .into_iter()
                .map(|(address, ttl)| {
                    let seconds = u64::from(ttl).clamp(*LEASE_SECONDS.start(), *LEASE_SECONDS.end());
                    (address, seconds)
                })
                .filter(|(address, seconds)| !enough(address, *seconds))
                .collect()
        };
        if wanted.is_empty() {
            return Ok(());
        }
        let current = || {
            let boxes = self.boxes.read().unwrap_or_else(PoisonError::into_inner);
            boxes.values().any(|known| Arc::ptr_eq(known, asker))
        };
        self.gate.let_through(&asker.interface, &wanted, current).await?;
        let mut leases = asker.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|_, (_, until)| *until > now);
        for (address, seconds) in wanted {
            leases.insert(address, (name.to_owned(), now + Duration::from_secs(seconds)));
        }
        Ok(())
    }

    /// Passes a question on, under a number of our own: a box that chooses it must not help anybody to forge an answer.
    async fn ask(&self, query: &[u8], question: &message::Question, tcp: bool) -> Option<Vec<u8>> {
        let mut asked = query.to_vec();
        let mut number = [0; 2];
        getrandom::fill(&mut number).ok()?;
        asked[..2].copy_from_slice(&number);
        for resolver in &self.upstream {
            let to = SocketAddr::from((*resolver, 53));
            let reply = match tcp {
                true => timeout(PATIENCE, ask_over_tcp(to, &asked)).await,
                false => timeout(PATIENCE, ask_over_udp(to, &asked, question)).await,
            };
            if let Ok(Ok(mut reply)) = reply
                && reply.starts_with(&number)
                && message::answers(&reply, question)
            {
                reply[..2].copy_from_slice(&query[..2]);
                return Some(reply);
            }
        }
        None
    }
}

impl Asker {
    fn leases(&self) -> HashMap<Ipv4Addr, (String, Instant)> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn ask_over_udp(to: SocketAddr, query: &[u8], question: &message::Question) -> io::Result<Vec<u8>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    socket.connect(to).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let reply = &buffer[..length];
        if reply.starts_with(&query[..2]) && message::answers(reply, question) {
            return Ok(reply.to_vec());
        }
    }
}

async fn ask_over_tcp(to: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(to).await?;
    write(&mut stream, query).await?;
    read(&mut stream).await
}

async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut message = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}
