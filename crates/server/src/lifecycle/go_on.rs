//! What ran when a daemon ended goes on with the next one, and what is to be always on comes back after a crash of the host.
//!
//! That an agent is due is recorded before it is put away, and holds until it runs again or somebody wants it otherwise.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::{StreamExt as _, stream};

use super::registry::AT_ONCE;
use super::{Agent, Registry, Trouble};
use crate::records::State;

impl Agent {
    fn goes_on(&self) -> bool {
        self.goes_on.load(Ordering::Relaxed)
    }

    pub(super) async fn set_goes_on(&self, goes_on: bool) -> Result<(), Trouble> {
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

    async fn bring_back(self: Arc<Self>) {
        // Somebody may have had another wish meanwhile.
        if !self.goes_on() || self.ctx.ending.is_cancelled() {
            return;
        }
        let done = match self.ensure_running().await {
            Ok(()) => self.set_goes_on(false).await,
            Err(trouble) => Err(trouble),
        };
        if let Err(trouble) = done {
            tracing::warn!(agent = %self.profile.name, reason = %trouble.in_full(), "could not be brought back");
        }
    }
}

impl Registry {
    /// Brings back all that is due, without anybody reaching for it.
    pub fn go_on(&self) {
        let due: Vec<_> = self.all().into_iter().filter(|agent| agent.goes_on()).collect();
        self.ctx
            .going_on
            .spawn(stream::iter(due).for_each_concurrent(AT_ONCE, Agent::bring_back));
        self.ctx.going_on.close();
    }

    /// Nothing is brought back from now on.
    pub(super) async fn go_on_no_more(&self) {
        self.ctx.ending.cancel();
        self.ctx.going_on.close();
        self.ctx.going_on.wait().await;
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
