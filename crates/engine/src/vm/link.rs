//! The way to the guest of a machine: streams over its serial port. See [`dorm_proto::vm`].

use std::io;
use std::time::Duration;

use dorm_proto::streams::{self, Opener, Stream};
use dorm_proto::vm::{self, Answer, Epoch, Escape, MAX_MESSAGE, Order, Piece};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::frames::Frames;
use crate::launch::tellable;

const CHUNK: usize = 32 * 1024;
/// How long to wait for the guest before the beginning is said again: what was on its way when a machine was saved is lost.
const PATIENCE: Duration = Duration::from_millis(250);

/// A conversation with a guest. Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    opener: Opener,
    tasks: [tokio::task::JoinHandle<()>; 3],
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}

impl Link {
    /// Begins a conversation over the host's end of the port. Waits for the guest, for as long as it takes.
    pub(crate) async fn begin(stream: UnixStream) -> io::Result<Self> {
        let mut epoch = Epoch::default();
        getrandom::fill(&mut epoch).map_err(io::Error::other)?;
        let (mut from_port, mut to_port) = stream.into_split();
        let mut escape = Escape::default();
        agree(&mut from_port, &mut to_port, &mut escape, epoch).await?;

        let (ours, theirs) = tokio::io::duplex(2 * CHUNK);
        let (from_session, to_session) = tokio::io::split(ours);
        let (opener, driven) = streams::client(theirs);
        let driver = tokio::spawn(driven);
        let incoming = tokio::spawn(incoming(from_port, to_session, escape));
        let outgoing = tokio::spawn(outgoing(from_session, to_port));
        Ok(Self {
            opener,
            tasks: [driver, incoming, outgoing],
        })
    }

    /// Whether it has come to its end.
    pub(crate) fn is_over(&self) -> bool {
        self.tasks.iter().any(tokio::task::JoinHandle::is_finished)
    }

    /// Ends it, with all its streams.
    pub(crate) fn end(&self) {
        for task in &self.tasks {
            task.abort();
        }
    }

    /// A stream that begins with `order`.
    pub(crate) async fn stream(&self, order: &Order) -> io::Result<Stream> {
        let mut stream = self.opener.open().await?;
        let message = serde_json::to_vec(order)?;
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend_from_slice(&message);
        stream.write_all(&bytes).await?;
        stream.flush().await?;
        Ok(stream)
    }

    /// Has `order` done, and gives what the guest answers.
    pub(crate) async fn order(&self, order: &Order) -> io::Result<Answer> {
        let mut stream = self.stream(order).await?;
        answer(&mut stream).await
    }

    /// As [`Link::order`], where the only good answer is that it is done.
    pub(crate) async fn have_done(&self, order: &Order) -> io::Result<()> {
        match self.order(order).await? {
            Answer::Done => Ok(()),
            other => Err(refused(other)),
        }
    }
}

/// What an answer says that is not the one that was hoped for.
pub(crate) fn refused(answer: Answer) -> io::Error {
    io::Error::other(match answer {
        Answer::Failed(reason) => reason,
        other => tellable(&format!("the guest answers {other:?}")),
    })
}

pub(crate) async fn answer(stream: &mut Stream) -> io::Result<Answer> {
    let length = stream.read_u32().await? as usize;
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    match serde_json::from_slice(&message) {
        Ok(Answer::Failed(reason)) => Ok(Answer::Failed(tellable(&reason))),
        Ok(answer) => Ok(answer),
        // It has words of the answer in it.
        Err(error) => Err(io::Error::other(tellable(&error.to_string()))),
    }
}

/// Says the beginning until the guest says the same. What comes before that belongs to nobody.
async fn agree(
    from_port: &mut OwnedReadHalf,
    to_port: &mut OwnedWriteHalf,
    escape: &mut Escape,
    epoch: Epoch,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        to_port.write_all(&vm::beginning(epoch)).await?;
        let again = tokio::time::sleep(PATIENCE);
        tokio::pin!(again);
        loop {
            let read = tokio::select! {
                read = from_port.read(&mut buffer) => read?,
                () = &mut again => break,
            };
            if read == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the machine has ended",
                ));
            }
            escape.push(&buffer[..read]);
            while let Some(piece) = escape.next_piece() {
                if piece == Piece::Begin(epoch) {
                    return Ok(());
                }
            }
        }
    }
}

