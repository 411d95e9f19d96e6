//! TCP connections and pipes that stay out of the runtime's epoll set, by a thread for each direction and a pair of unix sockets.
//!
//! gVisor, of the versions that distributions have, tells of TCP connections and pipes that were taken out of an epoll set and closed long
//! ago, once the box has come back from a memory image. The runtime takes what comes with such news for a live object of its
//! own. Unix sockets are not affected.
//!
//! The runtime's own streams take a read that gives less than was asked for as a sign that nothing is left. Data was seen in such a
//! socket after one, so only a read that gives nothing is believed here.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::thread;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use crate::sys;

/// They hold a buffer and little else.
const STACK: usize = 128 << 10;
const BUFFER: usize = 16 << 10;

/// What the runtime can watch in place of the reading end of a pipe.
pub(crate) fn reading(pipe: OwnedFd) -> io::Result<OwnedFd> {
    if !sys::is_gvisor() {
        return Ok(pipe);
    }
    let (ours, theirs) = StdUnixStream::pair()?;
    spawn("pipe-in", move || copy(&File::from(pipe), &theirs))?;
    Ok(ours.into())
}

/// The same for the writing end.
pub(crate) fn writing(pipe: OwnedFd) -> io::Result<OwnedFd> {
    if !sys::is_gvisor() {
        return Ok(pipe);
    }
    let (ours, theirs) = StdUnixStream::pair()?;
    spawn("pipe-out", move || copy(&theirs, &File::from(pipe)))?;
    Ok(ours.into())
}

/// One end of a connection whose other end is TCP.
#[derive(Debug)]
pub(crate) struct Bridge {
    stream: UnixStream,
    /// Set when nobody wants to hear any more either.
    dropped: Arc<AtomicBool>,
}

pub(crate) fn bridge(tcp: TcpStream) -> io::Result<Bridge> {
    let _ = tcp.set_nodelay(true);
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let stream = UnixStream::from_std(ours)?;
    let dropped = Arc::new(AtomicBool::new(false));
    let gone = Arc::clone(&dropped);
    let (from_tcp, to_us) = (tcp.try_clone()?, theirs.try_clone()?);
    spawn("bridge-in", move || {
        copy(&from_tcp, &to_us);
        let _ = to_us.shutdown(Shutdown::Write);
    })?;
    spawn("bridge-out", move || {
        copy(&theirs, &tcp);
        let how = match gone.load(Ordering::Acquire) {
            true => Shutdown::Both,
            false => Shutdown::Write,
        };
        let _ = tcp.shutdown(how);
    })?;
    Ok(Bridge { stream, dropped })
}

pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = thread::Builder::new().name(name.to_owned()).stack_size(STACK);
    builder.spawn(work).map(drop)
}

/// To the end of one of both.
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(length) if to.write_all(&buffer[..length]).is_err() => return,
            Ok(_) => {}
        }
    }
}

/// After the first of these, the runtime waits for news.
fn tries_again(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // The sockets are closed after this, and the threads see that then.
        self.dropped.store(true, Ordering::Release);
    }
}

impl AsyncRead for Bridge {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let read = || sys::read(self.stream.as_fd(), buf.initialize_unfilled());
            match self.stream.try_io(Interest::READABLE, read) {
                Err(e) if tries_again(&e) => {}
                read => return Poll::Ready(read.map(|length| buf.advance(length))),
            }
        }
    }
}

impl AsyncWrite for Bridge {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            let write = || sys::write(self.stream.as_fd(), buf);
            match self.stream.try_io(Interest::WRITABLE, write) {
                Err(e) if tries_again(&e) => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[tokio::test]
    async fn data_goes_both_ways_and_each_way_ends_by_itself() {
        let (near, mut far) = pair();
        let mut bridge = bridge(near).unwrap();
        let echo = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            far.read_to_end(&mut all).unwrap();
            far.write_all(&all).unwrap();
        });
        let data: Vec<u8> = (0..1_000_000u32).map(|n| (n * 7) as u8).collect();
        bridge.write_all(&data).await.unwrap();
        bridge.shutdown().await.unwrap();
        let mut got = Vec::new();
        bridge.read_to_end(&mut got).await.unwrap();
        assert!(got == data);
        echo.await.unwrap();
    }

    #[tokio::test]
    async fn a_bridge_that_is_dropped_closes_the_connection_after_what_was_written() {
        let (near, mut far) = pair();
        let mut bridge = bridge(near).unwrap();
        bridge.write_all(b"hello").await.unwrap();
        drop(bridge);
        let read = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            far.read_to_end(&mut all).map(|_| all)
        });
        assert_eq!(read.await.unwrap().unwrap(), b"hello");
    }
}
