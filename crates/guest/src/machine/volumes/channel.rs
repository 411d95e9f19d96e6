//! The way to the file server: requests go out, answers come in, in any order.
//!
//! Servers come and go, with the box's sleep or by an accident. Everything that is not answered yet is kept, and said again to the next
//! one; all of this is memory of the machine, so that it is there after a sleep. Two threads of their own carry it: the runtime may be
//! waiting for a file of a volume itself.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dorm_proto::vm::{self, Epoch, Escape, Piece};
use dorm_proto::volume::{Answer, Frames, Head, PORT_NAME, Reply, Request, frame, mark_again, parse};

use crate::log::log;

const CHUNK: usize = 64 * 1024;
/// How often to look for a server while there is none: the kernel does not tell whoever blocks.
const ABSENT: Duration = Duration::from_millis(20);

/// What a request came to, with the data of the answer.
pub(super) type Outcome = Result<(Reply, Vec<u8>), i32>;
type Done = Box<dyn FnOnce(Outcome) + Send>;

#[derive(Clone)]
pub(super) struct Channel(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to send, or all that was sent is answered.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Of the last request.
    number: u64,
    pending: BTreeMap<u64, Pending>,
    outgoing: VecDeque<Outgoing>,
    /// Which server has begun, if one has.
    epoch: Option<Epoch>,
    held: Option<Hold>,
}

/// What is asked is held back.
#[derive(Clone, Copy)]
struct Hold {
    /// A later hold has a higher one, and an earlier one, which may still wait, has nothing to say to it.
    number: u64,
    until: Instant,
}

struct Pending {
    frame: Arc<Vec<u8>>,
    done: Done,
    sent: bool,
}

enum Outgoing {
    Beginning(Epoch),
    Frame(Arc<Vec<u8>>),
}

impl State {
    /// Sends what waits, if it may be sent now.
    fn send_waiting(&mut self) {
        if self.epoch.is_none() || self.held.is_some() {
            return;
        }
        for pending in self.pending.values_mut().filter(|pending| !pending.sent) {
            pending.sent = true;
            self.outgoing
                .push_back(Outgoing::Frame(Arc::clone(&pending.frame)));
        }
    }

    fn is_quiet(&self) -> bool {
        self.pending.values().all(|pending| !pending.sent)
    }
}

impl Channel {
    /// Finds the port, and begins to listen for a server.
    pub(super) fn open() -> io::Result<Self> {
        let port = super::super::port::find(PORT_NAME)?;
        Self::over(File::options().read(true).write(true).open(port)?)
    }

