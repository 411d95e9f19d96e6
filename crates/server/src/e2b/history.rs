//! What a sandbox used, over the last hour: a small ring of samples, taken while it runs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{BoxStats, Engine, Homes};
use futures_util::{StreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use super::sandboxes::{Sandbox, Sandboxes};
use crate::lifecycle::{Agent, Registry};
use crate::records::{State, now};

const EVERY: Duration = Duration::from_secs(5);
const KEPT: usize = 720;
const AT_ONCE: usize = 16;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) time: i64,
    /// Of the cores that it may use.
    pub(super) cpu_percent: f64,
    pub(super) memory: u64,
    pub(super) disk: u64,
}

#[derive(Debug, Default)]
pub(super) struct History {
    samples: VecDeque<Sample>,
    /// When its CPU time was last read, and what it was.
    last: Option<(i64, u64)>,
}

impl History {
    pub(super) fn add(&mut self, time: i64, cores: f64, stats: &BoxStats, disk: u64) {
        let cpu_percent = match self.last {
            // The counter begins anew with every box.
            Some((before, usec)) if time > before && stats.cpu_usec >= usec => {
                let used = (stats.cpu_usec - usec) as f64 / 1000.0;
                (100.0 * used / (time - before) as f64 / cores).clamp(0.0, 100.0)
            }
            _ => 0.0,
        };
        self.last = Some((time, stats.cpu_usec));
        if self.samples.len() == KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            time,
            cpu_percent,
            memory: stats.memory_bytes,
            disk,
        });
    }

    pub(super) fn between(&self, start: i64, end: i64) -> Vec<Sample> {
        let within = |sample: &&Sample| (start..=end).contains(&sample.time);
        self.samples.iter().filter(within).copied().collect()
    }

    pub(super) fn newest(&self) -> Option<i64> {
        self.samples.back().map(|sample| sample.time)
    }
}

pub(super) struct Sampler {
    pub(super) registry: Arc<Registry>,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) homes: Arc<dyn Homes>,
    pub(super) sandboxes: Arc<Sandboxes>,
}

impl Sampler {
    /// Samples what runs until the daemon ends; while nothing does, it waits for that to change.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        let mut recorded = self.registry.recorded();
        loop {
            let any = self.sample_all().await;
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(EVERY), if any => {}
                changed = recorded.changed(), if !any => if changed.is_err() { return },
            }
        }
    }

    async fn sample_all(&self) -> bool {
        let running: Vec<_> = self
            .sandboxes
            .all()
            .into_iter()
            .filter_map(|sandbox| Some((self.registry.by_id(&sandbox.id)?, sandbox)))
            .filter(|(agent, _)| agent.state() == State::Running)
            .collect();
        let any = !running.is_empty();
        let sample = |(agent, sandbox): (Arc<Agent>, Arc<Sandbox>)| async move {
            sample(&*self.engine, &*self.homes, &agent, &sandbox).await;
        };
        stream::iter(running).for_each_concurrent(AT_ONCE, sample).await;
        any
    }
}

/// Adds a sample, if it has a box.
pub(super) async fn sample(engine: &dyn Engine, homes: &dyn Homes, agent: &Arc<Agent>, sandbox: &Sandbox) {
    let id = &agent.profile.id;
    let Ok(stats) = engine.stats(id).await else {
        return;
    };
    let disk = homes.usage(id).await.map_or(0, |usage| usage.used);
    let cores = f64::from(agent.profile.spec.limits.cpu_millis.max(1)) / 1000.0;
    sandbox.history().add(now(), cores, &stats, disk);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(cpu_usec: u64) -> BoxStats {
        BoxStats {
            cpu_usec,
            memory_bytes: 7,
            ..BoxStats::default()
        }
    }

    #[test]
    fn a_share_of_the_processor_is_that_between_two_samples() {
        let mut history = History::default();
        history.add(0, 2.0, &used(0), 1);
        history.add(1000, 2.0, &used(1_000_000), 1);
        history.add(2000, 2.0, &used(10), 1);
        let percents: Vec<f64> = history
            .between(0, 2000)
            .iter()
            .map(|sample| sample.cpu_percent)
            .collect();
        assert_eq!(percents, [0.0, 50.0, 0.0], "a new box begins to count anew");
        assert_eq!(history.between(500, 1500).len(), 1);
    }

    #[test]
    fn the_oldest_sample_makes_room() {
        let mut history = History::default();
        for time in 0..=KEPT as i64 {
            history.add(time, 1.0, &used(0), 0);
        }
        assert_eq!(history.between(0, i64::MAX).len(), KEPT);
        assert_eq!(
            (history.between(0, 0).len(), history.newest()),
            (0, Some(KEPT as i64))
        );
    }
}
