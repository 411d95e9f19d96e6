//! What the daemon asks of a machine.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dorm_proto::streams::Stream;
use dorm_proto::vm::{Answer, MAX_MESSAGE, Order};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use super::{Boot, archive, connections, identity, still, volumes};
use crate::http::Server;
use crate::log::log;
use crate::sys;

/// How long a disk may take for what was written, while processes run and again while they are held.
const SYNCED_WITHIN: Duration = Duration::from_secs(15);
/// How long all may take that is to be done before the machine stands still: less than the daemon waits.
const STILL_WITHIN: Duration = Duration::from_secs(40);
/// Listeners that are told of in each table. An answer has room for twice as many.
const MOST_LISTENERS: usize = 1000;

#[derive(Clone)]
pub(super) struct Orders {
    boots: mpsc::Sender<Boot>,
    server: Arc<OnceLock<Server>>,
}

impl Orders {
    pub(super) fn new(boots: mpsc::Sender<Boot>, server: Arc<OnceLock<Server>>) -> Self {
        Self { boots, server }
    }

    /// Does what is asked on a stream. A stream that breaks is the daemon's affair.
    pub(super) async fn follow(self, mut stream: Stream) {
        let Ok(order) = receive(&mut stream).await else {
            return;
        };
        let answer = match order {
            Order::Guest => {
                if let Some(server) = self.server.get() {
                    server.clone().connection(stream).await;
                }
                return;
            }
            Order::Port { port } => match connect(port).await {
                Ok(mut target) => {
                    if answer(&mut stream, &Answer::Done).await.is_ok() {
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut target).await;
                    }
                    return;
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Answer::Refused,
                Err(e) => Answer::Failed(e.to_string()),
            },
            Order::Boot {
                config,
                network,
                now_ms,
                entropy,
                volumes,
                pids,
            } => {
                identity::reseed(entropy.as_bytes());
                identity::set_clock(now_ms);
                identity::set_hostname(&config.hostname);
                if let Some(pids) = pids {
                    still::limit(pids);
                }
                match identity::set_network(&network).await {
                    Ok(()) => self.boot(*config, volumes).await,
                    Err(e) => Answer::Failed(format!("the network cannot be set up: {e}")),
                }
            }
            Order::Resume {
                hostname,
                network,
                now_ms,
                entropy,
                agent_id,
            } => {
                identity::reseed(entropy.as_bytes());
                identity::set_clock(now_ms);
                identity::set_hostname(&hostname);
                if let Some(agent) = agent_id {
                    volumes::belong_to(&agent);
                }
                volumes::go_on(None);
                let answer = match identity::set_network(&network).await {
                    Ok(()) => Answer::Done,
                    Err(e) => Answer::Failed(format!("the network cannot be set up: {e}")),
                };
                connections::end_to_outside().await;
                still::release();
                answer
            }
            Order::Clock { now_ms } => {
                identity::set_clock(now_ms);
                // In this order: a hold that comes in between finds that it is over.
                still::release();
                volumes::go_on(None);
                Answer::Done
            }
            Order::Sync => stand_still().await,
            Order::Stop => {
                // Also at the end; but whoever has no patience to wait for that loses less.
                // SAFETY: sync takes nothing and gives nothing.
                drop(tokio::task::spawn_blocking(|| unsafe { libc::sync() }));
                match sys::kill(1, libc::SIGTERM) {
                    Ok(()) => Answer::Done,
                    Err(e) => Answer::Failed(e.to_string()),
                }
            }
            Order::Archive => match archive::send(&mut stream).await {
                Ok(()) => Answer::Done,
                Err(e) => Answer::Failed(e.to_string()),
            },
            Order::Listening => {
                let listening = ["/proc/net/tcp", "/proc/net/tcp6"]
                    .map(|table| listeners(&std::fs::read_to_string(table).unwrap_or_default()));
                Answer::Listening(listening.into())
            }
        };
        let _ = self::answer(&mut stream, &answer).await;
        let _ = stream.shutdown().await;
    }

