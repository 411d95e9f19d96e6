//! The serial port to the daemon, and the streams on it.
//!
//! Two threads read and write the port, and block: the runtime cannot wait for a port whose other side comes and goes. What
//! they carry is taken apart here. A beginning ends the conversation before it, with all its streams, and is answered by the same
//! beginning; everything after it belongs to a new one. A conversation also ends when the other side has gone, so that runs know that nobody
//! hears them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dorm_proto::streams;
use dorm_proto::vm::{self, Epoch, Escape, PORT_NAME, Piece};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, WriteHalf};
use tokio::sync::mpsc;

use super::orders::Orders;
use crate::log::log;

const CHUNK: usize = 32 * 1024;
const PORT_WITHIN: Duration = Duration::from_secs(60);
/// How often to look for a daemon while there is none: the kernel does not tell whoever blocks.
const ABSENT: Duration = Duration::from_millis(20);
/// How many looks make sure that there is none. After a sleep, the kernel may tell that one has gone when the next is there and has
/// begun already: it hears of both at the same time, and of what they say sooner.
const LOOKS: u32 = 5;

pub(super) struct Port {
    /// What came; nothing, when the other side has gone.
    received: mpsc::Receiver<Vec<u8>>,
    send: mpsc::Sender<Vec<u8>>,
}

/// Finds the port and keeps it open: there can be one holder only.
pub(super) fn open() -> io::Result<Port> {
    let path = find(PORT_NAME)?;
    let file = Arc::new(File::options().read(true).write(true).open(path)?);
    let (to_port, mut outgoing) = mpsc::channel::<Vec<u8>>(4);
    let (incoming, received) = mpsc::channel(4);
    let reader = Arc::clone(&file);
    let read = move || {
        let mut buffer = vec![0; CHUNK];
        let mut looks = 0;
        loop {
            let received = match (&*reader).read(&mut buffer) {
                Ok(0) => {
                    looks = (looks + 1).min(LOOKS + 1);
                    std::thread::sleep(ABSENT);
                    (looks == LOOKS).then(Vec::new)
                }
                Ok(n) => {
                    looks = 0;
                    Some(buffer[..n].to_vec())
                }
                Err(e) => {
                    log!("the port cannot be read: {e}");
                    std::thread::sleep(ABSENT);
                    None
                }
            };
            if received.is_some_and(|bytes| incoming.blocking_send(bytes).is_err()) {
                return;
            }
        }
    };
    let write = move || {
        while let Some(bytes) = outgoing.blocking_recv() {
            if let Err(e) = (&*file).write_all(&bytes) {
                log!("the port cannot be written: {e}");
            }
        }
    };
    std::thread::Builder::new()
        .name("port-in".into())
        .stack_size(256 * 1024)
        .spawn(read)?;
    std::thread::Builder::new()
        .name("port-out".into())
        .stack_size(256 * 1024)
        .spawn(write)?;
    Ok(Port {
        received,
        send: to_port,
    })
}

/// The port of this name, once it is there.
pub(super) fn find(wanted: &str) -> io::Result<PathBuf> {
    let until = Instant::now() + PORT_WITHIN;
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports")
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let path = PathBuf::from("/dev").join(entry.file_name());
            if name.trim() == wanted && path.exists() {
                return Ok(path);
            }
        }
        if Instant::now() > until {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("the machine has no port {wanted}"),
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A conversation, from its beginning to the next.
struct Conversation {
    epoch: Epoch,
    to_session: WriteHalf<DuplexStream>,
    tasks: [tokio::task::JoinHandle<()>; 2],
}

impl Drop for Conversation {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

pub(super) async fn serve(mut port: Port, orders: Orders) {
    let mut escape = Escape::default();
    let mut conversation: Option<Conversation> = None;
    while let Some(bytes) = port.received.recv().await {
        if bytes.is_empty() {
            conversation = None;
        }
        escape.push(&bytes);
        while let Some(piece) = escape.next_piece() {
            match (piece, &mut conversation) {
                // Said again by a daemon that has not heard the answer yet.
                (Piece::Begin(epoch), Some(now)) if now.epoch == epoch => {}
                (Piece::Begin(epoch), now) => {
                    *now = None;
                    if port.send.send(vm::beginning(epoch)).await.is_err() {
                        return;
                    }
                    *now = Some(begin(epoch, &port.send, &orders));
                }
                (Piece::Data(data), Some(now)) => {
                    // One that broke stays silent until the daemon begins another.
                    let _ = now.to_session.write_all(&data).await;
                }
                (Piece::Data(_), None) => {}
            }
        }
    }
}

fn begin(epoch: Epoch, send: &mpsc::Sender<Vec<u8>>, orders: &Orders) -> Conversation {
    let (ours, theirs) = tokio::io::duplex(2 * CHUNK);
    let (mut from_session, to_session) = tokio::io::split(ours);
    let orders = orders.clone();
    let streams = tokio::spawn(streams::serve(theirs, move |stream| {
        drop(tokio::spawn(orders.clone().follow(stream)));
    }));
    let send = send.clone();
    let outgoing = tokio::spawn(async move {
        let mut buffer = vec![0; CHUNK];
        while let Ok(n @ 1..) = from_session.read(&mut buffer).await {
            let mut escaped = Vec::with_capacity(n + 64);
            vm::escape(&buffer[..n], &mut escaped);
            if send.send(escaped).await.is_err() {
                return;
            }
        }
    });
    Conversation {
        epoch,
        to_session,
        tasks: [streams, outgoing],
    }
}
