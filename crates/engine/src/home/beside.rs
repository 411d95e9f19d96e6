//! Room beside a pool file, on the disk that both lie on.
//!
//! What the pool has been promised and not yet written is not to be had by others: a filesystem whose file finds no room when it
//! writes is lost to all homes until it is mounted anew. So whoever writes much beside it says before how much that will be.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::Pool;
use super::pool::Filesystem;
use crate::{EngineError, Result};

/// How often it is looked at while somebody writes. There is no notification for it.
const LOOKS_APART: Duration = Duration::from_millis(100);

/// How long to wait for room that others have. Who waits may hold a box still.
const OTHERS_WITHIN: Duration = Duration::from_secs(30);

/// How many bytes are being written beside the pool file, as those said who write them.
#[derive(Debug, Default)]
pub(super) struct Announced {
    bytes: Mutex<u64>,
    fewer: Notify,
}

impl Announced {
    /// While it is held, nobody else takes room of the disk.
    pub(super) fn bytes(&self) -> MutexGuard<'_, u64> {
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
    /// Room beside the pool file, for nothing as yet.
    pub(crate) fn room_beside(&self) -> Room {
        let filesystem = Arc::clone(&self.filesystem);
        Room { filesystem, bytes: 0 }
    }
}

impl Room {
    /// Makes it room for so many bytes, whatever it was for; `needed` is not asked where there is no pool file. Waits a while
    /// if others write for whom it was kept.
    pub(crate) async fn keep(&mut self, needed: impl Future<Output = Result<u64>>) -> Result<()> {
        if self.filesystem.room_beside()?.is_none() {
            return Ok(());
        }
        // Who waited with room of its own might wait for somebody who waits for that.
        self.give_back();
        let bytes = needed.await?;
        let announced = self.filesystem.announced();
        let until = Instant::now() + OTHERS_WITHIN;
        loop {
            let mut fewer = std::pin::pin!(announced.fewer.notified());
            // From here on, before the look, so that none is missed.
            fewer.as_mut().enable();
            let free = {
                let mut of_all = announced.bytes();
                let free = self.filesystem.room_beside()?.unwrap_or(u64::MAX);
                match share(free, *of_all, bytes) {
                    Share::Fits => {
                        *of_all += bytes;
                        self.bytes = bytes;
                        return Ok(());
                    }
                    Share::Never => {
                        return Err(EngineError::NoRoomBesidePool { needed: bytes, free });
                    }
                    Share::NotNow => free,
                }
            };
            if timeout_at(until, fewer).await.is_err() {
                return Err(EngineError::NoRoomBesidePool { needed: bytes, free });
            }
        }
    }

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

    /// Returns once it was not enough.
    pub(crate) async fn used_up(&self) -> EngineError {
        if let Ok(None) = self.filesystem.room_beside() {
            return std::future::pending().await;
        }
        loop {
            tokio::time::sleep(LOOKS_APART).await;
            if let Err(error) = self.was_enough() {
                return error;
            }
        }
    }

    fn give_back(&mut self) {
        let announced = self.filesystem.announced();
        *announced.bytes() -= std::mem::take(&mut self.bytes);
        announced.fewer.notify_waiters();
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.give_back();
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
    use std::fs::File;

    use futures_util::FutureExt;

    use super::*;

    /// A file in the place of the pool's, if there is to be one.
    fn room_in(directory: &tempfile::TempDir, has_file: bool) -> (File, Room) {
        let path = directory.path().join("pool.img");
        let file = File::create(&path).unwrap();
        let filesystem = Filesystem::like(directory.path(), has_file.then_some(&*path));
        let filesystem = Arc::new(filesystem);
        (file, Room { filesystem, bytes: 0 })
    }

    #[tokio::test]
    async fn room_is_kept_for_what_was_said_last_and_given_back() {
        let directory = tempfile::tempdir().unwrap();
        let (_file, mut room) = room_in(&directory, true);
        let filesystem = Arc::clone(&room.filesystem);
        let announced = || *filesystem.announced().bytes();
        for bytes in [7, 4] {
            room.keep(async { Ok(bytes) }).await.unwrap();
            assert_eq!(announced(), bytes);
        }
        room.was_enough().unwrap();
        drop(room);
        assert_eq!(announced(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_ever_for_what_others_have() {
        let directory = tempfile::tempdir().unwrap();
        let (_file, mut room) = room_in(&directory, true);
        *room.filesystem.announced().bytes() = u64::MAX - 7;
        let kept = room.keep(async { Ok(7) }).await;
        assert!(matches!(
            kept,
            Err(EngineError::NoRoomBesidePool { needed: 7, .. })
        ));
        *room.filesystem.announced().bytes() = 0;
        room.keep(async { Ok(7) }).await.unwrap();
    }

    #[tokio::test]
    async fn who_writes_hears_that_the_room_is_used_up() {
        let directory = tempfile::tempdir().unwrap();
        let (file, mut room) = room_in(&directory, true);
        room.keep(async { Ok(7) }).await.unwrap();
        // The pool is promised more than there is.
        file.set_len(1 << 43).unwrap();
        let error = room.used_up().await;
        assert!(matches!(
            error,
            EngineError::NoRoomBesidePool { needed: 7, free: 0 }
        ));
    }

    #[tokio::test]
    async fn without_a_pool_file_nothing_is_asked() {
        let directory = tempfile::tempdir().unwrap();
        let (_file, mut room) = room_in(&directory, false);
        room.keep(std::future::pending()).await.unwrap();
        assert!(room.used_up().now_or_never().is_none());
    }

    #[test]
    fn the_pool_does_not_grow_into_what_is_announced() {
        let directory = tempfile::tempdir().unwrap();
        let (_file, room) = room_in(&directory, true);
        let free = || room.filesystem.space().unwrap().total;
        let before = free();
        *room.filesystem.announced().bytes() = u64::MAX;
        assert!(free() < before);
        *room.filesystem.announced().bytes() = 0;
    }

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
