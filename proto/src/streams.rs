//! Many streams over one that carries bytes both ways, none of which waits for another.
//!
//! Each stream has a window of 256 KiB, which its reader opens again as it reads: what is sent and not read yet is kept, and no more
//! than that can be on its way. So a stream that nobody reads holds up its own sender and nobody else. One side opens streams, and
//! the other is asked.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};
use yamux::{Config, Connection, DEFAULT_CREDIT, Mode};

/// One of the streams.
pub type Stream = Compat<yamux::Stream>;

/// More than anybody has open at once. Beyond it, the library ends them all.
const MOST: usize = 65_536;

/// Opens streams, for as long as they are [driven](client).
#[derive(Debug, Clone)]
pub struct Opener(mpsc::Sender<oneshot::Sender<Stream>>);

impl Opener {
    pub async fn open(&self) -> io::Result<Stream> {
        let over = || io::Error::new(io::ErrorKind::BrokenPipe, "the conversation is over");
        let (ask, answer) = oneshot::channel();
        self.0.send(ask).await.map_err(|_| over())?;
        answer.await.map_err(|_| over())
    }
}

/// The side that opens streams. The future carries what they send, and is over when `wire` is, or when the other side does
/// what it has no reason to do; then all of them are over.
pub fn client<S: AsyncRead + AsyncWrite + Unpin>(wire: S) -> (Opener, impl Future<Output = ()>) {
    let mut connection = connection(wire, Mode::Client);
    let (opener, mut wanted) = mpsc::channel::<oneshot::Sender<Stream>>(32);
    let mut next = None;
    let driven = poll_fn(move |cx| {
        loop {
            if connection.poll_next_inbound(cx).is_ready() {
                return Poll::Ready(());
            }
            if next.is_none() {
                match wanted.poll_recv(cx) {
                    Poll::Ready(Some(ask)) => next = Some(ask),
                    // Streams outlive who opened them.
                    Poll::Ready(None) | Poll::Pending => return Poll::Pending,
                }
            }
            let Poll::Ready(opened) = connection.poll_new_outbound(cx) else {
                return Poll::Pending;
            };
            match (opened, next.take()) {
                (Ok(stream), Some(ask)) => drop(ask.send(stream.compat())),
                _ => return Poll::Ready(()),
            }
        }
    });
    (Opener(opener), driven)
}

/// The side that is asked: `each` gets every stream. Returns when `wire` is over.
pub async fn serve<S: AsyncRead + AsyncWrite + Unpin>(wire: S, mut each: impl FnMut(Stream)) {
    let mut connection = connection(wire, Mode::Server);
    while let Some(Ok(stream)) = poll_fn(|cx| connection.poll_next_inbound(cx)).await {
        each(stream.compat());
    }
}

fn connection<S: AsyncRead + AsyncWrite + Unpin>(wire: S, mode: Mode) -> Connection<Compat<Checked<S>>> {
    let mut config = Config::default();
    // Just enough for the window that each begins with, so that none grows.
    config.set_max_connection_receive_window(None);
    config.set_max_num_streams(MOST);
    config.set_max_connection_receive_window(Some(MOST * DEFAULT_CREDIT as usize));
    let wire = Checked {
        wire,
        begun: false,
        left: 0,
        over: false,
    };
    Connection::new(wire.compat(), config, mode)
}

const HEADER: usize = 12;
const DATA: u8 = 0;
const PING: u8 = 2;
const FAREWELL: u8 = 3;

/// Checks what the library's session writes.
///
/// It leaves out the ping that a session begins with, and with it all that would follow: by their answers it
/// would learn how large windows may become, which they do not. Without them no side has to answer the other, so
/// that two sides that have much to say never wait for each other.
///
/// And it fails at a farewell, which is what the library answers to a side that breaks the rules. The library itself goes on after it, and
/// a side that breaks them with each frame would have a line in the log of the other for each.
#[derive(Debug)]
struct Checked<S> {
    wire: S,
    begun: bool,
    /// Bytes that are still to be written of a frame.
    left: usize,
    over: bool,
}

impl<S> Checked<S> {
    /// Bytes to be written of the frame that `bytes` begin or go on with. The library begins each frame with its whole header.
    fn frame(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left > 0 {
            return Ok(self.left);
        }
        let Some([_, kind, _, _, _, _, _, _, length @ ..]) = bytes.first_chunk::<HEADER>() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        self.over |= *kind == FAREWELL;
        let content = if *kind == DATA {
            u32::from_be_bytes(*length)
        } else {
            0
        };
        Ok(HEADER + content as usize)
    }

