//! Why an agent is as it is, and what will become of it: for people.

use std::sync::Arc;

use dorm_engine::About;
use tokio::time::Instant;

use super::Agent;
use super::idle::law::{Step, Times, View, step};
use crate::config::Standby;
use crate::records::{Note, State, Status, now};

#[derive(Debug, Clone)]
pub struct Why {
    pub status: Status,
    /// What keeps it awake, or from going deeper to sleep.
    pub because: Vec<String>,
    pub next: Option<Next>,
    pub times: Times,
    /// What would be left of it after a crash of this machine, and by what.
    pub files: String,
    pub memory: String,
    pub setback: Option<Note>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    pub state: &'static str,
    pub at: i64,
}

pub fn why(agent: &Arc<Agent>, defaults: &Standby) -> Why {
    let times = Times::of(&agent.sleep(), defaults);
    let view = agent.view();
    let wall = Instant::now();
    let about = agent.ctx.engine.about(agent.isolation());
    Why {
        status: agent.published().status,
        because: because(agent, &view, &times),
        next: next(&view, &times, wall),
        times,
        files: format!(
            "{}: always; if this machine fails, as they were last synced",
            about.files_by
        ),
        memory: memory(agent, &view, &about),
        setback: agent.setback(),
    }
}

fn because(agent: &Arc<Agent>, view: &View, times: &Times) -> Vec<String> {
    let mut because = Vec::new();
    if !matches!(view.state, State::Running | State::Standby) {
        return because;
    }
    if agent.sleep().keep_awake {
        because.push("it is to be kept awake".to_owned());
    } else if view.state == State::Running && times.standby.is_none() {
        because.push("it never goes to standby by itself".to_owned());
    }
    for hold in agent.holds() {
        let left = (hold.until - now()).max(0) / 1000;
        because.push(format!("held for another {left} s: {}", hold.reason));
    }
    match view.open_requests {
        0 => {}
        1 => because.push("a request or stream is open".to_owned()),
        several => because.push(format!("{several} requests and streams are open")),
    }
    if view.state == State::Running {
        let recent = |note: &Note| {
            times.standby.is_some_and(|after| {
                u128::from((now() - note.time).max(0).unsigned_abs()) <= after.as_millis()
            })
        };
        because.extend(agent.work().filter(recent).map(|note| note.what));
        if because.is_empty() {
            because.push(format!(
                "it was used {} s ago",
                view.quiet_since.elapsed().as_secs()
            ));
        }
    } else if !view.saved && !view.savable {
        because.push("its memory cannot be put to disk".to_owned());
    }
    because
}

fn next(view: &View, times: &Times, wall: Instant) -> Option<Next> {
    let in_millis = |at: Instant| {
        let left = at.saturating_duration_since(wall).as_millis();
        now().saturating_add(i64::try_from(left).unwrap_or(i64::MAX))
    };
    let (state, at) = match (view.state, step(view, times, wall)) {
        (_, Step::Nothing) => return None,
        (State::Running, _) if view.open_requests > 0 => return None,
        (State::Running, Step::Wait(until)) => {
            let idle = view.quiet_since + times.standby?;
            ("standby", until.max(idle))
        }
        (State::Running, _) => ("standby", (view.quiet_since + times.standby?).max(wall)),
        (_, Step::Wait(until)) => {
            let hibernates = times
                .hibernate
                .is_some_and(|after| until >= view.frozen_since + after);
            (
                if hibernates {
                    "hibernated"
                } else {
                    "standby, durable"
                },
                until,
            )
        }
        (_, Step::MakeDurable) => ("standby, durable", wall),
        (_, Step::Sample | Step::Judge | Step::Hibernate) => ("hibernated", wall),
    };
    Some(Next {
        state,
        at: in_millis(at),
    })
}

fn memory(agent: &Arc<Agent>, view: &View, about: &About) -> String {
    let by = &about.memory_by;
    match view.state {
        State::Hibernated => {
            const IMAGE: &str = "a memory image on disk, of the same instant as its files";
            match agent.can_save() {
                Ok(()) => format!("{IMAGE}: {by}"),
                Err(reason) => format!("{IMAGE}. It cannot be brought back now: {reason}"),
            }
        }
        State::Standby if view.saved => format!("in RAM, and a memory image on disk: {by}"),
        State::Running | State::Standby | State::Freezing | State::Waking | State::Hibernating => {
            match agent.can_save() {
                Ok(()) => "in RAM; it outlives the daemon, not this machine".to_owned(),
                Err(reason) => {
                    format!("in RAM; it outlives the daemon, not this machine. No images: {reason}")
                }
            }
        }
        State::Stopped | State::Starting | State::Stopping | State::Failed | State::Deleting => {
            match view.saved {
                true => "a memory image on disk, which the next start uses".to_owned(),
                false => "none".to_owned(),
            }
        }
    }
}
