//! Sandboxes: agents that were made through the E2B API, with what it adds to them: metadata, a time after which
//! they end or pause, and a pause that a request does not undo unless it may.
//!
//! The record of each is in the store, and here; whoever changes one waits for his turn, so that a pause, a resume and
//! the end of its time never meet. One task waits for the soonest end of all.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dorm_engine::Id;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::history::History;
use crate::lifecycle::decide::Refusal;
use crate::lifecycle::{Agent, Registry, Trouble};
use crate::records::{OnTimeout, PauseMode, SandboxRecord, State, Workspace, now};
use crate::store::{Store, StoreError};

/// For processes of a box that is paused without its memory.
const GRACE: Duration = Duration::from_secs(1);
/// Until what could not be done at the end of its time is tried again.
const AGAIN: i64 = 60_000;
/// What a sandbox has at least when it wakes by itself: what it was given last may have been nothing.
const AWAKE: i64 = 300_000;
/// The clock of the host may be set meanwhile.
const LONGEST_SLEEP: i64 = 600_000;

pub struct Sandboxes {
    store: Arc<dyn Store>,
    registry: Arc<Registry>,
    inner: Mutex<Inner>,
    /// Rung when the soonest end may be another.
    changed: Notify,
    creating: Mutex<HashMap<IdempotencyKey, Arc<tokio::sync::Mutex<()>>>>,
}

type IdempotencyKey = (Workspace, String);

#[derive(Default)]
struct Inner {
    known: HashMap<Id, Arc<Sandbox>>,
    ends: BTreeSet<(i64, Id)>,
    paused: HashSet<Id>,
    by_key: HashMap<IdempotencyKey, Id>,
}

pub struct Sandbox {
    pub id: Id,
    record: Mutex<SandboxRecord>,
    /// Held while it is changed, so that no change is lost to another.
    changing: tokio::sync::Mutex<()>,
    /// Its place among the ends.
    due: Mutex<Option<i64>>,
    /// Held by whoever pauses, resumes or ends it.
    turn: tokio::sync::Mutex<()>,
    /// It goes to its pause: what reaches for it may not keep it awake.
    pausing: AtomicBool,
    history: Mutex<History>,
}

/// It is paused, and nothing but a resume wakes it.
#[derive(Debug, thiserror::Error)]
pub enum NotAdmitted {
    #[error("the sandbox is paused")]
    Paused,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl Sandbox {
    pub fn record(&self) -> SandboxRecord {
        locked(&self.record).clone()
    }

    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        locked(&self.history)
    }

