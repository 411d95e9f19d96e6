//! From a thread that writes or reads, and blocks, to a task that does not, and back: chunk by chunk.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use tokio::sync::mpsc;

const CHUNK: usize = 256 * 1024;
/// Chunks on their way.
pub(crate) const IN_FLIGHT: usize = 4;

/// Sends what is written in large chunks.
pub(crate) struct ChunkWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buf: BytesMut,
}

impl ChunkWriter {
    /// With the end at which the chunks come out.
    pub(crate) fn new() -> (Self, mpsc::Receiver<io::Result<Bytes>>) {
        let (sender, from) = mpsc::channel(IN_FLIGHT);
        let buf = BytesMut::with_capacity(CHUNK);
        (Self { sender, buf }, from)
    }

    /// In the place of what was still to come.
    pub(crate) fn fail(self, error: io::Error) {
        let _ = self.sender.blocking_send(Err(error));
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.buf.extend_from_slice(data);
        if self.buf.len() >= CHUNK {
            self.flush()?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let full = std::mem::replace(&mut self.buf, BytesMut::with_capacity(CHUNK)).freeze();
        if full.is_empty() {
            return Ok(());
        }
        self.sender
            .blocking_send(Ok(full))
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

pub(crate) struct ChunkReader {
    received: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl ChunkReader {
    pub(crate) fn new(received: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        let current = Bytes::new();
        Self { received, current }
    }
}

impl Read for ChunkReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.received.blocking_recv() {
                Some(chunk) => self.current = chunk?,
                None => return Ok(0),
            }
        }
        let n = self.current.len().min(buf.len());
        self.current.copy_to_slice(&mut buf[..n]);
        Ok(n)
    }
}
