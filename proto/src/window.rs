//! A stream with few bytes on their way, over one that must not have many.
//!
//! gVisor's port forwarding, of the versions that distributions have, breaks off the whole sandbox when more than 16 KiB wait
//! to be forwarded. So both sides send frames, and no more than [`WINDOW`] bytes of them before the other side has said
//! that its user took them:
//!
//! ```text
//!  'd' length data    data, at least one byte
//!  'a' count          so many bytes of frames with data were taken
//!  'e' 0              no more data comes
//! ```
//!
//! Lengths and counts are two bytes, the higher first. In the worst case, frames of one byte of data, four on the wire, each
//! answered by three, [`WINDOW`] bytes and three quarters of that wait on one side, and what is said again.
//!
//! gVisor's forwarding has another fault: it looks for data, finds none, and only then asks to be told of any, so that what came in
//! between lies there until more comes. So each side says a few times again, after it has said something, that nothing more was taken.
//!
//! The other side is not trusted: one that sends more than the window, or what makes no sense, is not listened to any more, so
//! that no more than a window of what it sends is ever kept.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};

const WINDOW: usize = 8192;
const HEADER: usize = 3;
/// Data of one frame.
const PIECE: usize = 4096 - HEADER;
/// Frames in a window, none of which is shorter than four bytes, and the end.
const FRAMES: usize = WINDOW / (HEADER + 1) + 1;

/// How long after its last frame a side speaks again: first, and, twice as long each time, at most.
const SOON: Duration = Duration::from_millis(10);
const LATE: Duration = Duration::from_secs(10);
/// How often it does so while nothing is heard: a side that is held still takes nothing, and finds all of it later.
const AGAIN: usize = 100;

const DATA: u8 = b'd';
const TAKEN: u8 = b'a';
const END: u8 = b'e';

/// The stream that goes through `wire`. In the context of a runtime.
///
/// When it is dropped, what was written to it still goes out, if the other side takes it within `farewell`, and for `None` however
/// long it takes; then the wire is closed.
pub fn through<S: AsyncRead + AsyncWrite + Send + 'static>(wire: S, farewell: Option<Duration>) -> Stream {
    let (theirs, ours) = tokio::io::duplex(2 * WINDOW);
    let (held, dropped) = oneshot::channel();
    tokio::spawn(carry(wire, ours, dropped, farewell));
    Stream {
        inner: theirs,
        _held: held,
    }
}

