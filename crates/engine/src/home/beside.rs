//! Room beside a pool file, on the disk that both lie on.
//!
//! What the pool has been promised and not yet written is not to be had by others: a filesystem whose file finds no room when it
//! writes is lost to all homes until it is mounted anew. So whoever writes much beside it says before how much that will be.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::Pool;
use super::pool::Filesystem;
use crate::{EngineError, Result};

/// How many bytes are being written beside the pool file, as those said who write them.
#[derive(Debug, Default)]
pub(super) struct Announced {
    bytes: Mutex<u64>,
    fewer: Notify,
}

impl Announced {
    fn bytes(&self) -> MutexGuard<'_, u64> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room for what its holder writes, until that is written.
#[derive(Debug)]
pub(crate) struct Room {
    filesystem: Arc<Filesystem>,
    bytes: u64,
}

impl Pool {
    /// Room for so many bytes beside the pool file; `needed` is not asked where there is no such file. Waits while others write for
    /// whom it was kept.
    pub(crate) async fn room_beside(&self, needed: impl FnOnce() -> Result<u64>) -> Result<Option<Room>> {
        let filesystem = &self.filesystem;
        if filesystem.room_beside()?.is_none() {
            return Ok(None);
        }
        let (bytes, announced) = (needed()?, filesystem.announced());
        loop {
            let mut fewer = std::pin::pin!(announced.fewer.notified());
            // From here on, before the look, so that none is missed.
            fewer.as_mut().enable();
            {
                let mut of_all = announced.bytes();
                let free = filesystem.room_beside()?.unwrap_or(u64::MAX);
                match share(free, *of_all, bytes) {
                    Share::Fits => {
                        *of_all += bytes;
                        let filesystem = Arc::clone(filesystem);
                        return Ok(Some(Room { filesystem, bytes }));
                    }
                    Share::Never => {
                        return Err(EngineError::NoRoomBesidePool { needed: bytes, free });
                    }
                    Share::NotNow => {}
                }
            }
            fewer.await;
        }
    }
}

impl Room {
    /// Whether the pool still has all it was promised: its holder may have written more than was said.
    pub(crate) fn was_enough(&self) -> Result<()> {
        match self.filesystem.room_beside()? {
            Some(0) => Err(EngineError::NoRoomBesidePool {
                needed: self.bytes,
                free: 0,
            }),
            Some(_) | None => Ok(()),
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let announced = self.filesystem.announced();
        *announced.bytes() -= self.bytes;
        announced.fewer.notify_waiters();
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Share {
    Fits,
    NotNow,
    Never,
}

/// What others have announced may be written already, in part, so that they are waited for and not counted twice in a refusal.
fn share(free: u64, of_others: u64, needed: u64) -> Share {
    match free.checked_sub(needed) {
        None if of_others == 0 => Share::Never,
        Some(left) if left >= of_others => Share::Fits,
        None | Some(_) => Share::NotNow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_once_and_refused_only_where_nobody_else_has_it() {
        assert_eq!(share(10, 0, 10), Share::Fits);
        assert_eq!(share(10, 4, 6), Share::Fits);
        assert_eq!(share(10, 4, 7), Share::NotNow);
        assert_eq!(share(10, 0, 11), Share::Never);
        // Those who write may fail, and give back what they have written.
        assert_eq!(share(10, 1, 11), Share::NotNow);
    }
}
