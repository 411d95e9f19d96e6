//! Holds: someone wants an agent to stay as it is, for a time and a reason.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use dorm_engine::Id;
use tokio::time::Instant;

use super::{Agent, Trouble};
use crate::records::{HoldRecord, now};

impl Agent {
    /// It does not go to sleep by itself for this long.
    pub async fn hold(self: &Arc<Self>, time: Duration, reason: &str) -> Result<HoldRecord, Trouble> {
        let made = now();
        let hold = HoldRecord {
            id: Id::random(),
            agent: self.profile.id.clone(),
            reason: reason.to_owned(),
            made,
            until: made.saturating_add(i64::try_from(time.as_millis()).unwrap_or(i64::MAX)),
        };
        self.ctx.store.insert_hold(&hold).await?;
        self.holds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(hold.clone());
        self.ctx.look_at(self);
        Ok(hold)
    }

    /// Ends one hold, or all of them; gives how many.
    pub async fn release(self: &Arc<Self>, which: Option<&Id>) -> Result<usize, Trouble> {
        let ends: Vec<_> = self
            .holds()
            .into_iter()
            .filter(|hold| which.is_none_or(|id| *id == hold.id))
            .collect();
        for hold in &ends {
            self.ctx.store.delete_hold(&hold.id).await?;
            self.holds
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|known| known.id != hold.id);
        }
        self.touch();
        self.ctx.look_at(self);
        Ok(ends.len())
    }

    /// Those that are not over.
    pub fn holds(&self) -> Vec<HoldRecord> {
        let time = now();
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        holds.retain(|hold| hold.until > time);
        holds.clone()
    }

    pub(super) fn is_held(&self) -> bool {
        self.held_until().is_some_and(|until| until > Instant::now())
    }

    pub(super) fn held_until(&self) -> Option<Instant> {
        let last = self.holds().iter().map(|hold| hold.until).max()?;
        let left = Duration::from_millis((last - now()).max(0).unsigned_abs());
        Instant::now().checked_add(left)
    }
}
