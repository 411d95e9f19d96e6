//! The output of one run, by byte offset, for any number of readers.
//!
//! The newest bytes are in memory, older ones in a [`Spill`] file. Every reader has a cursor. What a kept run
//! writes stays; of any other run, bytes that all readers have had are dropped, and a reader that does not keep up
//! holds the process back. Without readers nothing is dropped and nobody is held back.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, watch};

use super::spill::{Mark, Spill};
use crate::log::log;

/// Bytes that stay in memory when the rest is spilled.
const TAIL: usize = 64 * 1024;
/// The tail may grow to this before some of it is spilled.
const TAIL_MAX: usize = 128 * 1024;
/// A reader this far behind holds the process back.
const BEHIND_MAX: u64 = 1 << 20;
/// Writes are joined to chunks of at most this size.
const CHUNK: usize = 16 * 1024;
/// Most bytes of one event.
const PIECE: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stream {
    Stdout = 1,
    Stderr = 2,
    Pty = 3,
}

impl Stream {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Stdout, Self::Stderr, Self::Pty]
            .into_iter()
            .find(|s| *s as u8 == byte)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Chunk {
    pub(super) stream: Stream,
    pub(super) offset: u64,
    pub(super) data: Vec<u8>,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }
}

/// What a reader gets at once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) stream: Stream,
    pub(crate) offset: u64,
    pub(crate) data: Vec<u8>,
}

pub(crate) struct Output {
    keep: bool,
    path: PathBuf,
    state: Mutex<State>,
    /// Told of every change that a reader may wait for.
    changed: watch::Sender<()>,
    /// Told when a reader has caught up or gone.
    room: Notify,
    /// Held while spilling, so that chunks reach the file in order.
    spilling: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    tail: VecDeque<Chunk>,
    tail_bytes: usize,
    end: u64,
    spill: Option<Arc<Spill>>,
    cursors: HashMap<u64, u64>,
    next_reader: u64,
    /// No more will be read by anyone who is not reading yet.
    closed: bool,
    lost: bool,
}

impl State {
    fn tail_start(&self) -> u64 {
        self.tail.front().map_or(self.end, |c| c.offset)
    }

    fn start(&self) -> u64 {
        self.spill
            .as_ref()
            .map_or_else(|| self.tail_start(), |s| s.start())
    }

    fn pop_tail(&mut self, before: u64) {
        while self.tail.front().is_some_and(|c| c.end() <= before) {
            let chunk = self.tail.pop_front().expect("just seen");
            self.tail_bytes -= chunk.data.len();
        }
    }

    fn push(&mut self, stream: Stream, data: &[u8]) {
        match self.tail.back_mut() {
            Some(last) if last.stream == stream && last.data.len() + data.len() <= CHUNK => {
                last.data.extend_from_slice(data);
            }
            _ => self.tail.push_back(Chunk {
                stream,
                offset: self.end,
                data: data.to_vec(),
            }),
        }
        self.end += data.len() as u64;
        self.tail_bytes += data.len();
    }
}

impl Output {
    pub(crate) fn new(keep: bool, path: PathBuf) -> Self {
        Self {
            keep,
            path,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            room: Notify::new(),
            spilling: tokio::sync::Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Bytes written so far.
    pub(crate) fn len(&self) -> u64 {
        self.state().end
    }

    pub(crate) fn has_readers(&self) -> bool {
        !self.state().cursors.is_empty()
    }

    /// Takes what the process wrote, waiting while a reader is too far behind.
    pub(crate) async fn append(&self, stream: Stream, data: &[u8]) {
        loop {
            let room = self.room.notified();
            {
                let mut state = self.state();
                let behind = state.cursors.values().min().map_or(0, |c| state.end - c);
                if self.keep || behind < BEHIND_MAX {
                    if state.closed && !self.keep && state.cursors.is_empty() {
                        state.end += data.len() as u64;
                        return;
                    }
                    state.push(stream, data);
                    break;
                }
            }
            room.await;
        }
        self.changed.send_replace(());
        self.spill().await;
    }

    async fn spill(&self) {
        let wanted = |state: &State| state.tail_bytes > TAIL_MAX && (self.keep || state.cursors.is_empty());
        if !wanted(&self.state()) {
            return;
        }
        let _turn = self.spilling.lock().await;
        let (chunks, spill) = {
            let state = self.state();
            if !wanted(&state) {
                return;
            }
            let mut left = state.tail_bytes;
            let chunks: Vec<_> = state
                .tail
                .iter()
                .take_while(|c| {
                    left -= c.data.len();
                    left >= TAIL
                })
                .cloned()
                .collect();
            (chunks, state.spill.clone())
        };
        let Some(end) = chunks.last().map(Chunk::end) else {
            return;
        };
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || {
            let spill = spill.map_or_else(|| Spill::create(path).map(Arc::new), Ok)?;
            spill.append(&chunks).map(|()| spill)
        });
        let written = written.await.unwrap_or_else(|e| Err(std::io::Error::other(e)));
        let mut state = self.state();
        match written {
            Ok(spill) => state.spill = Some(spill),
            Err(e) => {
                if !state.lost {
                    log!("output is lost, {} cannot be written: {e}", self.path.display());
                }
                state.lost = true;
            }
        }
        state.pop_tail(end);
        self.trim(&mut state);
    }

    /// Drops what every reader has had, unless it is kept.
    fn trim(&self, state: &mut State) {
        if self.keep {
            return;
        }
        // Without a reader it waits for one to come back.
        let Some(&min) = state.cursors.values().min() else {
            return;
        };
        state.pop_tail(min);
        if state.spill.is_some() && min >= state.tail_start() {
            state.spill = None;
        }
    }

    /// No more output counts: the run has ended.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.trim(&mut state);
        drop(state);
        self.changed.send_replace(());
    }

