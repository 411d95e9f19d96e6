//! When is it time? A pure function of what is known of an agent, for the watcher and for `dorm why`.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::Standby;
use crate::records::{Sleep, State};

/// When this agent goes to sleep; `None` is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    pub standby: Option<Duration>,
    pub durable: Option<Duration>,
    pub hibernate: Option<Duration>,
}

impl Times {
    pub fn of(sleep: &Sleep, defaults: &Standby) -> Self {
        let time = |own: Option<u64>, default: Duration| {
            let time = own.map_or(default, Duration::from_millis);
            (!time.is_zero()).then_some(time)
        };
        let unless_awake = |time: Option<Duration>| time.filter(|_| !sleep.keep_awake);
        Self {
            standby: unless_awake(time(sleep.standby_after, defaults.after)),
            durable: time(sleep.durable_after, defaults.durable_after),
            hibernate: unless_awake(time(sleep.hibernate_after, defaults.hibernate_after)),
        }
    }
}

/// What is known of an agent.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub state: State,
    pub open_requests: usize,
    /// Nothing was seen of it since.
    pub quiet_since: Instant,
    pub held_until: Option<Instant>,
    /// When it came into standby, if it is there.
    pub frozen_since: Instant,
    /// Whether its memory is on disk as it is now.
    pub saved: bool,
    /// Whether its memory could be written to disk.
    pub savable: bool,
    /// If not, when it may be.
    pub savable_at: Option<Instant>,
    /// When its CPU time was last read, since it is quiet.
    pub sampled: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Not before something changes.
    Nothing,
    /// Look again then.
    Wait(Instant),
    /// Read how much CPU it has used.
    Sample,
    /// Nothing reached for it for long enough: does it work by itself?
    Judge,
    MakeDurable,
    Hibernate,
}

/// What to do about the agent now.
pub fn step(view: &View, times: &Times, now: Instant) -> Step {
    match view.state {
        State::Running => awake(view, times, now),
        State::Standby => asleep(view, times, now),
        State::Stopped
        | State::Starting
        | State::Freezing
        | State::Hibernating
        | State::Hibernated
        | State::Waking
        | State::Stopping
        | State::Failed
        | State::Deleting => Step::Nothing,
    }
}

fn awake(view: &View, times: &Times, now: Instant) -> Step {
    let Some(after) = times.standby else {
        return Step::Nothing;
    };
    if let Some(until) = view.held_until
        && until > now
    {
        return Step::Wait(until);
    }
    if view.open_requests > 0 {
        return Step::Wait(now + after / 4);
    }
    let (half, end) = (view.quiet_since + after / 2, view.quiet_since + after);
    match view.sampled {
        None if now < half => Step::Wait(half),
        None => Step::Sample,
        // What was used is seen only over some time.
        Some(sampled) if now < end.max(sampled + after / 2) => Step::Wait(end.max(sampled + after / 2)),
        Some(_) => Step::Judge,
    }
}

fn asleep(view: &View, times: &Times, now: Instant) -> Step {
    if !view.saved && !view.savable {
        return view.savable_at.map_or(Step::Nothing, Step::Wait);
    }
    let due = |after: Duration| view.frozen_since + after;
    let hibernate = times.hibernate.map(|after| match view.held_until {
        Some(until) => due(after).max(until),
        None => due(after),
    });
    // Whoever is held, or to be kept awake, loses nothing by being on disk as well. A stream that a pause has left open would be cut.
    let wanted = !view.saved && view.open_requests == 0;
    let durable = times.durable.filter(|_| wanted).map(due);
    match (hibernate, durable) {
        (Some(at), _) if at <= now => Step::Hibernate,
        (_, Some(at)) if at <= now => Step::MakeDurable,
        (hibernate, durable) => {
            let next = hibernate.into_iter().chain(durable).min();
            next.map_or(Step::Nothing, Step::Wait)
        }
    }
}
