//! The file server of a machine's volumes: answers what its guest asks over a serial port. See [`dorm_proto::volume`].
//!
//! ```text
//!  guest ──▶ serial port ──▶ QEMU ──▶ socket ──▶ serve ──▶ workers ──▶ Server (walk: paths; entries, data: what is done there)
//! ```
//!
//! It runs as a process of its own in a jail that holds the volumes and nothing else ([`crate::launch`]), with root's rights over files
//! of the box's own users. Who may do what is checked by the machine's kernel, as a container's is by the host's; that a request stays
//! within a volume is checked here, by letting the kernel resolve every path beneath the root and through no link. It remembers nothing
//! that a request does not say again, so it may end at any time.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dorm_proto::vm::{self, Epoch, Escape, Piece};
use dorm_proto::volume::{Answer, Frames, Head, Reply, Request, frame, parse};
use rustix::io::Errno;

mod attributes;
mod data;
mod entries;
mod owner;
#[cfg(test)]
mod tests;
mod walk;

const CHUNK: usize = 128 * 1024;
/// How long to wait for the guest before the beginning is said again.
const PATIENCE: Duration = Duration::from_millis(250);
const WORKERS: usize = 8;
/// Requests that wait for a worker.
const WAITING: usize = 16;
/// Files held open. Those that were opened first are let go when there are more, and opened again when they are asked for.
const HELD: usize = 4096;

/// A good answer with its data.
type Outcome = Result<(Reply, Vec<u8>), Errno>;

#[derive(Debug)]
pub(crate) struct Server {
    /// Of the volumes, in their order.
    roots: Vec<OwnedFd>,
    held: Mutex<Held>,
}

/// Files that the machine has open, by its own numbers.
#[derive(Debug)]
struct Held {
    files: HashMap<u64, Arc<OwnedFd>>,
    in_order: VecDeque<u64>,
    most: usize,
}

impl Held {
    fn insert(&mut self, handle: u64, file: OwnedFd) -> Arc<OwnedFd> {
        let file = Arc::new(file);
        if self.files.insert(handle, Arc::clone(&file)).is_none() {
            self.in_order.push_back(handle);
        }
        self.let_go(self.files.len().saturating_sub(self.most));
        // Those that were closed meanwhile.
        if self.in_order.len() > 4 * self.most {
            self.in_order.retain(|handle| self.files.contains_key(handle));
        }
        file
    }

    fn let_go(&mut self, mut count: usize) {
        while count > 0
            && let Some(oldest) = self.in_order.pop_front()
        {
            count -= usize::from(self.files.remove(&oldest).is_some());
        }
    }
}

