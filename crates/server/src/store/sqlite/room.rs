//! Deletions on a disk that is full. They make room, and have to write a little first.

use std::time::Duration;

use super::SqliteStore;

/// Between attempts to keep room again.
const PAUSE: Duration = Duration::from_secs(10);

/// Does this once more, in the room that is kept for it, if the disk is full.
macro_rules! making_room {
    ($store:ident, $work:expr) => {{
        let mut done = $work.await;
        if done.as_ref().is_err_and(StoreError::is_full) && $store.give_up_room().await {
            done = $work.await;
        }
        done
    }};
}
pub(super) use making_room;

impl SqliteStore {
    /// Returns at once. As long as there is too little room, it is tried again.
    pub(super) fn keep_room(&self) {
        let reserve = self.reserve.clone();
        tokio::spawn(async move {
            loop {
                let reserve = reserve.clone();
                let taken = tokio::task::spawn_blocking(move || reserve.take()).await;
                match taken {
                    Ok(Err(error)) if dorm_engine::is_no_space(&error) => {}
                    Ok(Err(error)) => return tracing::warn!(%error, "no room can be kept for deletions"),
                    Ok(Ok(())) | Err(_) => return,
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// False if there is none.
    pub(super) async fn give_up_room(&self) -> bool {
        let reserve = self.reserve.clone();
        let given_up = tokio::task::spawn_blocking(move || reserve.give_up()).await;
        let given_up = matches!(given_up, Ok(Ok(true)));
        if given_up {
            tracing::warn!("the disk is full; the room that is kept for deletions is used");
            let store = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(PAUSE).await;
                store.keep_room();
            });
        }
        given_up
    }
}