    fn over(port: File) -> io::Result<Self> {
        let port = Arc::new(port);
        let channel = Self(Arc::default());
        let (reader, from) = (channel.clone(), Arc::clone(&port));
        let thread = |name: &str| {
            std::thread::Builder::new()
                .name(name.into())
                .stack_size(256 * 1024)
        };
        thread("volumes-in").spawn(move || reader.read(&from))?;
        let writer = channel.clone();
        thread("volumes-out").spawn(move || writer.write(&port))?;
        Ok(channel)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks, and has `done` called with the answer, on another thread.
    pub(super) fn ask(&self, request: &Request, data: &[u8], done: impl FnOnce(Outcome) + Send + 'static) {
        let mut state = self.state();
        state.number += 1;
        let number = state.number;
        let head = Head { number, again: false };
        let pending = Pending {
            frame: Arc::new(frame(head, request, data)),
            done: Box::new(done),
            sent: false,
        };
        state.pending.insert(number, pending);
        state.send_waiting();
        drop(state);
        self.0.changed.notify_all();
    }

    /// Holds back what is asked from now on, `at_most` so long, for a stop that may not come, and returns when the server has nothing left
    /// to do. If it still has at `until`, all goes on. False also if the hold of this number is over by then, or another has come.
    pub(super) fn hold(&self, number: u64, until: Instant, at_most: Duration) -> bool {
        let mut state = self.state();
        if state.held.is_some_and(|held| held.number > number) {
            return false;
        }
        state.held = Some(Hold {
            number,
            until: Instant::now() + at_most,
        });
        // Another hold that waits finds that it is none.
        self.0.changed.notify_all();
        while state.held.is_some_and(|held| held.number == number) {
            if state.is_quiet() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                log!("the file server of the volumes does not answer");
                self.end(Some(number));
                return false;
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    /// Ends the hold of this number, or whichever there is.
    pub(super) fn end(&self, of: Option<u64>) {
        let mut state = self.state();
        if of.is_some() && of != state.held.map(|held| held.number) {
            return;
        }
        state.held = None;
        state.send_waiting();
        drop(state);
        self.0.changed.notify_all();
    }

    fn read(&self, port: &File) {
        let mut escape = Escape::default();
        let mut frames = Frames::default();
        let mut buffer = vec![0; CHUNK];
        loop {
            match (&*port).read(&mut buffer) {
                Ok(0) => std::thread::sleep(ABSENT),
                Ok(n) => escape.push(&buffer[..n]),
                Err(e) => {
                    log!("the port to the file server cannot be read: {e}");
                    std::thread::sleep(ABSENT);
                }
            }
            while let Some(piece) = escape.next_piece() {
                match piece {
                    Piece::Begin(epoch) => {
                        if self.begin(epoch) {
                            frames = Frames::default();
                        }
                    }
                    Piece::Data(data) => {
                        if frames.push(&data).is_err() {
                            log!("the file server sends what is no answer");
                            frames = Frames::default();
                        }
                        while let Some(content) = frames.next_frame() {
                            self.answered(&content);
                        }
                    }
                }
            }
        }
    }

    /// Says everything that is not answered to the server that has just begun. Whether it has not begun before.
    fn begin(&self, epoch: Epoch) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        // Said again by a server that has not heard the answer yet.
        if state.epoch == Some(epoch) {
            return false;
        }
        state.epoch = Some(epoch);
        state.outgoing.clear();
        state.outgoing.push_back(Outgoing::Beginning(epoch));
        // Also while others are held back: it is under way, and has to come to its end.
        for pending in state.pending.values_mut().filter(|pending| pending.sent) {
            let mut frame = Vec::clone(&pending.frame);
            mark_again(&mut frame);
            pending.frame = Arc::new(frame);
            state
                .outgoing
                .push_back(Outgoing::Frame(Arc::clone(&pending.frame)));
        }
        state.send_waiting();
        self.0.changed.notify_all();
        true
    }

    fn answered(&self, content: &[u8]) {
        let Ok((head, answer, data)) = parse::<Answer>(content) else {
            return;
        };
        let pending = {
            let mut state = self.state();
            let pending = state.pending.remove(&head.number);
            if state.held.is_some() && state.is_quiet() {
                self.0.changed.notify_all();
            }
            pending
        };
        if let Some(pending) = pending {
            (pending.done)(answer.map(|reply| (reply, data.to_vec())));
        }
    }

    fn write(&self, port: &File) {
        let mut escaped = Vec::new();
        loop {
            let next = self.next();
            escaped.clear();
            match next {
                Outgoing::Beginning(epoch) => escaped.extend(vm::beginning(epoch)),
                Outgoing::Frame(frame) => vm::escape(&frame, &mut escaped),
            }
            if let Err(e) = (&*port).write_all(&escaped) {
                log!("the port to the file server cannot be written: {e}");
            }
            if escaped.capacity() > 4 * CHUNK {
                escaped = Vec::new();
            }
        }
    }

    fn next(&self) -> Outgoing {
        let mut state = self.state();
        loop {
            if state.held.is_some_and(|held| held.until <= Instant::now()) {
                state.held = None;
                state.send_waiting();
            }
            if let Some(next) = state.outgoing.pop_front() {
                return next;
            }
            state = match state.held {
                Some(held) => {
                    let left = held.until.saturating_duration_since(Instant::now());
                    let waited = self.0.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// The server's end of a port.
    struct Server {
        port: UnixStream,
        escape: Escape,
        frames: Frames,
    }

    impl Server {
        fn with_guest() -> (Self, Channel) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let guest = Channel::over(File::from(OwnedFd::from(theirs))).unwrap();
            let server = Self {
                port: ours,
                escape: Escape::default(),
                frames: Frames::default(),
            };
            (server, guest)
        }

        fn begin(&mut self, epoch: Epoch) {
            self.port.write_all(&vm::beginning(epoch)).unwrap();
            while self.piece() != Piece::Begin(epoch) {}
            self.frames = Frames::default();
        }

        fn piece(&mut self) -> Piece {
            let mut buffer = [0; 1000];
            loop {
                if let Some(piece) = self.escape.next_piece() {
                    return piece;
                }
                let n = self.port.read(&mut buffer).unwrap();
                self.escape.push(&buffer[..n]);
            }
        }

        fn next(&mut self) -> (Head, Request, Vec<u8>) {
            loop {
                if let Some(content) = self.frames.next_frame() {
                    let (head, request, data) = parse::<Request>(&content).unwrap();
                    return (head, request, data.to_vec());
                }
                if let Piece::Data(data) = self.piece() {
                    self.frames.push(&data).unwrap();
                }
            }
        }

        fn answer(&mut self, number: u64, answer: Answer, data: &[u8]) {
            let mut bytes = Vec::new();
            let head = Head { number, again: false };
            vm::escape(&frame(head, &answer, data), &mut bytes);
            self.port.write_all(&bytes).unwrap();
        }
    }

    fn ask(guest: &Channel, handle: u64) -> Receiver<Outcome> {
        let (done, outcome) = channel();
        guest.ask(&Request::Close { handle }, b"data", move |outcome| {
            done.send(outcome).unwrap();
        });
        outcome
    }

    #[test]
    fn what_one_server_did_not_answer_is_said_again_to_the_next() {
        let (mut server, guest) = Server::with_guest();
        let (first, second) = (ask(&guest, 1), ask(&guest, 2));
        server.begin([1; 8]);
        let one = server.next();
        assert_eq!(
            (one.0.again, &one.1, &one.2[..]),
            (false, &Request::Close { handle: 1 }, &b"data"[..])
        );
        assert!(!server.next().0.again);
        server.answer(one.0.number, Ok(Reply::Data), b"answer\xff");
        assert_eq!(first.recv().unwrap(), Ok((Reply::Data, b"answer\xff".to_vec())));
        // Half of an answer is none.
        server.port.write_all(&[9, 0, 0, 0, 2]).unwrap();
        server.begin([2; 8]);
        let again = server.next();
        assert!(again.0.again);
        assert_eq!(again.1, Request::Close { handle: 2 });
        server.answer(77, Ok(Reply::Done), b"to nobody");
        server.answer(again.0.number, Err(libc::ESTALE), b"");
        assert_eq!(second.recv().unwrap(), Err(libc::ESTALE));
    }

    #[test]
    fn a_beginning_that_is_said_twice_has_nothing_said_twice() {
        let (mut server, guest) = Server::with_guest();
        let outcome = ask(&guest, 1);
        server.begin([1; 8]);
        server.port.write_all(&vm::beginning([1; 8])).unwrap();
        let (head, ..) = server.next();
        let _second = ask(&guest, 2);
        assert_eq!(server.next().1, Request::Close { handle: 2 });
        server.answer(head.number, Ok(Reply::Done), b"");
        outcome.recv().unwrap().unwrap();
    }

    const LONG: Duration = Duration::from_secs(3600);

    fn soon() -> Instant {
        Instant::now() + LONG
    }

    /// A hold that has begun, and gives whether it came to its end.
    fn holding(guest: &Channel, number: u64) -> std::thread::JoinHandle<bool> {
        let holder = guest.clone();
        let holding = std::thread::spawn(move || holder.hold(number, soon(), LONG));
        while guest.state().held.is_none_or(|held| held.number != number) {
            std::thread::yield_now();
        }
        holding
    }

    #[test]
    fn what_takes_too_long_is_not_held_up_and_the_machine_does_not_stand_still() {
        let (mut server, guest) = Server::with_guest();
        let slow = ask(&guest, 1);
        server.begin([1; 8]);
        let (head, ..) = server.next();
        assert!(!guest.hold(1, Instant::now(), LONG));
        let other = ask(&guest, 2);
        let (next, request, _) = server.next();
        assert_eq!(request, Request::Close { handle: 2 });
        for number in [next.number, head.number] {
            server.answer(number, Ok(Reply::Done), b"");
        }
        slow.recv().unwrap().unwrap();
        other.recv().unwrap().unwrap();
    }

    #[test]
    fn a_hold_that_is_over_ends_no_other_one() {
        let (mut server, guest) = Server::with_guest();
        let slow = ask(&guest, 1);
        server.begin([1; 8]);
        let (head, ..) = server.next();
        let (first, second) = (holding(&guest, 1), holding(&guest, 2));
        assert!(!first.join().unwrap(), "it does not wait for what is no more");
        guest.end(Some(1));
        assert!(!guest.hold(1, soon(), LONG), "it comes too late");
        let waits = ask(&guest, 2);
        server.answer(head.number, Ok(Reply::Done), b"");
        slow.recv().unwrap().unwrap();
        assert!(second.join().unwrap());
        assert!(guest.state().held.is_some_and(|held| held.number == 2));
        guest.end(Some(2));
        let (head, ..) = server.next();
        server.answer(head.number, Ok(Reply::Done), b"");
        waits.recv().unwrap().unwrap();
    }

    #[test]
    fn a_machine_that_is_about_to_stand_still_has_nothing_under_way() {
        let (mut server, guest) = Server::with_guest();
        let before = ask(&guest, 1);
        server.begin([1; 8]);
        let (head, ..) = server.next();
        let holding = holding(&guest, 1);
        let after = ask(&guest, 2);
        // Another server hears what is under way, and nothing else.
        server.begin([2; 8]);
        let (again, request, _) = server.next();
        assert_eq!(
            (again.number, again.again, request),
            (head.number, true, Request::Close { handle: 1 })
        );
        assert!(!holding.is_finished());
        server.answer(head.number, Ok(Reply::Done), b"");
        before.recv().unwrap().unwrap();
        assert!(holding.join().unwrap());
        guest.end(None);
        let (head, request, _) = server.next();
        assert_eq!(
            (head.again, request),
            (false, Request::Close { handle: 2 }),
            "it was not sent before"
        );
        server.answer(head.number, Ok(Reply::Done), b"");
        after.recv().unwrap().unwrap();
        // A stop that does not come is not waited for.
        assert!(guest.hold(2, soon(), Duration::from_millis(10)));
        let late = ask(&guest, 3);
        let (head, ..) = server.next();
        server.answer(head.number, Ok(Reply::Done), b"");
        late.recv().unwrap().unwrap();
    }
}
