//! Watches all agents: puts those to sleep that nobody uses, and to disk those that sleep long.
//!
//! ```text
//!   a change of state ──▶ inbox ──▶ what is next, and when ([`law`]) ──▶ one queue of times
//!                                        ▲                                    │
//!                                        └── done ◀── look, or ask a driver ◀─┘
//! ```
//!
//! One task for all of them. An agent that sleeps for good has no entry in the queue, and costs nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dorm_engine::Id;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Agent;
use super::registry::Context;
use crate::config::Standby;
use crate::records::State;
use law::{Step, Times, View};
use pressure::{Frozen, Leave, ReadGauge};

pub mod law;
mod look;
pub mod pressure;

/// How often the host's memory is looked at while boxes are in standby.
const PRESSURE: Duration = Duration::from_secs(5);

/// What the watcher knows of one agent.
struct Entry {
    agent: Weak<Agent>,
    /// Its place in the queue.
    due: Option<(Instant, u64)>,
    /// What it is doing was asked for by the watcher, who waits for the end of it.
    busy: bool,
    state: State,
    frozen_since: Instant,
    memory: u64,
    sample: Option<Sample>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    taken: Instant,
    worked: Duration,
    /// Which quiet time it belongs to.
    quiet_since: Instant,
}

pub(super) struct Watcher {
    ctx: Arc<Context>,
    settings: Standby,
    gauge: ReadGauge,
    news: mpsc::UnboundedReceiver<News>,
    tell: mpsc::UnboundedSender<News>,
    entries: HashMap<Id, Entry>,
    queue: BTreeMap<(Instant, u64), Id>,
    sequence: u64,
}

pub(super) enum News {
    /// Something about the agent may have changed.
    Changed(Arc<Agent>),
    Sampled(Id, Option<Sample>),
    /// What was begun for the agent has ended.
    Done(Id),
    /// Those that had to go are on disk, as far as that was possible.
    Evicted,
}

/// Where to tell the watcher.
pub(super) type Inbox = mpsc::UnboundedSender<News>;

/// Watches until the daemon ends.
pub(super) fn spawn(ctx: &Arc<Context>, settings: Standby, gauge: ReadGauge) -> Inbox {
    let (tell, news) = mpsc::unbounded_channel();
    let watcher = Watcher {
        ctx: ctx.clone(),
        settings,
        gauge,
        news,
        tell: tell.clone(),
        entries: HashMap::new(),
        queue: BTreeMap::new(),
        sequence: 0,
    };
    tokio::spawn(watcher.run());
    tell
}

impl Watcher {
    async fn run(mut self) {
        let closed = self.ctx.closed.clone();
        let mut pressure_at = None;
        let mut evicting = false;
        loop {
            let due = self.queue.first_key_value().map(|((at, _), _)| *at);
            tokio::select! {
                () = closed.cancelled() => return,
                Some(news) = self.news.recv() => match news {
                    News::Changed(agent) => self.changed(&agent).await,
                    News::Sampled(id, sample) => self.sampled(&id, sample),
                    News::Done(id) => self.done(&id),
                    News::Evicted => evicting = false,
                },
                () = at(due) => self.due(),
                () = at(pressure_at) => pressure_at = None,
            }
            if pressure_at.is_none() && self.entries.values().any(|entry| entry.state == State::Standby) {
                evicting = evicting || self.relieve();
                pressure_at = Some(Instant::now() + PRESSURE);
            }
        }
    }

    async fn changed(&mut self, agent: &Arc<Agent>) {
        let id = &agent.profile.id;
        let state = agent.state();
        if agent.is_gone() || !matches!(state, State::Running | State::Standby) {
            return self.forget(id);
        }
        let now = Instant::now();
        let entry = self.entries.entry(id.clone()).or_insert_with(|| Entry {
            agent: Arc::downgrade(agent),
            due: None,
            busy: false,
            state: State::Stopped,
            frozen_since: now,
            memory: 0,
            sample: None,
        });
        if entry.state != state {
            entry.state = state;
            // It may have come there under an earlier daemon.
            entry.frozen_since = agent.view().frozen_since;
            entry.sample = None;
            if state == State::Standby {
                let stats = self.ctx.engine.stats(id).await;
                entry.memory = stats.map_or(0, |stats| stats.memory_bytes);
            }
        }
        self.consider(id);
    }