    pub fn is_paused(&self) -> bool {
        locked(&self.record).paused.is_some()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sandboxes {
    pub async fn open(store: Arc<dyn Store>, registry: Arc<Registry>) -> Result<Arc<Self>, StoreError> {
        let all = store.sandboxes().await?;
        let sandboxes = Arc::new(Self {
            store,
            registry,
            inner: Mutex::default(),
            changed: Notify::new(),
            creating: Mutex::default(),
        });
        for (id, record) in all {
            if let Some(agent) = sandboxes.registry.by_id(&id) {
                sandboxes.add(&agent, record);
            }
        }
        Ok(sandboxes)
    }

    /// Knows an agent that was made with this record.
    pub fn add(&self, agent: &Arc<Agent>, record: SandboxRecord) -> Arc<Sandbox> {
        let id = &agent.profile.id;
        let key = record.idempotency.clone();
        let sandbox = Arc::new(Sandbox {
            id: id.clone(),
            record: Mutex::new(record.clone()),
            changing: tokio::sync::Mutex::default(),
            due: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            pausing: AtomicBool::new(false),
            history: Mutex::default(),
        });
        let mut inner = locked(&self.inner);
        inner.known.insert(id.clone(), sandbox.clone());
        if let Some(key) = key {
            inner
                .by_key
                .insert((agent.profile.workspace.clone(), key), id.clone());
        }
        drop(inner);
        self.file(&sandbox, &record);
        sandbox
    }

    pub fn get(&self, id: &Id) -> Option<Arc<Sandbox>> {
        locked(&self.inner).known.get(id).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Sandbox>> {
        locked(&self.inner).known.values().cloned().collect()
    }

    pub fn forget(&self, id: &Id) {
        let mut inner = locked(&self.inner);
        inner.paused.remove(id);
        inner.by_key.retain(|_, known| known != id);
        if let Some(sandbox) = inner.known.remove(id)
            && let Some(due) = locked(&sandbox.due).take()
        {
            inner.ends.remove(&(due, id.clone()));
        }
    }

    /// The sandbox that a request with the same key made before.
    pub fn made_before(&self, workspace: &Workspace, key: &str) -> Option<Arc<Sandbox>> {
        let inner = locked(&self.inner);
        let id = inner.by_key.get(&(workspace.clone(), key.to_owned()))?;
        inner.known.get(id).cloned()
    }

    /// Requests with the same key come one after the other.
    pub async fn one_by_one(&self, workspace: &Workspace, key: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let key = (workspace.clone(), key.to_owned());
        let lock = {
            let mut creating = locked(&self.creating);
            // Those that nobody waits for any more.
            creating.retain(|_, lock| Arc::strong_count(lock) > 1);
            creating.entry(key).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// Changes the record: durably, and then here.
    pub async fn change(
        &self,
        sandbox: &Sandbox,
        change: impl FnOnce(&mut SandboxRecord),
    ) -> Result<(), StoreError> {
        let _alone = sandbox.changing.lock().await;
        let mut record = sandbox.record();
        change(&mut record);
        self.store.set_sandbox(&sandbox.id, &record).await?;
        locked(&sandbox.record).clone_from(&record);
        self.file(sandbox, &record);
        Ok(())
    }

    /// Sets the end of its time. A paused one is left alone, which `false` says.
    pub async fn set_end(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        timeout: i64,
        only_extend: bool,
    ) -> Result<bool, Trouble> {
        let set = move |sandboxes: Arc<Self>, sandbox: Arc<Sandbox>| async move {
            if sandbox.is_paused() {
                return Ok(false);
            }
            let changed = sandboxes.change(&sandbox, |record| extend(record, timeout, only_extend));
            Ok(changed.await.map(|()| true)?)
        };
        self.in_turn("get another end of its time", sandbox, set).await
    }

    /// Does this when it is its turn, and to its end, also if whoever asked goes away.
    async fn in_turn<F: Future<Output = Result<bool, Trouble>> + Send>(
        self: &Arc<Self>,
        verb: &'static str,
        sandbox: &Arc<Sandbox>,
        work: impl FnOnce(Arc<Self>, Arc<Sandbox>) -> F + Send + 'static,
    ) -> Result<bool, Trouble> {
        let (sandboxes, sandbox) = (self.clone(), sandbox.clone());
        let turn = async move {
            let _turn = sandbox.turn.lock().await;
            work(sandboxes, sandbox.clone()).await
        };
        self.registry.to_the_end(verb, turn).await
    }

    fn file(&self, sandbox: &Sandbox, record: &SandboxRecord) {
        let mut inner = locked(&self.inner);
        if !inner.known.contains_key(&sandbox.id) {
            return;
        }
        match record.paused {
            Some(_) => inner.paused.insert(sandbox.id.clone()),
            None => inner.paused.remove(&sandbox.id),
        };
        put(&mut inner, sandbox, record.end);
        drop(inner);
        self.changed.notify_one();
    }

    /// Puts it away until it is resumed; `false` if it is paused already. With its memory: if that cannot be saved,
    /// it goes on as it was.
    pub async fn pause(
        self: &Arc<Self>,
        agent: &Arc<Agent>,
        sandbox: &Arc<Sandbox>,
        mode: PauseMode,
    ) -> Result<bool, Trouble> {
        let agent = agent.clone();
        let pause = move |sandboxes: Arc<Self>, sandbox: Arc<Sandbox>| async move {
            sandboxes.pause_now(&agent, &sandbox, mode).await
        };
        self.in_turn("be paused", sandbox, pause).await
    }

    async fn pause_now(
        &self,
        agent: &Arc<Agent>,
        sandbox: &Sandbox,
        mode: PauseMode,
    ) -> Result<bool, Trouble> {
        if sandbox.is_paused() {
            return Ok(false);
        }
        sandbox.pausing.store(true, Ordering::SeqCst);
        let paused = self.put_away(agent, sandbox, mode).await;
        sandbox.pausing.store(false, Ordering::SeqCst);
        paused.map(|()| true)
    }

    async fn put_away(&self, agent: &Arc<Agent>, sandbox: &Sandbox, mode: PauseMode) -> Result<(), Trouble> {
        let mode = match mode {
            PauseMode::Full => match agent.hibernate("paused").await {
                Ok(()) => PauseMode::Full,
                // There is no memory to keep.
                Err(Trouble::Refused(Refusal::NothingRuns)) => PauseMode::Files,
                Err(trouble) => return Err(trouble),
            },
            PauseMode::Files => {
                agent.stop(Some(GRACE)).await?;
                PauseMode::Files
            }
        };
        let record = |record: &mut SandboxRecord| {
            record.paused = Some(mode);
            record.end = None;
        };
        Ok(self.change(sandbox, record).await?)
    }

    /// Runs when this returns, for at least `timeout` milliseconds; gives whether it was paused. Without `memory`, one
    /// that was paused starts from its files.
    pub async fn resume(
        self: &Arc<Self>,
        agent: &Arc<Agent>,
        sandbox: &Arc<Sandbox>,
        timeout: i64,
        memory: bool,
    ) -> Result<bool, Trouble> {
        let agent = agent.clone();
        let resume = move |sandboxes: Arc<Self>, sandbox: Arc<Sandbox>| async move {
            sandboxes.resume_now(&agent, &sandbox, timeout, memory).await
        };
        self.in_turn("be resumed", sandbox, resume).await
    }

    async fn resume_now(
        &self,
        agent: &Arc<Agent>,
        sandbox: &Sandbox,
        timeout: i64,
        memory: bool,
    ) -> Result<bool, Trouble> {
        let was_paused = sandbox.is_paused();
        if was_paused && !memory {
            agent.stop(Some(GRACE)).await?;
        }
        agent.ensure_running().await?;
        self.change(sandbox, |record| {
            record.paused = None;
            extend(record, timeout, true);
        })
        .await?;
        Ok(was_paused)
    }

    /// Something reaches for the agent through its ports: may it?
    pub async fn admit(self: &Arc<Self>, agent: &Arc<Agent>) -> Result<(), NotAdmitted> {
        let Some(sandbox) = self.get(&agent.profile.id) else {
            return Ok(());
        };
        if !sandbox.is_paused() && !sandbox.pausing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let record = sandbox.record();
        if !record.auto_resume {
            return Err(NotAdmitted::Paused);
        }
        self.resume(agent, &sandbox, record.timeout.max(AWAKE), true)
            .await?;
        Ok(())
    }

    /// Ends or pauses sandboxes when their time is over, until the daemon ends.
    pub fn watch(self: &Arc<Self>, shutdown: CancellationToken) {
        tokio::spawn(self.clone().run(shutdown));
    }

    async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut recorded = self.registry.recorded();
        loop {
            for id in self.over() {
                tokio::spawn(expire(self.clone(), id));
            }
            let left = locked(&self.inner).ends.first().map(|(end, _)| end - now());
            let left = left.unwrap_or(LONGEST_SLEEP).clamp(0, LONGEST_SLEEP);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(Duration::from_millis(left.unsigned_abs())) => {}
                () = self.changed.notified() => {}
                changed = recorded.changed() => match changed {
                    Ok(()) => self.notice_woken(),
                    Err(_) => return,
                },
            }
        }
    }

    /// Takes those whose time is over off the list.
    fn over(&self) -> Vec<Id> {
        let mut inner = locked(&self.inner);
        let mut over = Vec::new();
        while let Some((end, id)) = inner.ends.pop_first() {
            if end > now() {
                inner.ends.insert((end, id));
                break;
            }
            if let Some(sandbox) = inner.known.get(&id) {
                *locked(&sandbox.due) = None;
            }
            over.push(id);
        }
        over
    }

    /// An agent that is woken by other means than the E2B API is no longer paused.
    fn notice_woken(self: &Arc<Self>) {
        let paused: Vec<Id> = locked(&self.inner).paused.iter().cloned().collect();
        for id in paused {
            match self.registry.by_id(&id) {
                None => self.forget(&id),
                Some(agent) if matches!(agent.state(), State::Running | State::Standby) => {
                    tokio::spawn(woken(self.clone(), agent));
                }
                Some(_) => {}
            }
        }
    }
}

fn extend(record: &mut SandboxRecord, timeout: i64, only: bool) {
    let end = now().saturating_add(timeout);
    record.end = Some(match record.end {
        Some(before) if only => before.max(end),
        _ => end,
    });
    record.timeout = timeout;
}

fn put(inner: &mut Inner, sandbox: &Sandbox, end: Option<i64>) {
    let mut due = locked(&sandbox.due);
    if let Some(before) = due.take() {
        inner.ends.remove(&(before, sandbox.id.clone()));
    }
    if let Some(end) = end {
        inner.ends.insert((end, sandbox.id.clone()));
        *due = Some(end);
    }
}

async fn woken(sandboxes: Arc<Sandboxes>, agent: Arc<Agent>) {
    let Some(sandbox) = sandboxes.get(&agent.profile.id) else {
        return;
    };
    let Ok(_turn) = sandbox.turn.try_lock() else {
        return;
    };
    if !sandbox.is_paused() || !matches!(agent.state(), State::Running | State::Standby) {
        return;
    }
    let changed = sandboxes.change(&sandbox, |record| {
        record.paused = None;
        extend(record, record.timeout.max(AWAKE), true);
    });
    if let Err(error) = changed.await {
        tracing::warn!(agent = %agent.profile.name, %error, "runs, but is recorded as paused");
    }
}

/// What was asked for the end of its time, if it is over.
pub(super) async fn expire(sandboxes: Arc<Sandboxes>, id: Id) {
    let (Some(sandbox), Some(agent)) = (sandboxes.get(&id), sandboxes.registry.by_id(&id)) else {
        return sandboxes.forget(&id);
    };
    let _turn = sandbox.turn.lock().await;
    let record = sandbox.record();
    if record.end.is_none_or(|end| end > now()) {
        return;
    }
    let done = match record.on_timeout {
        OnTimeout::Kill => agent.delete().await.map(|()| sandboxes.forget(&id)),
        OnTimeout::Pause(mode) => sandboxes.pause_now(&agent, &sandbox, mode).await.map(drop),
    };
    match done {
        Ok(()) => {}
        Err(Trouble::NotFound(_) | Trouble::Refused(Refusal::BeingDeleted)) => sandboxes.forget(&id),
        Err(trouble) => {
            tracing::warn!(agent = %agent.profile.name, reason = %trouble.in_full(), "its time is over, but it goes on");
            put(&mut locked(&sandboxes.inner), &sandbox, Some(now() + AGAIN));
            sandboxes.changed.notify_one();
        }
    }
}