/// The user's end.
#[derive(Debug)]
pub struct Stream {
    inner: DuplexStream,
    /// Tells by its end that nobody reads any more, which a half-closed stream does not mean.
    _held: oneshot::Sender<()>,
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// What the parts of a stream know of each other.
struct Flow {
    /// Bytes of frames that may be sent.
    credit: Semaphore,
    /// Bytes of frames that have come, and of which the other side has not been told yet that they were taken.
    kept: AtomicUsize,
    /// The part of them that was taken.
    untold: AtomicUsize,
    /// Whether all that will ever come was taken.
    all_taken: AtomicBool,
    /// One of the two above has changed.
    taken: Notify,
    /// How often something was said again since the other side was heard.
    unheard: AtomicUsize,
    /// All that the user will ever write has been sent.
    all_sent: Notify,
}

async fn carry<S: AsyncRead + AsyncWrite>(
    wire: S,
    user: DuplexStream,
    dropped: oneshot::Receiver<()>,
    farewell: Option<Duration>,
) {
    let (from_wire, to_wire) = tokio::io::split(wire);
    let (from_user, to_user) = tokio::io::split(user);
    let flow = Flow {
        credit: Semaphore::new(WINDOW),
        kept: AtomicUsize::new(0),
        untold: AtomicUsize::new(0),
        all_taken: AtomicBool::new(false),
        taken: Notify::new(),
        unheard: AtomicUsize::new(0),
        all_sent: Notify::new(),
    };
    let (arrived, arriving) = mpsc::channel(FRAMES);
    let handing_over = hand_over(arriving, to_user, &flow);
    tokio::pin!(handing_over);
    let wire_ended = tokio::select! {
        _ = receive(from_wire, &flow, arrived) => true,
        _ = async { tokio::join!(&mut handing_over, send(to_wire, from_user, &flow)) } => false,
        () = left(dropped, &flow, farewell) => false,
    };
    // What has come is still handed over.
    if wire_ended && !flow.all_taken.load(Ordering::Acquire) {
        handing_over.await;
    }
}

/// Returns once nobody holds the user's end any more, and what was written to it has been sent or had its time.
async fn left(dropped: oneshot::Receiver<()>, flow: &Flow, farewell: Option<Duration>) {
    let _ = dropped.await;
    match farewell {
        Some(farewell) => {
            let _ = tokio::time::timeout(farewell, flow.all_sent.notified()).await;
        }
        None => flow.all_sent.notified().await,
    }
}

/// Takes frames from the wire, to its end.
async fn receive(
    mut wire: impl AsyncRead + Unpin,
    flow: &Flow,
    arrived: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut ended = false;
    loop {
        let kind = wire.read_u8().await?;
        flow.unheard.store(0, Ordering::Relaxed);
        let number = usize::from(wire.read_u16().await?);
        match kind {
            DATA if number > 0 && !ended => {
                let weight = HEADER + number;
                if flow.kept.fetch_add(weight, Ordering::AcqRel) + weight > WINDOW {
                    return Err(wrong("more than the window"));
                }
                let mut data = vec![0; number];
                wire.read_exact(&mut data).await?;
                arrived.try_send(data).map_err(|_| wrong("too many frames"))?;
            }
            TAKEN if flow.credit.available_permits() + number <= WINDOW => flow.credit.add_permits(number),
            END if !ended => {
                ended = true;
                arrived
                    .try_send(Vec::new())
                    .map_err(|_| wrong("too many frames"))?;
            }
            _ => return Err(wrong("a frame that makes no sense")),
        }
    }
}

/// Gives the user what has arrived. An empty piece is the end of it.
async fn hand_over(mut arriving: mpsc::Receiver<Vec<u8>>, mut user: impl AsyncWrite + Unpin, flow: &Flow) {
    while let Some(data) = arriving.recv().await {
        let written = match data.is_empty() {
            true => user.shutdown().await,
            false => user.write_all(&data).await,
        };
        if data.is_empty() || written.is_err() {
            break;
        }
        flow.untold.fetch_add(HEADER + data.len(), Ordering::AcqRel);
        flow.taken.notify_one();
    }
    flow.all_taken.store(true, Ordering::Release);
    flow.taken.notify_one();
}

/// Puts frames on the wire, until the user has no more to send, and what came has been taken.
async fn send(
    mut wire: impl AsyncWrite + Unpin,
    mut user: impl AsyncRead + Unpin,
    flow: &Flow,
) -> io::Result<()> {
    let mut frame = vec![0; HEADER + PIECE];
    let mut ended = false;
    let mut pause = SOON;
    loop {
        // In this order: what was taken last is told.
        let all_taken = flow.all_taken.load(Ordering::Acquire);
        let untold = flow.untold.swap(0, Ordering::AcqRel);
        if untold > 0 {
            wire.write_all(&header(TAKEN, untold)?).await?;
            flow.kept.fetch_sub(untold, Ordering::AcqRel);
            pause = SOON;
            continue;
        }
        if ended && all_taken {
            return wire.flush().await;
        }
        let data = async {
            let room = flow.credit.acquire_many((HEADER + PIECE) as u32).await;
            let room = room.map_err(io::Error::other)?;
            // Whoever gives up waiting here has lost neither data nor credit.
            let length = user.read(&mut frame[HEADER..]).await?;
            room.forget();
            flow.credit.add_permits(PIECE - length);
            io::Result::Ok(length)
        };
        tokio::select! {
            biased;
            () = flow.taken.notified() => {}
            length = data, if !ended => {
                let length = length?;
                ended = length == 0;
                let kind = if ended { END } else { DATA };
                frame[..HEADER].copy_from_slice(&header(kind, length)?);
                wire.write_all(&frame[..HEADER + length]).await?;
                pause = SOON;
                if ended {
                    wire.flush().await?;
                    flow.all_sent.notify_one();
                }
            }
            () = tokio::time::sleep(pause), if pause < LATE && flow.unheard.load(Ordering::Relaxed) < AGAIN => {
                wire.write_all(&header(TAKEN, 0)?).await?;
                flow.unheard.fetch_add(1, Ordering::Relaxed);
                pause *= 2;
            }
        }
    }
}

fn header(kind: u8, number: usize) -> io::Result<[u8; HEADER]> {
    let [high, low] = u16::try_from(number).map_err(io::Error::other)?.to_be_bytes();
    Ok([kind, high, low])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Carries bytes both ways, and remembers how many were on their way at most.
    async fn count(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> usize {
        let (mut all, mut most, mut buffer) = (0, 0, vec![0; 1 << 20]);
        loop {
            // All that a side sends before it hears of anything is here by now.
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
            match from.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(length) => {
                    (all, most) = (all + length, most.max(length));
                    if to.write_all(&buffer[..length]).await.is_err() {
                        break;
                    }
                }
            }
        }
        assert!(all > 0);
        most
    }

    #[tokio::test]
    async fn much_data_goes_both_ways_at_once_and_little_of_it_is_on_its_way() {
        let (near, near_wire) = tokio::io::duplex(1 << 20);
        let (far, far_wire) = tokio::io::duplex(1 << 20);
        let (near, far) = (through(near, None), through(far, None));
        let (from_near, to_near) = tokio::io::split(near_wire);
        let (from_far, to_far) = tokio::io::split(far_wire);
        let wires = [
            tokio::spawn(count(from_near, to_far)),
            tokio::spawn(count(from_far, to_near)),
        ];
        let data: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7) as u8).collect();
        let side = |stream: Stream, data: Vec<u8>| async move {
            let (mut from, mut to) = tokio::io::split(stream);
            let writing = async {
                // Single bytes, too.
                for byte in &data[..5000] {
                    to.write_all(&[*byte]).await.unwrap();
                }
                to.write_all(&data[5000..]).await.unwrap();
                to.shutdown().await.unwrap();
            };
            let mut got = Vec::new();
            let (_, read) = tokio::join!(writing, from.read_to_end(&mut got));
            read.unwrap();
            assert!(got == data);
        };
        tokio::join!(side(near, data.clone()), side(far, data));
        for wire in wires {
            assert!(wire.await.unwrap() <= 16384);
        }
    }

    /// Passes on what comes, but each piece only when the next is there, as gVisor does now and then.
    async fn lag(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
        let (mut waiting, mut buffer) = (Vec::new(), vec![0; 1 << 20]);
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            if to.write_all(&waiting).await.is_err() {
                return;
            }
            waiting = buffer[..length].to_vec();
        }
        let _ = to.write_all(&waiting).await;
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_stands_still_on_a_wire_that_hands_over_only_when_more_comes() {
        let (near, near_wire) = tokio::io::duplex(1 << 20);
        let (far, far_wire) = tokio::io::duplex(1 << 20);
        let (near, mut far) = (through(near, None), through(far, None));
        let (from_near, to_near) = tokio::io::split(near_wire);
        let (from_far, to_far) = tokio::io::split(far_wire);
        tokio::spawn(lag(from_near, to_far));
        tokio::spawn(lag(from_far, to_near));
        let data = vec![7; 20 * WINDOW];
        let (mut from_far_end, mut to_far_end) = tokio::io::split(near);
        let echo = tokio::spawn(async move {
            let mut got = vec![0; 20 * WINDOW];
            far.read_exact(&mut got).await.unwrap();
            far.write_all(&got).await.unwrap();
            far
        });
        // Neither side closes the wire, whose end would push everything through.
        let mut got = vec![0; data.len()];
        let answered = async {
            to_far_end.write_all(&data).await.unwrap();
            from_far_end.read_exact(&mut got).await.unwrap();
        };
        let answered = tokio::time::timeout(Duration::from_secs(3600), answered);
        answered.await.expect("it stands still");
        assert!(got == data);
        drop(echo.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_side_that_has_nothing_to_say_falls_silent() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, None);
        stream.write_all(b"hello").await.unwrap();
        tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
        let mut said = vec![0; 1 << 20];
        let length = other.read(&mut said).await.unwrap();
        let again = said[..length].strip_prefix(b"d\x00\x05hello").unwrap();
        assert!(!again.is_empty() && again.len() < 100, "{} bytes", again.len());
        assert!(again.chunks(HEADER).all(|frame| frame == b"a\x00\x00"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_side_that_is_not_heard_does_not_say_everything_again() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, None);
        for _ in 0..500 {
            stream.write_all(b"x").await.unwrap();
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        let mut said = vec![0; 1 << 20];
        let length = other.read(&mut said).await.unwrap();
        assert!(length <= 500 * (HEADER + 1) + AGAIN * HEADER, "{length} bytes");
    }

    #[tokio::test]
    async fn the_end_of_the_wire_is_the_end_of_the_stream_after_all_that_came() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, None);
        other.write_all(b"d\x00\x05hello").await.unwrap();
        drop(other);
        let mut got = String::new();
        stream.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "hello");
    }

    /// The wire is closed at the first frame that makes no sense, and what came before it is whole.
    async fn is_not_listened_to(frames: &[u8], whole: usize) {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, None);
        other.write_all(frames).await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), whole);
        drop(stream);
        let mut rest = Vec::new();
        other.read_to_end(&mut rest).await.unwrap();
    }

    #[tokio::test]
    async fn who_sends_more_than_the_window_is_not_listened_to() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, None);
        let mut frame = vec![DATA, 4, 0];
        frame.extend([7; 1024]);
        for _ in 0..32 {
            other.write_all(&frame).await.unwrap();
        }
        // Nobody reads, so not more is kept than what fits between here and the user.
        let mut answers = Vec::new();
        other.read_to_end(&mut answers).await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(got.len() <= 3 * WINDOW, "{} bytes", got.len());
    }

    #[tokio::test]
    async fn empty_frames_a_second_end_and_unknown_frames_are_refused() {
        is_not_listened_to(b"d\x00\x01xd\x00\x00d\x00\x01y", 1).await;
        is_not_listened_to(b"d\x00\x01xe\x00\x00e\x00\x00", 1).await;
        is_not_listened_to(b"d\x00\x01xe\x00\x00d\x00\x01y", 1).await;
        is_not_listened_to(b"d\x00\x02xyz\x00\x00", 2).await;
        // More than could ever be sent at a time.
        is_not_listened_to(b"a\x20\x01", 0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_dropped_sends_what_was_written_and_lets_go_of_a_silent_wire() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, Some(Duration::from_secs(60)));
        stream.write_all(b"hello").await.unwrap();
        drop(stream);
        let mut got = Vec::new();
        other.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"d\x00\x05helloe\x00\x00");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_dropped_does_not_wait_for_ever_for_what_is_not_taken() {
        let (wire, mut other) = tokio::io::duplex(1 << 20);
        let mut stream = through(wire, Some(Duration::from_millis(10)));
        stream.write_all(&[7; 2 * WINDOW]).await.unwrap();
        drop(stream);
        let mut got = Vec::new();
        other.read_to_end(&mut got).await.unwrap();
        assert!(got.len() <= WINDOW + HEADER);
    }
}