    async fn boot(&self, config: dorm_proto::boot::BootConfig, paths: Vec<String>) -> Answer {
        let agent = config.agent_id.clone();
        let mounted = tokio::task::spawn_blocking(move || volumes::mount_all(&agent, &paths)).await;
        if let Err(e) = mounted.unwrap_or_else(|e| Err(io::Error::other(e))) {
            return Answer::Failed(e.to_string());
        }
        let (answer, answered) = oneshot::channel();
        if self.boots.send(Boot { config, answer }).await.is_err() {
            return Answer::Failed("the guest has ended".into());
        }
        match answered.await {
            Ok(Ok(())) => Answer::Done,
            Ok(Err(reason)) => Answer::Failed(reason),
            Err(_) => Answer::Failed("the guest serves already".into()),
        }
    }
}

/// Whatever the disk does, the processes are held in time.
async fn stand_still() -> Answer {
    // Before anything that takes time: whoever lets the machine go on meanwhile means this hold, too.
    let number = still::draw();
    let until = Instant::now() + STILL_WITHIN;
    // Most of it while processes run, so that they are not held for long.
    sync().await;
    let held = still::announce(number)
        && tokio::task::spawn_blocking(move || still::hold(number))
            .await
            .unwrap_or(false);
    let on_disk = held && sync().await;
    let quiet = held
        && still::is_on(number)
        && tokio::task::spawn_blocking(move || volumes::hold(number, until))
            .await
            .unwrap_or(false);
    if !(held && still::is_on(number)) {
        volumes::go_on(Some(number));
        return Answer::Failed("the machine was told to go on meanwhile".into());
    }
    if !quiet {
        still::end(Some(number));
        return Answer::Failed("the file server of the volumes does not answer".into());
    }
    if on_disk { Answer::Done } else { Answer::Held }
}

/// Whether everything that was written is on the disk. One that takes its time, or a share whose server is gone, is not waited for.
async fn sync() -> bool {
    // SAFETY: sync takes nothing and gives nothing.
    let synced = tokio::task::spawn_blocking(|| unsafe { libc::sync() });
    tokio::time::timeout(SYNCED_WITHIN, synced).await.is_ok()
}

async fn receive(stream: &mut Stream) -> io::Result<Order> {
    let length = stream.read_u32().await? as usize;
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    serde_json::from_slice(&message).map_err(|e| {
        log!("an order cannot be understood: {e}");
        io::ErrorKind::InvalidData.into()
    })
}

async fn answer(stream: &mut Stream, answer: &Answer) -> io::Result<()> {
    let message = serde_json::to_vec(answer)?;
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_u32(length).await?;
    stream.write_all(&message).await?;
    stream.flush().await
}

/// To a port of the loopback, of IPv4 or else of IPv6.
async fn connect(port: u16) -> io::Result<TcpStream> {
    let stream = match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
            match TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await {
                // Without IPv6 there is no such address; what counts is that IPv4 refused.
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => Err(refused),
                other => other,
            }
        }
        other => other,
    }?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The head and the listeners of a table of the kernel's, which may have very many connections. What follows the state in a line is nobody's
/// concern.
fn listeners(table: &str) -> String {
    let listener = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
        (fields.get(3) == Some(&"0A")).then(|| fields.join(" "))
    };
    let head = table.lines().take(1).map(str::to_owned);
    let found = table.lines().skip(1).filter_map(listener).take(MOST_LISTENERS);
    head.chain(found).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid";

    fn line(address: &str, state: &str) -> String {
        let none = "0".repeat(address.len());
        format!(
            "   0: {address}:1F90 {none}:0000 {state} 00000000:00000000 00:00000000 00000000  1000        0 1 1 0"
        )
    }

    #[test]
    fn of_listeners_the_port_is_told_and_of_others_nothing() {
        let table = [HEAD, &line("0100007F", "0A"), &line("0100007F", "01")].join("\n");
        assert_eq!(
            listeners(&table),
            format!("{HEAD}\n0: 0100007F:1F90 00000000:0000 0A")
        );
        assert_eq!(listeners(""), "");
    }

    #[test]
    fn an_answer_has_room_for_all_listeners_that_are_told_of() {
        let tables = ["0100007F", "00000000000000000000000001000000"].map(|address| {
            let all = vec![line(address, "0A"); 2 * MOST_LISTENERS];
            listeners(&format!("{HEAD}\n{}", all.join("\n")))
        });
        let answer = serde_json::to_vec(&Answer::Listening(tables.into())).unwrap();
        assert!(answer.len() < MAX_MESSAGE / 2, "{}", answer.len());
    }
}
