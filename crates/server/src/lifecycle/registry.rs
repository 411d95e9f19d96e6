//! Finds agents, and holds what they all share.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use dorm_engine::{Engine, Homes, Id};
use futures_util::{StreamExt as _, stream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::decide::Request;
use super::departed::Departures;
use super::idle::pressure::ReadGauge;
use super::{Agent, Creation, ReconcileError, Trouble, create, go_on, idle, lag, reconcile};
use crate::config::{OnShutdown, Standby};
use crate::faults::Faults;
use crate::metrics::Metrics;
use crate::records::{Change, Slots, State, Workspace};
use crate::store::{Store, StoreError};

/// Ends the reason of an agent whose box could not be looked at, and may go on.
pub const BOX_LEFT: &str = "; its box is left as it is";
/// Why an agent goes to disk that ran when the daemon ended.
pub const GOES_ON_WITH_THE_NEXT: &str = "the daemon ends; it goes on with the next";
/// Boxes that are put away at once when the daemon ends, or brought back by the next.
pub(super) const AT_ONCE: usize = 8;

/// Bytes in a second that a disk takes at the least.
const SLOWEST_DISK: u64 = 16 << 20;
/// A little less than `packaging/dorm.service` waits.
const LONGEST_END: Duration = Duration::from_secs(540);

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
    /// Where memory images are kept.
    pub images: PathBuf,
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
    pub(super) images: PathBuf,
    /// Drivers, transitions and creations; the daemon waits for them when it ends.
    pub(super) tasks: TaskTracker,
    pub(super) closed: CancellationToken,
    /// Cancelled before boxes are put away.
    pub(super) ending: CancellationToken,
    pub(super) going_on: TaskTracker,
    /// Held by whoever records that an agent goes on, or does not.
    pub(super) whether_to_go_on: tokio::sync::Mutex<()>,
    /// Counts the changes that were recorded.
    pub(super) recorded: watch::Sender<u64>,
    pub(super) departures: Departures,
    /// Where the watcher is told of changes, once there is one.
    watcher: OnceLock<idle::Inbox>,
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

    /// Records a change of state, and tells those who follow the events.
    pub(super) async fn record(&self, change: &Change<'_>) -> Result<(), StoreError> {
        self.store.change_state(change).await?;
        self.recorded.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Something about the agent may have changed.
    pub(super) fn look_at(&self, agent: &Arc<Agent>) {
        if let Some(watcher) = self.watcher.get() {
            let _ = watcher.send(idle::News::Changed(agent.clone()));
        }
    }

    /// Does this to its end, also if whoever asked for it goes away.
    pub(super) async fn to_the_end<T: Send + 'static>(
        &self,
        verb: &'static str,
        work: impl Future<Output = Result<T, Trouble>> + Send + 'static,
    ) -> Result<T, Trouble> {
        if self.is_closed() {
            return Err(Trouble::ShuttingDown);
        }
        let done = self.tasks.spawn(work).await;
        done.unwrap_or_else(|bug| {
            Err(Trouble::Bug {
                verb,
                reason: bug.to_string(),
            })
        })
    }

    pub(super) fn find(&self, id: &Id) -> Option<Arc<Agent>> {
        let roster = self.roster.read().unwrap_or_else(PoisonError::into_inner);
        roster.by_id.get(id).cloned()
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
        drop(roster);
        // Who follows its events is to see that there are no more.
        self.recorded.send_modify(|count| *count += 1);
    }
}

fn name_of(agent: &Agent) -> (Workspace, String) {
    (agent.profile.workspace.clone(), agent.profile.name.clone())
}

