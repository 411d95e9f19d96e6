//! Who may reach an agent's ports. May change while the agent lives.

use std::sync::{Arc, PoisonError};

use super::{Agent, Trouble};
use crate::records::Reach;

impl Agent {
    pub fn reach(&self) -> Arc<Reach> {
        self.reach.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Holds for requests that come after this has returned, and for good.
    pub async fn set_reach(&self, reach: Reach) -> Result<(), Trouble> {
        self.ctx.store.set_reach(&self.profile.id, &reach).await?;
        *self.reach.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(reach);
        Ok(())
    }
}
