//! The connections to the box of one agent, so that they can be cut before its memory is saved: a
//! memory image cannot hold one end of a connection.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dorm_engine::GuestStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A request has this long to be answered before it is cut off. A long poll has had it, and what is being answered, perhaps for
/// ever, is not waited for.
const GRACE: Duration = Duration::from_secs(1);
/// What does not let go within this time is the engine's to complain about.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Links(Arc<Inner>);

#[derive(Default)]
struct Inner {
    present: Mutex<Present>,
    open: AtomicUsize,
    closed: Notify,
    answered: Notify,
}

#[derive(Default)]
struct Present {
    /// Counts the cuts.
    epoch: u64,
    cut: CancellationToken,
    /// Streams of connections, numbered.
    held: BTreeMap<u64, Weak<Held>>,
    /// Requests that are not answered yet, numbered as they came, with when they did.
    asked: BTreeMap<u64, Instant>,
    next: u64,
}

/// One connection.
pub struct Link {
    inner: Arc<Inner>,
    number: u64,
    epoch: u64,
    cut: CancellationToken,
}

/// The stream of a connection, until that is cut. It ends then whatever its user does: who waits for a client that takes nothing
/// looks at no stream.
pub struct Held(Mutex<Option<(Box<dyn GuestStream>, Link)>>);

/// A request, until the head of its answer.
pub struct Asking {
    inner: Arc<Inner>,
    number: u64,
}

impl Link {
    /// Cancelled when the connection is cut.
    pub fn cut_token(&self) -> CancellationToken {
        self.cut.clone()
    }

    pub fn hold(self, stream: Box<dyn GuestStream>) -> Arc<Held> {
        let (inner, number, epoch) = (self.inner.clone(), self.number, self.epoch);
        let held = Arc::new(Held(Mutex::new(Some((stream, self)))));
        let was_cut = {
            let mut present = inner.present();
            present.held.insert(number, Arc::downgrade(&held));
            present.epoch != epoch
        };
        if was_cut {
            held.end();
        }
        held
    }
}

impl Held {
    /// Does something with the stream, if it is still there.
    pub fn with<T>(&self, work: impl FnOnce(&mut Box<dyn GuestStream>) -> T) -> Option<T> {
        self.stream().as_mut().map(|(stream, _)| work(stream))
    }

    fn stream(&self) -> MutexGuard<'_, Option<(Box<dyn GuestStream>, Link)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        let ended = self.stream().take();
        drop(ended);
    }
}

impl Inner {
    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Links {
    fn present(&self) -> MutexGuard<'_, Present> {
        self.0.present()
    }

    /// Connections of an earlier epoch are, or will be, closed.
    pub fn epoch(&self) -> u64 {
        self.present().epoch
    }

    pub fn open(&self) -> Link {
        let mut present = self.present();
        let number = present.next;
        present.next += 1;
        self.0.open.fetch_add(1, Ordering::AcqRel);
        Link {
            inner: self.0.clone(),
            number,
            epoch: present.epoch,
            cut: present.cut.clone(),
        }
    }

    pub fn asking(&self) -> Asking {
        let mut present = self.present();
        let number = present.next;
        present.next += 1;
        present.asked.insert(number, Instant::now());
        Asking {
            inner: self.0.clone(),
            number,
        }
    }

    /// Cancelled when the connections of this moment are cut.
    pub fn cut_token(&self) -> CancellationToken {
        self.present().cut.clone()
    }

    pub fn count(&self) -> usize {
        self.0.open.load(Ordering::Acquire)
    }

    /// Returns when all connections are closed.
    pub async fn cut(&self) {
        self.answered().await;
        let (old, held) = {
            let mut present = self.present();
            present.epoch += 1;
            (
                std::mem::take(&mut present.cut),
                std::mem::take(&mut present.held),
            )
        };
        for stream in held.into_values().filter_map(|held| held.upgrade()) {
            stream.end();
        }
        old.cancel();
        let closed = async {
            loop {
                let next = self.0.closed.notified();
                if self.count() == 0 {
                    break;
                }
                next.await;
            }
        };
        if tokio::time::timeout(PATIENCE, closed).await.is_err() {
            tracing::warn!(open = self.count(), "connections to a box did not close");
        }
    }

    /// Resolves when each request of before has been answered, or has had its time.
    pub async fn answered(&self) {
        let later = self.present().next;
        loop {
            let next = self.0.answered.notified();
            let youngest = self.present().asked.range(..later).next_back().map(|(_, at)| *at);
            let Some(until) = youngest
                .map(|at| at + GRACE)
                .filter(|until| *until > Instant::now())
            else {
                return;
            };
            let _ = tokio::time::timeout_at(until, next).await;
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.inner.present().asked.remove(&self.number);
        self.inner.answered.notify_one();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.inner.present().held.remove(&self.number);
        self.inner.open.fetch_sub(1, Ordering::AcqRel);
        self.inner.closed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_asked_is_answered_before_the_cut_unless_that_takes_too_long() {
        let links = Arc::new(Links::default());
        let cutting = |links: &Arc<Links>| {
            let links = links.clone();
            tokio::spawn(async move { links.cut().await })
        };
        let (asking, before) = (links.asking(), links.cut_token());
        let cut = cutting(&links);
        tokio::time::sleep(GRACE / 2).await;
        assert!(!before.is_cancelled());
        drop(asking);
        cut.await.unwrap();
        assert!(before.is_cancelled());

        let (_asking, before) = (links.asking(), links.cut_token());
        cutting(&links).await.unwrap();
        assert!(before.is_cancelled(), "it is not waited for any longer");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_cut_although_nobody_looks_at_it() {
        let links = Links::default();
        let (early, (ours, mut theirs)) = (links.open(), tokio::io::duplex(64));
        let (late, other) = (links.open(), tokio::io::duplex(64).0);
        let held = early.hold(Box::new(ours));
        let begun = Instant::now();
        let end = tokio::time::timeout(2 * PATIENCE, theirs.read_u8());
        let (end, ()) = tokio::join!(end, async {
            // One that is still being made is waited for.
            tokio::join!(links.cut(), async { drop(late.hold(Box::new(other))) });
        });
        let end = end.expect("it is told within the time").unwrap_err();
        assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof);
        assert_eq!((links.count(), begun.elapsed()), (0, Duration::ZERO));
        assert!(held.with(|_| ()).is_none());
        assert!(links.present().held.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_poll_holds_up_nothing() {
        let links = Links::default();
        let _polling = links.asking();
        tokio::time::sleep(2 * GRACE).await;
        let begun = Instant::now();
        links.cut().await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
