//! When an agent goes to sleep by itself: kept in its record, and may change while the agent lives.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Agent, Trouble};
use crate::records::{Sleep, SleepChange};

pub(super) struct Settings {
    now: Mutex<Sleep>,
    /// Held while they change, so that of two changes at once neither undoes the other.
    order: tokio::sync::Mutex<()>,
}

impl Settings {
    pub(super) fn new(sleep: Sleep) -> Self {
        Self {
            now: Mutex::new(sleep),
            order: tokio::sync::Mutex::default(),
        }
    }
}

impl Agent {
    pub fn sleep(&self) -> Sleep {
        *self.sleep.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds from now on and for good. An agent that sleeps is not woken by it.
    pub async fn set_sleep(self: &Arc<Self>, change: SleepChange) -> Result<(), Trouble> {
        if change == SleepChange::default() {
            return Ok(());
        }
        let _alone = self.sleep.order.lock().await;
        // Recorded even if nothing seems to change: an earlier change that was broken off may be in the record alone.
        let sleep = self.sleep().changed(change);
        self.ctx.store.set_sleep(&self.profile.id, &sleep).await?;
        *self.sleep.now.lock().unwrap_or_else(PoisonError::into_inner) = sleep;
        self.ctx.look_at(self);
        Ok(())
    }
}
