//! Finds agents, and holds what they all share.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use dorm_engine::{Engine, Homes, Id};
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Agent, Creation, ReconcileError, Trouble, create, reconcile};
use crate::faults::Faults;
use crate::metrics::Metrics;
use crate::records::{Slots, State, Workspace};
use crate::store::Store;

/// What the lifecycle is made of.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub engine: Arc<dyn Engine>,
    pub homes: Arc<dyn Homes>,
    pub metrics: Arc<Metrics>,
    pub faults: Faults,
    pub slots: Slots,
    pub nameservers: Vec<String>,
    pub stop_grace: Duration,
}

pub(super) struct Context {
    pub(super) store: Arc<dyn Store>,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) homes: Arc<dyn Homes>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) faults: Faults,
    pub(super) slots: Slots,
    pub(super) nameservers: Vec<String>,
    pub(super) stop_grace: Duration,
    /// Drivers, transitions and creations; the daemon waits for them when it ends.
    pub(super) tasks: TaskTracker,
    pub(super) closed: CancellationToken,
    roster: RwLock<Roster>,
}

#[derive(Default)]
struct Roster {
    by_id: HashMap<Id, Arc<Agent>>,
    by_name: HashMap<(Workspace, String), Arc<Agent>>,
}

impl Context {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    pub(super) fn enroll(&self, agent: &Arc<Agent>) {
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        roster.by_id.insert(agent.profile.id.clone(), agent.clone());
        roster.by_name.insert(name_of(agent), agent.clone());
    }

    pub(super) fn forget(&self, agent: &Arc<Agent>) {
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        roster.by_id.remove(&agent.profile.id);
        // The name may be another agent's by now.
        let name = name_of(agent);
        if roster
            .by_name
            .get(&name)
            .is_some_and(|known| Arc::ptr_eq(known, agent))
        {
            roster.by_name.remove(&name);
        }
    }
}

fn name_of(agent: &Agent) -> (Workspace, String) {
    (agent.profile.workspace.clone(), agent.profile.name.clone())
}

pub struct Registry {
    ctx: Arc<Context>,
}

impl Registry {
    /// Puts in order what an earlier daemon left, and knows all agents afterwards. `sweep_homes` allows
    /// to delete homes and templates that no record speaks of.
    pub async fn open(parts: Parts, sweep_homes: bool) -> Result<Arc<Self>, ReconcileError> {
        let ctx = Arc::new(Context {
            store: parts.store,
            engine: parts.engine,
            homes: parts.homes,
            metrics: parts.metrics,
            faults: parts.faults,
            slots: parts.slots,
            nameservers: parts.nameservers,
            stop_grace: parts.stop_grace,
            tasks: TaskTracker::new(),
            closed: CancellationToken::new(),
            roster: RwLock::default(),
        });
        reconcile::reconcile(&ctx, sweep_homes).await?;
        Ok(Arc::new(Self { ctx }))
    }

    /// A name is looked for before an id.
    pub fn get(&self, workspace: &Workspace, name_or_id: &str) -> Result<Arc<Agent>, Trouble> {
        let roster = self.ctx.roster.read().unwrap_or_else(PoisonError::into_inner);
        let by_id = || {
            let agent = roster.by_id.get(&name_or_id.parse::<Id>().ok()?)?;
            (agent.profile.workspace == *workspace).then_some(agent)
        };
        let by_name = roster.by_name.get(&(workspace.clone(), name_or_id.to_owned()));
        by_name
            .or_else(by_id)
            .cloned()
            .ok_or_else(|| Trouble::NotFound(name_or_id.to_owned()))
    }

    /// By name.
    pub fn list(&self, workspace: &Workspace) -> Vec<Arc<Agent>> {
        let mut agents: Vec<_> = self
            .all()
            .into_iter()
            .filter(|agent| agent.profile.workspace == *workspace)
            .collect();
        agents.sort_by(|a, b| a.profile.name.cmp(&b.profile.name));
        agents
    }

    /// Of all workspaces, in no order.
    pub fn all(&self) -> Vec<Arc<Agent>> {
        self.ctx
            .roster
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .by_id
            .values()
            .cloned()
            .collect()
    }

    /// Makes an agent, and starts it if asked to. If anything fails, nothing of it is left.
    pub async fn create(&self, creation: Creation) -> Result<Arc<Agent>, Trouble> {
        if self.ctx.is_closed() {
            return Err(Trouble::ShuttingDown);
        }
        // A task of its own: whoever asked may go away before it is done.
        let task = self.ctx.tasks.spawn(create::create(self.ctx.clone(), creation));
        task.await.unwrap_or_else(|bug| {
            Err(Trouble::Bug {
                verb: "be created",
                reason: bug.to_string(),
            })
        })
    }

    /// Ends in order: boxes are stopped if `stop_boxes`, what is under way ends, and then nothing
    /// more is taken. Gives up on what takes longer than `patience`; the next daemon finishes it.
    pub async fn shut_down(&self, stop_boxes: bool, patience: Duration) {
        let orderly = async {
            if stop_boxes {
                let agents = self.all();
                let up = agents
                    .iter()
                    .filter(|agent| matches!(agent.state(), State::Running | State::Starting));
                for (agent, stopped) in
                    join_all(up.map(|agent| async move { (agent, agent.stop(None).await) })).await
                {
                    if let Err(trouble) = stopped {
                        tracing::warn!(agent = %agent.profile.name, reason = %trouble.in_full(), "did not stop");
                    }
                }
            }
            self.ctx.closed.cancel();
            self.ctx.tasks.close();
            self.ctx.tasks.wait().await;
        };
        if tokio::time::timeout(patience, orderly).await.is_err() {
            tracing::warn!("not everything ended in time; the next daemon finishes it");
        }
        self.ctx.closed.cancel();
    }
}