    fn is_good(&self) -> io::Result<()> {
        match self.over {
            true => Err(io::Error::other("the other side breaks the rules")),
            false => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Checked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Checked<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !std::mem::replace(&mut self.begun, true) && bytes.len() == HEADER && bytes[1] == PING {
            return Poll::Ready(Ok(HEADER));
        }
        let frame = self.frame(bytes)?;
        self.is_good()?;
        let written = ready!(Pin::new(&mut self.wire).poll_write(cx, bytes))?;
        self.left = frame.saturating_sub(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The library may have begun another frame in the place of the farewell.
        self.is_good()?;
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    const MUCH: usize = 1 << 20;

    /// Both sides; the second echoes streams whose first byte is an `e`, and reads nothing more of the others.
    fn pair() -> Opener {
        let (ours, theirs) = tokio::io::duplex(4096);
        let (opener, driven) = client(ours);
        tokio::spawn(driven);
        tokio::spawn(serve(theirs, |stream| drop(tokio::spawn(echo(stream)))));
        opener
    }

    async fn echo(mut stream: Stream) {
        if stream.read_u8().await.unwrap() != b'e' {
            return std::future::pending().await;
        }
        let (mut from, mut to) = tokio::io::split(stream);
        tokio::io::copy(&mut from, &mut to).await.unwrap();
        to.shutdown().await.unwrap();
    }

    async fn is_answered(opener: &Opener) {
        let mut stream = opener.open().await.unwrap();
        stream.write_all(b"eheard").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "heard");
    }

    /// Writes until no more is taken, and gives how much it was.
    async fn fill(stream: &mut Stream) -> usize {
        let mut written = 0;
        let never = std::time::Duration::from_secs(3600);
        // The clock stands, and moves when nothing else does.
        while let Ok(wrote) = tokio::time::timeout(never, stream.write(&[b'e'; 1000])).await {
            written += wrote.unwrap();
            assert!(written <= MUCH, "there is no end to what is kept of it");
        }
        written
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_nobody_reads_holds_up_no_other() {
        let opener = pair();
        let mut unread_there = opener.open().await.unwrap();
        unread_there.write_all(b"-").await.unwrap();
        assert!(fill(&mut unread_there).await > MUCH / 8);
        is_answered(&opener).await;
        let mut unread_here = opener.open().await.unwrap();
        assert!(fill(&mut unread_here).await > MUCH / 8);
        is_answered(&opener).await;
        // And goes on when somebody does.
        for _ in 0..80 {
            unread_here.read_exact(&mut [0; 4096]).await.unwrap();
        }
        assert!(fill(&mut unread_here).await > 0);
    }

    #[tokio::test]
    async fn every_byte_arrives_in_both_directions_at_once() {
        let opener = pair();
        let all = (0..4).map(|number| {
            let opener = opener.clone();
            tokio::spawn(async move {
                let stream = opener.open().await.unwrap();
                let sent: Vec<u8> = (number..=250u8).cycle().take(MUCH).collect();
                let (mut from, mut to) = tokio::io::split(stream);
                let (mut received, send) = (Vec::new(), [b"e", &sent[..]].concat());
                let sending = async {
                    to.write_all(&send).await?;
                    to.shutdown().await
                };
                let (done, read) = tokio::join!(sending, from.read_to_end(&mut received));
                done.and(read).unwrap();
                assert!(received == sent);
            })
        });
        for one in all.collect::<Vec<_>>() {
            one.await.unwrap();
        }
    }

    #[tokio::test]
    async fn nothing_is_said_before_a_stream_is_opened() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (opener, driven) = client(ours);
        tokio::spawn(driven);
        let mut stream = opener.open().await.unwrap();
        stream.write_all(b"first").await.unwrap();
        let mut said = [0; HEADER + 5];
        theirs.read_exact(&mut said).await.unwrap();
        assert_eq!(
            (said[1], &said[HEADER..]),
            (0, &b"first"[..]),
            "it is no frame with data"
        );
    }

    #[tokio::test]
    async fn content_that_looks_like_a_farewell_is_content() {
        let opener = pair();
        let mut stream = opener.open().await.unwrap();
        let farewell = [0, FAREWELL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        stream.write_all(b"e").await.unwrap();
        for _ in 0..3 {
            stream.write_all(&farewell).await.unwrap();
            stream.flush().await.unwrap();
            let mut echoed = [0; HEADER];
            stream.read_exact(&mut echoed).await.unwrap();
            assert_eq!(echoed, farewell);
        }
    }

    #[tokio::test]
    async fn streams_end_with_their_wire_and_when_they_are_driven_no_more() {
        async fn is_over(opener: Opener, mut stream: Stream) {
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            assert!(opener.open().await.is_err());
        }
        let pair = || -> (Opener, tokio::task::JoinHandle<()>, DuplexStream) {
            let (ours, theirs) = tokio::io::duplex(4096);
            let (opener, driven) = client(ours);
            (opener, tokio::spawn(driven), theirs)
        };
        let (opener, _driver, theirs) = pair();
        let stream = opener.open().await.unwrap();
        drop(theirs);
        is_over(opener, stream).await;
        let (opener, driver, _theirs) = pair();
        let stream = opener.open().await.unwrap();
        driver.abort();
        is_over(opener, stream).await;
    }

    /// Otherwise nothing would come to its end, and each of them be a line in the log.
    #[tokio::test]
    async fn a_side_that_gives_more_room_than_there_can_be_ends_it() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (opener, driven) = client(ours);
        let driver = tokio::spawn(driven);
        let mut stream = opener.open().await.unwrap();
        stream.write_all(b"open").await.unwrap();
        theirs.read_exact(&mut [0; HEADER + 4]).await.unwrap();
        let room = [0, 1, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff];
        theirs.write_all(&room).await.unwrap();
        driver.await.unwrap();
        assert!(opener.open().await.is_err());
    }

    #[tokio::test]
    async fn a_side_that_is_asked_and_asks_itself_ends_it() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (_opener, driven) = client(ours);
        let driver = tokio::spawn(driven);
        theirs
            .write_all(&[0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0])
            .await
            .unwrap();
        driver.await.unwrap();
    }
}
