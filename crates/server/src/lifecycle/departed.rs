//! The last events of agents that are gone. Their records go with them, and whoever follows the events may not have seen them yet.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dorm_engine::Id;

use super::{Agent, Registry};
use crate::records::{EventRecord, Workspace};
use crate::store::{Result, Store};

/// Of each agent, the newest.
const OF_EACH: u32 = 16;
/// Of all.
const KEPT: usize = 4096;

/// An event of an agent that is gone.
#[derive(Debug, Clone)]
pub struct Departed {
    pub name: String,
    pub event: EventRecord,
    workspace: Workspace,
}

#[derive(Default)]
pub(super) struct Departures(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// Counts them.
    so_far: u64,
    last: VecDeque<Departed>,
}

impl Departures {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before its records go.
    pub(super) async fn keep(&self, agent: &Agent, store: &dyn Store) -> Result<()> {
        let profile = &agent.profile;
        let events = store.events(&profile.id, OF_EACH).await?;
        let mut inner = self.inner();
        for event in events.into_iter().rev() {
            if inner.last.len() == KEPT {
                inner.last.pop_front();
            }
            inner.so_far += 1;
            inner.last.push_back(Departed {
                name: profile.name.clone(),
                event,
                workspace: profile.workspace.clone(),
            });
        }
        Ok(())
    }
}

impl Registry {
    /// A mark for [`Registry::departed`].
    pub fn departures(&self) -> u64 {
        self.ctx.departures.inner().so_far
    }

    /// Since the mark and after that event, of one agent or of a whole workspace. Whatever the store does not have for want of its agent is among them after that.
    pub fn departed(
        &self,
        workspace: &Workspace,
        agent: Option<&Id>,
        mark: u64,
        after: i64,
    ) -> Vec<Departed> {
        let inner = self.ctx.departures.inner();
        let since = usize::try_from(inner.so_far.saturating_sub(mark)).unwrap_or(usize::MAX);
        let new = inner.last.iter().skip(inner.last.len().saturating_sub(since));
        let of = |departed: &&Departed| {
            let event = &departed.event;
            event.seq > after && departed.workspace == *workspace && agent.is_none_or(|id| event.agent == *id)
        };
        new.filter(of).cloned().collect()
    }
}