pub struct Registry {
    pub(super) ctx: Arc<Context>,
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
            images: parts.images,
            tasks: TaskTracker::new(),
            closed: CancellationToken::new(),
            ending: CancellationToken::new(),
            going_on: TaskTracker::new(),
            whether_to_go_on: tokio::sync::Mutex::default(),
            recorded: watch::Sender::new(0),
            departures: Departures::default(),
            watcher: OnceLock::new(),
            roster: RwLock::default(),
        });
        reconcile::reconcile(&ctx, sweep_homes).await?;
        Ok(Arc::new(Self { ctx }))
    }

    /// Changes whenever there may be new events.
    pub fn recorded(&self) -> watch::Receiver<u64> {
        self.ctx.recorded.subscribe()
    }

    /// From now on, agents that nobody uses go to sleep.
    pub fn watch(&self, settings: Standby, gauge: ReadGauge) {
        let inbox = idle::spawn(&self.ctx, settings, gauge);
        if self.ctx.watcher.set(inbox).is_ok() {
            for agent in self.all() {
                self.ctx.look_at(&agent);
            }
        }
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

    pub fn by_id(&self, id: &Id) -> Option<Arc<Agent>> {
        self.ctx.find(id)
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

    /// See [`Context::to_the_end`].
    pub(crate) async fn to_the_end<T: Send + 'static>(
        &self,
        verb: &'static str,
        work: impl Future<Output = Result<T, Trouble>> + Send + 'static,
    ) -> Result<T, Trouble> {
        self.ctx.to_the_end(verb, work).await
    }

    /// Makes an agent, and starts it if asked to. If anything fails, nothing of it is left.
    pub async fn create(&self, creation: Creation) -> Result<Arc<Agent>, Trouble> {
        let created = create::create(self.ctx.clone(), creation);
        self.ctx.to_the_end("be created", created).await
    }

    /// Ends in order: boxes are put to disk or stopped if that is wanted, what is under way ends, and
    /// then nothing more is taken. Gives up on each box, and then on the rest, that takes longer than
    /// `patience`, and what memory takes to be written; the next daemon finishes it.
    pub async fn shut_down(&self, boxes: OnShutdown, patience: Duration) {
        if tokio::time::timeout(patience, self.go_on_no_more())
            .await
            .is_err()
        {
            tracing::warn!("not everything was brought back in time");
        }
        self.put_away(boxes, patience).await;
        let orderly = async {
            self.ctx.closed.cancel();
            self.ctx.tasks.close();
            self.ctx.tasks.wait().await;
            for agent in self.all() {
                let _ = lag::catch_up(&agent).await;
            }
        };
        if tokio::time::timeout(patience, orderly).await.is_err() {
            tracing::warn!("not everything ended in time; the next daemon finishes it");
        }
        self.ctx.closed.cancel();
    }

    /// Forgets all agents, each of which knows of all this in turn, so that nothing of it outlives the last who asks.
    pub fn disband(&self) {
        let mut roster = self.ctx.roster.write().unwrap_or_else(PoisonError::into_inner);
        *roster = Roster::default();
    }

    async fn put_away(&self, boxes: OnShutdown, patience: Duration) {
        let up: Vec<_> = self
            .all()
            .into_iter()
            .filter(|agent| has_box(agent.state()))
            .collect();
        let patience = match boxes {
            OnShutdown::Hibernate => patience_with(patience, self.held_by(&up).await),
            OnShutdown::Leave | OnShutdown::Stop => patience,
        };
        let put = |agent: Arc<Agent>| async move {
            let is_up = go_on::is_up(agent.state());
            let (goes_on, request) = match boxes {
                OnShutdown::Leave => return,
                OnShutdown::Stop => {
                    let grace = agent.ctx.stop_grace;
                    (is_up && agent.sleep().keep_awake, Request::Stop { grace })
                }
                OnShutdown::Hibernate => {
                    let why = match is_up {
                        true => GOES_ON_WITH_THE_NEXT,
                        false => "the daemon ends",
                    };
                    (is_up, Request::Hibernate { why: why.to_owned() })
                }
            };
            let done = async {
                if goes_on {
                    agent.is_to_go_on().await;
                }
                agent.ask(request).await
            };
            match tokio::time::timeout(patience, done).await {
                Ok(Ok(())) => {}
                Ok(Err(trouble)) => {
                    tracing::warn!(agent = %agent.profile.name, reason = %trouble.in_full(), "is left as it is");
                }
                Err(_) => {
                    tracing::warn!(agent = %agent.profile.name, "takes too long; the next daemon finishes it");
                }
            }
        };
        // Memory goes to one disk: more at once would only make each slower.
        let all = stream::iter(up).for_each_concurrent(AT_ONCE, put);
        if tokio::time::timeout(LONGEST_END.max(patience), all)
            .await
            .is_err()
        {
            tracing::warn!("not all boxes were put away in time; the next daemon finds them");
        }
    }

    /// Bytes of memory of all these together.
    async fn held_by(&self, agents: &[Arc<Agent>]) -> u64 {
        let mut held: u64 = 0;
        for agent in agents {
            let stats = self.ctx.engine.stats(&agent.profile.id).await;
            let bytes = stats.map_or(agent.profile.spec.limits.memory, |stats| stats.memory_bytes);
            held = held.saturating_add(bytes);
        }
        held
    }
}

/// How long a box may take to be put to disk, where so many bytes of memory go there at the same time.
fn patience_with(patience: Duration, bytes: u64) -> Duration {
    let written = Duration::from_secs(bytes / SLOWEST_DISK);
    patience.saturating_add(written).min(LONGEST_END.max(patience))
}

fn has_box(state: State) -> bool {
    match state {
        State::Starting
        | State::Running
        | State::Freezing
        | State::Standby
        | State::Hibernating
        | State::Waking => true,
        State::Stopped | State::Hibernated | State::Stopping | State::Failed | State::Deleting => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_memory_is_waited_for_but_not_for_ever() {
        let base = Duration::from_secs(40);
        assert_eq!(patience_with(base, 0), base);
        assert_eq!(patience_with(base, 4 << 30), base + Duration::from_secs(256));
        assert_eq!(patience_with(base, 1 << 50), LONGEST_END);
        let long = Duration::from_secs(4000);
        assert_eq!(patience_with(long, 1 << 50), long);
    }
}