impl Server {
    pub(crate) fn new(roots: Vec<OwnedFd>) -> Self {
        Self {
            roots,
            held: Mutex::new(Held {
                files: HashMap::new(),
                in_order: VecDeque::new(),
                most: HELD,
            }),
        }
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn do_it(&self, request: &Request, again: bool, data: &[u8]) -> Outcome {
        let done = |()| (Reply::Done, Vec::new());
        let found = |attributes| (Reply::Attributes(attributes), Vec::new());
        let number = |number| (Reply::Number(number), Vec::new());
        let data_is = |data| (Reply::Data, data);
        match request {
            Request::Lookup(place) => self.look_up(place).map(found),
            Request::Attributes(file) => self.attributes(file).map(found),
            Request::Change { file, change } => self.change(file, change).map(found),
            Request::ReadLink(node) => self.read_link(node).map(data_is),
            Request::Create {
                place,
                mode,
                flags,
                owner,
                handle,
            } => self
                .create(place, *mode, *flags, *owner, *handle, again)
                .map(found),
            Request::Make {
                place,
                mode,
                device,
                owner,
            } => self.make(place, *mode, *device, *owner, again).map(found),
            Request::Symlink { place, owner } => self.symlink(place, data, *owner, again).map(found),
            Request::Link { node, place } => self.link(node, place, again).map(found),
            Request::Remove { place, hide } => self.remove(place, hide.as_deref(), again).map(done),
            Request::RemoveFolder(place) => self.remove_folder(place, again).map(done),
            Request::Rename {
                from,
                to,
                inode,
                flags,
                hide,
            } => self
                .rename(from, to, *inode, *flags, hide.as_deref(), again)
                .map(done),
            Request::Open(file) => self.open(file).map(found),
            Request::Close { handle } => {
                self.held().files.remove(handle);
                Ok(done(()))
            }
            Request::Read { file, offset, size } => self.read(file, *offset, *size).map(data_is),
            Request::Write { file, offset, append } => {
                self.write(file, *offset, *append, again, data).map(number)
            }
            Request::Sync { file, data_only } => self.sync(file, *data_only).map(done),
            Request::List { file, offset } => self.list(file, *offset).map(data_is),
            Request::Space { volume } => self.space(*volume).map(|space| (Reply::Space(space), Vec::new())),
            Request::GetAttribute { file, name } => self.get_attribute(file, name).map(data_is),
            Request::SetAttribute { file, name, flags } => {
                self.set_attribute(file, name, data, *flags).map(done)
            }
            Request::ListAttributes(file) => self.list_attributes(file).map(data_is),
            Request::RemoveAttribute { file, name } => self.remove_attribute(file, name).map(done),
            Request::Allocate {
                file,
                mode,
                offset,
                length,
            } => self.allocate(file, *mode, *offset, *length).map(done),
            Request::Seek { file, offset, whence } => self.seek(file, *offset, *whence).map(number),
            Request::Forget { volume, hidden } => self.forget(*volume, hidden).map(done),
            Request::Tidy { volume, prefix } => self.tidy(*volume, prefix).map(done),
        }
    }

    /// The frame that answers the one with this content, if that can be answered.
    fn answer(&self, content: &[u8]) -> Option<Vec<u8>> {
        let (head, outcome) = match parse::<Request>(content) {
            Ok((head, request, data)) => {
                let work = || self.do_it(&request, head.again, data);
                let outcome = match catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Errno::IO)) {
                    Err(Errno::MFILE | Errno::NFILE) => {
                        self.held().let_go(HELD / 4);
                        work()
                    }
                    outcome => outcome,
                };
                (head, outcome)
            }
            // Of a newer guest.
            Err((Some(head), _)) => (head, Err(Errno::NOSYS)),
            Err((None, _)) => return None,
        };
        let head = Head { again: false, ..head };
        Some(match outcome {
            Ok((reply, data)) => frame(head, &Answer::Ok(reply), &data),
            Err(error) => frame(head, &Answer::Err(error.raw_os_error()), &[]),
        })
    }
}

/// Serves a guest until it, or QEMU, hangs up.
pub(crate) fn serve(mut channel: UnixStream, server: &Server) -> io::Result<()> {
    let mut escape = Escape::default();
    agree(&mut channel, &mut escape)?;
    let out = Mutex::new(channel.try_clone()?);
    let (to_workers, work) = sync_channel::<Vec<u8>>(WAITING);
    let work = Mutex::new(work);
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            std::thread::Builder::new()
                .stack_size(512 * 1024)
                .spawn_scoped(scope, || answer_all(server, &work, &out))?;
        }
        let mut frames = Frames::default();
        let mut buffer = vec![0; CHUNK];
        // Dropped before the workers are waited for, as that is what they wait for.
        let to_workers = to_workers;
        loop {
            while let Some(piece) = escape.next_piece() {
                // A beginning that is said twice means nothing more.
                let Piece::Data(bytes) = piece else { continue };
                frames
                    .push(&bytes)
                    .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
                while let Some(content) = frames.next_frame() {
                    to_workers.send(content).map_err(io::Error::other)?;
                }
            }
            match channel.read(&mut buffer)? {
                0 => return Ok(()),
                n => escape.push(&buffer[..n]),
            }
        }
    })
}

fn answer_all(server: &Server, work: &Mutex<Receiver<Vec<u8>>>, out: &Mutex<UnixStream>) {
    loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(content) = next else { return };
        let Some(answer) = server.answer(&content) else {
            continue;
        };
        let mut escaped = Vec::with_capacity(answer.len() + answer.len() / 128);
        vm::escape(&answer, &mut escaped);
        let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.write_all(&escaped).is_err() {
            return;
        }
    }
}

/// Says the beginning until the guest says the same. What comes before that was for another server.
fn agree(channel: &mut UnixStream, escape: &mut Escape) -> io::Result<()> {
    let mut epoch = Epoch::default();
    getrandom::fill(&mut epoch).map_err(io::Error::other)?;
    channel.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = vec![0; CHUNK];
    let mut said = None::<std::time::Instant>;
    loop {
        if said.is_none_or(|at| at.elapsed() >= PATIENCE) {
            channel.write_all(&vm::beginning(epoch))?;
            said = Some(std::time::Instant::now());
        }
        match channel.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => escape.push(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        while let Some(piece) = escape.next_piece() {
            if piece == Piece::Begin(epoch) {
                return channel.set_read_timeout(None);
            }
        }
    }
}
