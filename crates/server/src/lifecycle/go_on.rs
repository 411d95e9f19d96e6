//! What ran when a daemon ended goes on with the next one, and what is to be always on comes back after a crash of the host.
//!
//! That an agent is due is recorded before it is put away, and holds until it runs again or somebody wants it otherwise.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use super::decide::Request;
use super::registry::AT_ONCE;
use super::{Agent, Registry, Trouble};
use crate::records::State;

/// Between two tries to bring back what could not be; doubled each time.
const AGAIN: Duration = Duration::from_secs(10);
const AT_LAST: Duration = Duration::from_secs(3600);

impl Agent {
    fn goes_on(&self) -> bool {
        self.goes_on.load(Ordering::Relaxed)
    }

    async fn set_goes_on(&self, goes_on: bool) -> Result<(), Trouble> {
        let _turn = self.ctx.whether_to_go_on.lock().await;
        self.record_goes_on(goes_on).await
    }

    /// For whoever has the turn.
    async fn record_goes_on(&self, goes_on: bool) -> Result<(), Trouble> {
        if self.goes_on() != goes_on {
            self.ctx.store.set_goes_on(&self.profile.id, goes_on).await?;
            self.goes_on.store(goes_on, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Where that cannot be recorded, it waits until somebody reaches for it.
    pub(super) async fn is_to_go_on(&self) {
        if let Err(trouble) = self.set_goes_on(true).await {
            tracing::warn!(agent = %self.profile.name, reason = %trouble.in_full(), "will not come back by itself");
        }
    }

    /// It runs. What the end of the daemon asks for holds all the same.
    pub(super) async fn has_gone_on(&self) {
        if !self.goes_on() {
            return;
        }
        let _turn = self.ctx.whether_to_go_on.lock().await;
        if self.ctx.ending.is_cancelled() {
            return;
        }
        if let Err(trouble) = self.record_goes_on(false).await {
            tracing::warn!(agent = %self.profile.name, reason = %trouble.in_full(), "will be brought back once more");
        }
    }

    /// Has `request` done, after which it does not come back by itself.
    pub(super) async fn come_to_rest_for_good(self: &Arc<Self>, request: Request) -> Result<(), Trouble> {
        // Before, so that nobody brings it back meanwhile; and after, in case that the daemon began to end meanwhile.
        self.set_goes_on(false).await?;
        self.ask(request).await?;
        match self.is_gone() {
            true => Ok(()),
            false => self.set_goes_on(false).await,
        }
    }

    /// Whether it is still due afterwards.
    async fn bring_back(self: Arc<Self>) -> bool {
        // Somebody may have had another wish meanwhile.
        if !self.goes_on() || self.is_gone() || self.ctx.ending.is_cancelled() {
            return false;
        }
        match self.ensure_running().await {
            Ok(()) => {
                self.has_gone_on().await;
                false
            }
            Err(trouble) => {
                tracing::warn!(agent = %self.profile.name, reason = %trouble.in_full(), "could not be brought back");
                true
            }
        }
    }
}

impl Registry {
    /// Brings back all that is due, without anybody reaching for it.
    pub fn go_on(&self) {
        let ending = self.ctx.ending.clone();
        self.ctx.going_on.spawn(bring_back_all(self.all(), ending));
        self.ctx.going_on.close();
    }

    /// Nothing is brought back from now on.
    pub(super) async fn go_on_no_more(&self) {
        self.ctx.ending.cancel();
        self.ctx.going_on.close();
        self.ctx.going_on.wait().await;
    }
}

async fn bring_back_all(mut due: Vec<Arc<Agent>>, ending: CancellationToken) {
    let mut pause = AGAIN;
    loop {
        due = stream::iter(due)
            .map(|agent| async move { agent.clone().bring_back().await.then_some(agent) })
            .buffer_unordered(AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await;
        if due.is_empty() {
            return;
        }
        tokio::select! {
            () = ending.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (2 * pause).min(AT_LAST);
    }
}

/// Whether an agent in this state does something, or is about to.
pub(super) fn is_up(state: State) -> bool {
    match state {
        State::Starting | State::Running | State::Freezing | State::Waking => true,
        State::Standby
        | State::Hibernating
        | State::Hibernated
        | State::Stopped
        | State::Stopping
        | State::Failed
        | State::Deleting => false,
    }
}