    /// Reads from `from` on, or from now on.
    pub(crate) fn subscribe(self: &Arc<Self>, from: Option<u64>) -> Reader {
        let mut state = self.state();
        let cursor = from.map_or(state.end, |f| f.clamp(state.start(), state.end));
        let id = state.next_reader;
        state.next_reader += 1;
        state.cursors.insert(id, cursor);
        Reader {
            output: self.clone(),
            id,
            cursor,
            changed: self.changed.subscribe(),
            hint: None,
        }
    }
}

pub(crate) struct Reader {
    output: Arc<Output>,
    id: u64,
    cursor: u64,
    changed: watch::Receiver<()>,
    hint: Option<Mark>,
}

impl Reader {
    /// The next output, or `None` at the end of a run. Nothing is lost if the future is dropped.
    pub(crate) async fn next(&mut self) -> Option<Piece> {
        loop {
            self.changed.mark_unchanged();
            let spill = {
                let state = self.output.state();
                if self.cursor >= state.end {
                    if state.closed {
                        return None;
                    }
                    None
                } else if let Some(spill) = state.spill.clone().filter(|_| self.cursor < state.tail_start()) {
                    Some((spill, state.tail_start()))
                } else {
                    let piece = from_tail(&state, self.cursor);
                    drop(state);
                    self.advance(piece.offset + piece.data.len() as u64);
                    return Some(piece);
                }
            };
            match spill {
                Some((spill, tail_start)) => {
                    let (cursor, hint) = (self.cursor, self.hint);
                    let read = tokio::task::spawn_blocking(move || spill.read(cursor, hint)).await;
                    match read.unwrap_or_else(|e| Err(std::io::Error::other(e))) {
                        Ok(Some((piece, mark))) => {
                            self.hint = Some(mark);
                            self.advance(piece.offset + piece.data.len() as u64);
                            return Some(piece);
                        }
                        Ok(None) => self.advance(tail_start),
                        Err(e) => {
                            log!("kept output cannot be read: {e}");
                            self.advance(tail_start);
                        }
                    }
                }
                None => {
                    if self.changed.changed().await.is_err() {
                        return None;
                    }
                }
            }
        }
    }

    fn advance(&mut self, to: u64) {
        self.cursor = to;
        let mut state = self.output.state();
        state.cursors.insert(self.id, to);
        self.output.trim(&mut state);
        drop(state);
        self.output.room.notify_waiters();
    }
}

/// The bytes from `cursor` on that follow each other in one stream.
fn from_tail(state: &State, cursor: u64) -> Piece {
    let first = state.tail.partition_point(|c| c.end() <= cursor);
    let chunks = state.tail.range(first..);
    let mut piece: Option<Piece> = None;
    for chunk in chunks {
        match &mut piece {
            None => {
                let skip = usize::try_from(cursor.saturating_sub(chunk.offset)).expect("within a chunk");
                let data = chunk.data[skip..].to_vec();
                piece = Some(Piece {
                    stream: chunk.stream,
                    offset: chunk.offset + skip as u64,
                    data,
                });
            }
            Some(p) if p.stream == chunk.stream && p.data.len() + chunk.data.len() <= PIECE => {
                p.data.extend_from_slice(&chunk.data);
            }
            Some(_) => break,
        }
    }
    piece.expect("the cursor is before the end, and the tail reaches to it")
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.output.state();
        state.cursors.remove(&self.id);
        self.output.trim(&mut state);
        drop(state);
        self.output.room.notify_waiters();
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
