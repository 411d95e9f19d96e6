//! The connections to the guest of one agent, so that they can be cut before its memory is saved: a
//! memory image cannot hold one end of a connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What does not let go within this time is the engine's to complain about.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Links(Arc<Inner>);

#[derive(Default)]
struct Inner {
    present: Mutex<Present>,
    open: AtomicUsize,
    closed: Notify,
}

#[derive(Default)]
struct Present {
    /// Counts the cuts.
    epoch: u64,
    cut: CancellationToken,
}

/// One connection. It is to be closed when `cut` is cancelled.
pub struct Link {
    inner: Arc<Inner>,
    pub cut: CancellationToken,
}

impl Links {
    fn present(&self) -> std::sync::MutexGuard<'_, Present> {
        self.0.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections of an earlier epoch are, or will be, closed.
    pub fn epoch(&self) -> u64 {
        self.present().epoch
    }

    pub fn open(&self) -> Link {
        let present = self.present();
        self.0.open.fetch_add(1, Ordering::AcqRel);
        Link {
            inner: self.0.clone(),
            cut: present.cut.clone(),
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
        let old = {
            let mut present = self.present();
            present.epoch += 1;
            std::mem::take(&mut present.cut)
        };
        old.cancel();
        let closed = async {
            loop {
                let next = self.0.closed.notified();
                if self.count() == 0 {
                    return;
                }
                next.await;
            }
        };
        if tokio::time::timeout(PATIENCE, closed).await.is_err() {
            tracing::warn!(open = self.count(), "connections to a guest did not close");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.inner.open.fetch_sub(1, Ordering::AcqRel);
        self.inner.closed.notify_one();
    }
}
