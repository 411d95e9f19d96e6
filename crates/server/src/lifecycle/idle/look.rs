//! What the watcher does that takes time: it looks at a box, and asks drivers.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Inbox, News, Sample};
use crate::guest_client::{GuestClient, ListedRun};
use crate::lifecycle::{Agent, Trouble};

/// A guest that does not answer by then is left in peace.
const PATIENCE: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(1);

pub(super) async fn sample(agent: Arc<Agent>, tell: Inbox) {
    let quiet_since = agent.quiet_since();
    let sample = match agent.ctx.engine.worked(&agent.profile.id).await {
        Ok(worked) => Some(Sample {
            taken: Instant::now(),
            worked,
            quiet_since,
        }),
        Err(error) => {
            tracing::debug!(agent = %agent.profile.name, %error, "could not be measured");
            agent.touch();
            None
        }
    };
    let _ = tell.send(News::Sampled(agent.profile.id.clone(), sample));
}

/// Asks for sleep if the box does nothing; `cpu` is the part of a core below which it does nothing.
pub(super) async fn judge(agent: Arc<Agent>, first: Sample, after: Duration, cpu: f64, tell: Inbox) {
    match working(&agent, first, cpu).await {
        Seen::Work(what) => {
            agent.note_work(what);
            agent.touch();
        }
        Seen::Idle { services } => {
            let but_for = match services {
                0 => String::new(),
                1 => ", but for a service".to_owned(),
                several => format!(", but for {several} services"),
            };
            let why = format!("idle for {}{but_for}", in_words(after));
            // If something has reached for it meanwhile, what it has begun may not have been seen.
            match agent.idle(why, first.quiet_since).await {
                Ok(()) | Err(Trouble::InUse | Trouble::Refused(_) | Trouble::NotFound(_)) => {}
                Err(trouble) => {
                    tracing::warn!(agent = %agent.profile.name, reason = %trouble.in_full(), "could not be put to standby");
                    agent.touch();
                }
            }
        }
    }
    let _ = tell.send(News::Sampled(agent.profile.id.clone(), None));
}

enum Seen {
    /// On what, in words.
    Work(String),
    Idle {
        services: usize,
    },
}

async fn working(agent: &Arc<Agent>, first: Sample, cpu: f64) -> Seen {
    let engine = &agent.ctx.engine;
    let Ok(worked) = engine.worked(&agent.profile.id).await else {
        return Seen::Work("it cannot be measured".to_owned());
    };
    let used = worked.saturating_sub(first.worked);
    let part = used.as_secs_f64() / first.taken.elapsed().as_secs_f64().max(0.001);
    if part > cpu {
        return Seen::Work(format!("its processes use {:.0} % of a core", part * 100.0));
    }
    let guest = GuestClient::new(engine.clone(), agent.profile.id.clone());
    let runs = match tokio::time::timeout(PATIENCE, guest.runs()).await {
        Ok(Ok(runs)) => runs,
        Ok(Err(error)) => {
            tracing::debug!(agent = %agent.profile.name, %error, "its guest did not say what runs");
            return Seen::Work("its guest does not answer".to_owned());
        }
        Err(_) => return Seen::Work("its guest does not answer".to_owned()),
    };
    let (at_work, services): (Vec<_>, Vec<_>) = runs.into_iter().partition(ListedRun::keeps_awake);
    match at_work.as_slice() {
        [] => Seen::Idle {
            services: services.len(),
        },
        [one] => Seen::Work(format!("run {} is in progress", one.run_id)),
        several => Seen::Work(format!("{} runs are in progress", several.len())),
    }
}

pub(super) async fn make_durable(agent: Arc<Agent>, tell: Inbox) {
    let answer = agent.make_durable().await;
    done(agent, answer, tell).await;
}

pub(super) async fn hibernate(agent: Arc<Agent>, why: String, tell: Inbox) {
    let answer = agent.retire(why).await;
    done(agent, answer, tell).await;
}

/// One after the other: the disk takes no more at once, and each that is gone may be enough.
pub(super) async fn evict(agents: Vec<Arc<Agent>>, tell: Inbox) {
    for agent in agents {
        went_well(&agent, agent.retire("memory is short".to_owned()).await);
    }
    let _ = tell.send(News::Evicted);
}

async fn done(agent: Arc<Agent>, answer: Result<(), Trouble>, tell: Inbox) {
    if !went_well(&agent, answer) {
        // The watcher may see what it saw before, and would ask again at once.
        tokio::time::sleep(AGAIN).await;
    }
    let _ = tell.send(News::Done(agent.profile.id.clone()));
}

fn went_well(agent: &Arc<Agent>, answer: Result<(), Trouble>) -> bool {
    match answer {
        Ok(()) | Err(Trouble::InUse | Trouble::NotFound(_) | Trouble::ShuttingDown) => true,
        Err(trouble) => {
            tracing::warn!(agent = %agent.profile.name, reason = %trouble.in_full(), "could not be put to disk");
            false
        }
    }
}

pub(super) fn in_words(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds @ 1..=119 => format!("{seconds} s"),
        seconds => format!("{} min", seconds / 60),
    }
}
