//! Where connections come in, and which of them are the daemon's.

use std::io::{self, Read};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::Pin;
use std::time::Duration;

use dorm_proto::boot::{
    CONNECT_PORT, CONNECTED, GUEST_PORT, LIST_SOCKETS, REFUSED, SECRET_LENGTH, SPEAK_HTTP,
};
use dorm_proto::window;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::bridge::{self, Bridge, bridge};
use crate::http::Server;
use crate::log::log;
use crate::sys;

/// The secret comes with the connection: whoever takes longer does not know it.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);
/// With more under way, a download needs fewer turns of the two that pass it on.
const SEND_BUFFER: i32 = 1 << 20;

pub(crate) enum Door {
    /// A socket that only peers from outside of the box may connect to.
    Socket(StdUnixListener),
    /// A socket for tests.
    Anyone(StdUnixListener),
    /// A port that every process of the box reaches, and that opens to whoever knows the secret.
    Port(TcpListener, String),
}

impl Door {
    pub(crate) fn with_secret(secret: String) -> io::Result<Self> {
        if secret.len() != SECRET_LENGTH {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the secret is none"));
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, GUEST_PORT))?;
        Ok(Self::Port(listener, secret))
    }

    /// Serves for good. In the context of a runtime.
    pub(crate) fn serve(self, server: Server) -> io::Result<Pin<Box<dyn Future<Output = ()> + Send>>> {
        Ok(match self {
            Self::Socket(listener) => {
                Box::pin(serve_socket(server, UnixListener::from_std(listener)?, false))
            }
            Self::Anyone(listener) => Box::pin(serve_socket(server, UnixListener::from_std(listener)?, true)),
            Self::Port(listener, secret) => Box::pin(serve_port(server, listener, secret)),
        })
    }
}

async fn serve_socket(server: Server, listener: UnixListener, everyone: bool) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if everyone || is_outside(&stream) => {
                sys::set_send_buffer(stream.as_fd(), SEND_BUFFER);
                drop(tokio::spawn(server.clone().connection(stream)));
            }
            Ok((stream, _)) => drop(stream),
            Err(e) => {
                log!("accept: {e}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Accepts what knows the secret, on threads, and hands it to whoever listens.
fn accept(listener: &TcpListener, secret: &str, known: &mpsc::Sender<TcpStream>) {
    loop {
        let accepted = listener.accept().and_then(|(stream, _)| {
            let (secret, known) = (secret.to_owned(), known.clone());
            bridge::spawn("door", move || {
                if knows(&stream, &secret) {
                    let _ = known.blocking_send(stream);
                }
            })
        });
        if let Err(e) = accepted {
            log!("accept: {e}");
            std::thread::sleep(PAUSE);
        }
    }
}

fn knows(mut stream: &TcpStream, secret: &str) -> bool {
    let mut said = [0u8; SECRET_LENGTH];
    stream.set_read_timeout(Some(PATIENCE)).is_ok()
        && stream.read_exact(&mut said).is_ok()
        && equal(&said, secret.as_bytes())
        && stream.set_read_timeout(None).is_ok()
}

async fn serve_port(server: Server, listener: TcpListener, secret: String) {
    let (known, mut arriving) = mpsc::channel(1);
    if let Err(e) = bridge::spawn("accept", move || accept(&listener, &secret, &known)) {
        log!("the port is not served: {e}");
        return;
    }
    while let Some(stream) = arriving.recv().await {
        match bridge(stream) {
            Ok(stream) => drop(tokio::spawn(answer(server.clone(), stream))),
            Err(e) => log!("a connection is not served: {e}"),
        }
    }
}

async fn answer(server: Server, stream: Bridge) {
    let mut stream = window::through(stream, None);
    match stream.read_u8().await {
        Ok(SPEAK_HTTP) => server.connection(stream).await,
        Ok(CONNECT_PORT) => {
            let _ = connect(stream).await;
        }
        Ok(LIST_SOCKETS) => {
            let _ = stream.write_all(&sockets()).await;
        }
        _ => {}
    }
}

async fn connect(mut stream: window::Stream) -> io::Result<()> {
    let port = stream.read_u16().await?;
    let connect = move || match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port))
        }
        other => other,
    };
    let connected = tokio::task::spawn_blocking(connect).await;
    match connected
        .unwrap_or_else(|e| Err(io::Error::other(e)))
        .and_then(bridge)
    {
        Ok(mut server) => {
            stream.write_u8(CONNECTED).await?;
            tokio::io::copy_bidirectional(&mut stream, &mut server)
                .await
                .map(drop)
        }
        Err(_) => stream.write_u8(REFUSED).await,
    }
}

/// In a time that does not tell where they differ.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |sum, (l, r)| sum | (l ^ r)) == 0
}

fn sockets() -> Vec<u8> {
    let table = |path| std::fs::read(path).unwrap_or_default();
    [table("/proc/net/tcp"), table("/proc/net/tcp6")].concat()
}

/// A peer that the box's pid namespace does not know is seen with pid 0.
fn is_outside(stream: &UnixStream) -> bool {
    match stream.peer_cred() {
        Ok(peer) => peer.pid() == Some(0),
        Err(e) => {
            log!("a peer without credentials: {e}");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::equal;

    #[test]
    fn only_the_whole_secret_is_the_secret() {
        assert!(equal(b"secret", b"secret"));
        for wrong in [&b"secreT"[..], b"Secret", b"secre", b"secrets", b""] {
            assert!(!equal(wrong, b"secret"));
        }
    }
}