async fn incoming(mut from_port: OwnedReadHalf, mut to_session: WriteHalf<DuplexStream>, mut escape: Escape) {
    let mut frames = Frames::default();
    let mut buffer = vec![0; CHUNK];
    'conversation: loop {
        while let Some(piece) = escape.next_piece() {
            let Piece::Data(data) = piece else { continue };
            if !frames.are_due(&data) {
                tracing::warn!("a machine's guest sends what no guest would; the conversation is over");
                break 'conversation;
            }
            if to_session.write_all(&data).await.is_err() {
                return;
            }
        }
        match from_port.read(&mut buffer).await {
            Ok(n @ 1..) => escape.push(&buffer[..n]),
            _ => break,
        }
    }
    // So that all streams come to their end.
    let _ = to_session.shutdown().await;
}

async fn outgoing(mut from_session: ReadHalf<DuplexStream>, mut to_port: OwnedWriteHalf) {
    let mut buffer = vec![0; CHUNK];
    let mut escaped = Vec::with_capacity(CHUNK + CHUNK / 64);
    while let Ok(n @ 1..) = from_session.read(&mut buffer).await {
        escaped.clear();
        vm::escape(&buffer[..n], &mut escaped);
        if to_port.write_all(&escaped).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;
    use tokio::io::{AsyncRead, AsyncWrite};
    use tokio_yamux::{Config, Session};

    /// Which guest it is: one of today, or one that a memory image of an earlier version holds.
    #[derive(Clone, Copy)]
    enum Guest {
        Now,
        Earlier,
    }

    /// A guest's end of the port: answers each beginning, and every order but those for a port with `Done`.
    async fn guest(stream: UnixStream, which: Guest) {
        let (mut from_port, to_port) = stream.into_split();
        let to_port = std::sync::Arc::new(tokio::sync::Mutex::new(to_port));
        let mut escape = Escape::default();
        let mut session: Option<WriteHalf<DuplexStream>> = None;
        let mut buffer = vec![0; 1000];
        while let Ok(n @ 1..) = from_port.read(&mut buffer).await {
            escape.push(&buffer[..n]);
            while let Some(piece) = escape.next_piece() {
                match piece {
                    Piece::Begin(epoch) => {
                        to_port
                            .lock()
                            .await
                            .write_all(&vm::beginning(epoch))
                            .await
                            .unwrap();
                        let (ours, theirs) = tokio::io::duplex(1000);
                        let (from_session, to_session) = tokio::io::split(ours);
                        session = Some(to_session);
                        tokio::spawn(send(from_session, to_port.clone()));
                        tokio::spawn(async move {
                            match which {
                                Guest::Now => {
                                    streams::serve(theirs, |stream| drop(tokio::spawn(follow(stream)))).await
                                }
                                Guest::Earlier => {
                                    let mut session = Session::new_server(theirs, Config::default());
                                    while let Some(Ok(stream)) = session.next().await {
                                        tokio::spawn(follow(stream));
                                    }
                                }
                            }
                        });
                    }
                    Piece::Data(data) => session.as_mut().unwrap().write_all(&data).await.unwrap(),
                }
            }
        }
    }

    async fn send(mut from: ReadHalf<DuplexStream>, to: std::sync::Arc<tokio::sync::Mutex<OwnedWriteHalf>>) {
        let mut buffer = vec![0; 1000];
        while let Ok(n @ 1..) = from.read(&mut buffer).await {
            let mut escaped = Vec::new();
            vm::escape(&buffer[..n], &mut escaped);
            if to.lock().await.write_all(&escaped).await.is_err() {
                return;
            }
        }
    }

    async fn follow(mut stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let length = stream.read_u32().await.unwrap();
        let mut order = vec![0; length as usize];
        stream.read_exact(&mut order).await.unwrap();
        let answer = match serde_json::from_slice(&order).unwrap() {
            Order::Port { .. } => Answer::Refused,
            Order::Guest => {
                let (mut from, mut to) = tokio::io::split(stream);
                let _ = tokio::io::copy(&mut from, &mut to).await;
                return;
            }
            // One that is never read.
            Order::Archive => return std::future::pending().await,
            _ => Answer::Done,
        };
        let answer = serde_json::to_vec(&answer).unwrap();
        stream.write_u32(answer.len() as u32).await.unwrap();
        stream.write_all(&answer).await.unwrap();
        stream.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn orders_are_answered_and_streams_carry_every_byte() {
        are_answered(Guest::Now, 1_000_000).await;
        // Within a window: one that had filled it did not always learn that there was room again.
        are_answered(Guest::Earlier, 100_000).await;
    }

    async fn are_answered(which: Guest, bytes: usize) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(guest(theirs, which));
        let link = Link::begin(ours).await.unwrap();
        link.have_done(&Order::Sync).await.unwrap();
        let refused = link.order(&Order::Port { port: 1 }).await.unwrap();
        assert_eq!(refused, Answer::Refused);
        let mut stream = link.stream(&Order::Guest).await.unwrap();
        let sent: Vec<u8> = (0..=255u8).cycle().take(bytes).collect();
        let mut received = vec![0; sent.len()];
        let (mut from, mut to) = tokio::io::split(&mut stream);
        let (wrote, read) = tokio::join!(to.write_all(&sent), from.read_exact(&mut received));
        assert!(wrote.is_ok() && read.is_ok() && received == sent);
    }

    /// Writes until no more is taken for a while.
    async fn fill(stream: &mut Stream) {
        let piece = vec![b'x'; CHUNK];
        while let Ok(wrote) = tokio::time::timeout(PATIENCE, stream.write(&piece)).await {
            wrote.unwrap();
        }
    }

    #[tokio::test]
    async fn a_stream_that_nobody_reads_does_not_hold_up_the_others() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(guest(theirs, Guest::Now));
        let link = Link::begin(ours).await.unwrap();
        let mut unread_there = link.stream(&Order::Archive).await.unwrap();
        fill(&mut unread_there).await;
        link.have_done(&Order::Sync).await.unwrap();
        let mut unread_here = link.stream(&Order::Guest).await.unwrap();
        fill(&mut unread_here).await;
        link.have_done(&Order::Sync).await.unwrap();
        assert_eq!(unread_here.read_u8().await.unwrap(), b'x');
    }

    /// Whether a conversation that has a stream open comes to its end when the guest sends `frame`.
    async fn is_ended_by(frame: &[u8]) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (opened, is_open) = tokio::sync::oneshot::channel();
        let frame = frame.to_vec();
        let machine = tokio::spawn(async move {
            let mut escape = Escape::default();
            let mut buffer = vec![0; 1000];
            let epoch = loop {
                let n = theirs.read(&mut buffer).await.unwrap();
                escape.push(&buffer[..n]);
                if let Some(Piece::Begin(epoch)) = escape.next_piece() {
                    break epoch;
                }
            };
            theirs.write_all(&vm::beginning(epoch)).await.unwrap();
            is_open.await.unwrap();
            let mut bytes = Vec::new();
            vm::escape(&frame, &mut bytes);
            theirs.write_all(&bytes).await.unwrap();
            theirs
        });
        let link = Link::begin(ours).await.unwrap();
        let _stream = link.stream(&Order::Guest).await.unwrap();
        opened.send(()).unwrap();
        let _open = machine.await.unwrap();
        while !link.is_over() {
            tokio::task::yield_now().await;
        }
        assert!(link.order(&Order::Sync).await.is_err());
    }

    #[tokio::test]
    async fn a_guest_that_pings_ends_the_conversation() {
        is_ended_by(&[0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]).await;
    }

    #[tokio::test]
    async fn a_guest_that_gives_more_room_than_there_can_be_ends_the_conversation() {
        is_ended_by(&[0, 1, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]).await;
    }

    #[tokio::test]
    async fn a_guest_that_sends_more_than_there_is_room_for_ends_the_conversation() {
        let mut frame = vec![0, 0, 0, 0, 0, 0, 0, 1];
        let much = 256 * 1024 + 1;
        frame.extend((much as u32).to_be_bytes());
        frame.resize(frame.len() + much, 0);
        is_ended_by(&frame).await;
    }

    #[tokio::test]
    async fn what_a_port_still_holds_of_another_conversation_is_passed_over() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut old = vm::beginning([7; 8]);
        vm::escape(b"the end of an answer", &mut old);
        old.push(0xff);
        theirs.write_all(&old).await.unwrap();
        tokio::spawn(guest(theirs, Guest::Now));
        let link = Link::begin(ours).await.unwrap();
        link.have_done(&Order::Stop).await.unwrap();
        assert!(!link.is_over());
    }

    #[tokio::test]
    async fn a_machine_that_ends_ends_the_conversation_and_its_streams() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = theirs.into_std().unwrap();
        let machine = theirs.try_clone().unwrap();
        tokio::spawn(guest(UnixStream::from_std(theirs).unwrap(), Guest::Now));
        let link = Link::begin(ours).await.unwrap();
        let mut stream = link.stream(&Order::Guest).await.unwrap();
        stream.write_all(b"a").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'a');
        machine.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(stream.read_u8().await.is_err());
        while !link.is_over() {
            tokio::task::yield_now().await;
        }
        assert!(link.order(&Order::Sync).await.is_err());
    }
}