    fn forget(&mut self, id: &Id) {
        if let Some(entry) = self.entries.remove(id)
            && let Some(place) = entry.due
        {
            self.queue.remove(&place);
        }
    }

    fn sampled(&mut self, id: &Id, sample: Option<Sample>) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.sample = sample;
        }
        self.done(id);
    }

    fn done(&mut self, id: &Id) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.busy = false;
            self.consider(id);
        }
    }

    fn due(&mut self) {
        let now = Instant::now();
        while let Some(first) = self.queue.first_entry() {
            if first.key().0 > now {
                return;
            }
            let id = first.remove();
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.due = None;
            }
            self.consider(&id);
        }
    }

    /// Does what is to be done now, or notes when to look again.
    fn consider(&mut self, id: &Id) {
        let Some(entry) = self.entries.get_mut(id) else {
            return;
        };
        if entry.busy {
            return;
        }
        let Some(agent) = entry.agent.upgrade() else {
            return self.forget(id);
        };
        let now = Instant::now();
        let times = Times::of(&agent.sleep(), &self.settings);
        let sample = entry
            .sample
            .filter(|sample| sample.quiet_since == agent.quiet_since());
        let view = View {
            frozen_since: entry.frozen_since,
            sampled: sample.map(|sample| sample.taken),
            ..agent.view()
        };
        if let Some(place) = entry.due.take() {
            self.queue.remove(&place);
        }
        let tell = self.tell.clone();
        match law::step(&view, &times, now) {
            Step::Nothing => {}
            Step::Wait(until) => {
                self.sequence += 1;
                // Never at once again, whatever the clocks say.
                let place = (until.max(now + Duration::from_millis(1)), self.sequence);
                entry.due = Some(place);
                self.queue.insert(place, id.clone());
            }
            Step::Sample => {
                entry.busy = true;
                tokio::spawn(look::sample(agent, tell));
            }
            Step::Judge => {
                entry.busy = true;
                let after = times.standby.unwrap_or_default();
                let first = sample.expect("a judgement follows a sample");
                tokio::spawn(look::judge(agent, first, after, self.settings.cpu, tell));
            }
            Step::MakeDurable => {
                entry.busy = true;
                tokio::spawn(look::make_durable(agent, tell));
            }
            Step::Hibernate => {
                entry.busy = true;
                let why = format!("asleep for {}", look::in_words(now - entry.frozen_since));
                tokio::spawn(look::hibernate(agent, why, tell));
            }
        }
    }

    /// Sends boxes to disk if memory is short; gives whether it does.
    fn relieve(&self) -> bool {
        let Some(gauge) = (self.gauge)() else { return false };
        let frozen = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.state == State::Standby);
        let now = Instant::now();
        let boxes = frozen.filter_map(|(id, entry)| {
            let agent = entry.agent.upgrade()?;
            let view = agent.view();
            let held = view.held_until.is_some_and(|until| until > now) || agent.sleep().keep_awake;
            Some(Frozen {
                id: id.clone(),
                since: entry.frozen_since,
                memory: entry.memory,
                leave: match (view.saved || view.savable, held) {
                    (false, _) => Leave::Never,
                    (true, true) => Leave::IfNeedBe,
                    (true, false) => Leave::Gladly,
                },
            })
        });
        let out = pressure::evict(boxes.collect(), self.settings.memory, gauge);
        let agents: Vec<_> = out
            .iter()
            .filter_map(|id| self.entries.get(id)?.agent.upgrade())
            .collect();
        let any = !agents.is_empty();
        if any {
            tokio::spawn(look::evict(agents, self.tell.clone()));
        }
        any
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
