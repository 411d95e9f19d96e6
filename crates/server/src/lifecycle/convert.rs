//! Another isolation for an agent that keeps its files. The box ends, the home gets the form that the other engine runs on, in
//! one step, and then the record says so.
//!
//! A home says itself which form it has, and one of another form is converted before a box starts on it. So a crash at any
//! moment leaves an agent that is stopped and whole, of the one isolation or the other.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{BoxSpec, EngineError, Isolation};

use super::decide::{Request, Rest};
use super::transition::Setback;
use super::{Agent, Trouble, images, stop};
use crate::faults::Point;
use crate::records::{BoxChange, Change, SnapshotKind, SnapshotRecord, State, Status, now};

const VERB: &str = "be given another isolation";
/// Until a machine that was not there yet may be.
const NEXT_LOOK: Duration = Duration::from_secs(1);

impl Agent {
    /// Returns when it is so, and the agent runs again, if it ran or slept before. What is in its memory is lost, unless it is known
    /// before that it cannot be.
    pub async fn set_isolation(self: &Arc<Self>, to: Isolation) -> Result<(), Trouble> {
        let mut spec = self.box_spec();
        spec.isolation = to;
        let possible = self.ctx.engine.can_convert(&spec).await;
        possible.map_err(Trouble::engine(VERB))?;
        let agent = Arc::clone(self);
        let changed = async move {
            let had_memory = agent.published().current_box.is_some() || agent.current_image().is_some();
            let grace = agent.ctx.stop_grace;
            let converted = agent.ask(Request::Convert { to, grace }).await;
            if matches!(converted, Err(Trouble::Refused(_))) {
                return converted;
            }
            if had_memory && matches!(agent.state(), State::Stopped | State::Failed) {
                let started = agent.ensure_running().await;
                return converted.and(started);
            }
            converted
        };
        self.ctx.to_the_end(VERB, changed).await
    }

    /// Whether the memory of a snapshot is one that boxes of the agent can go on with.
    pub(super) fn can_go_on_from(&self, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
        can_go_on(self.isolation(), snapshot)
    }
}

pub(super) fn can_go_on(isolation: Isolation, snapshot: &SnapshotRecord) -> Result<(), Trouble> {
    match snapshot.kind {
        SnapshotKind::Full if snapshot.isolation != isolation => Err(Trouble::OtherIsolation {
            then: snapshot.isolation,
            now: isolation,
        }),
        SnapshotKind::Full | SnapshotKind::Files => Ok(()),
    }
}

/// Gives what to say about it.
pub(super) async fn convert(
    agent: &Arc<Agent>,
    from: Rest,
    to: Isolation,
    grace: Duration,
) -> Result<String, Setback> {
    let faults = &agent.ctx.faults;
    let recorded = faults.reach(Point::ConvertRecorded).await;
    recorded.map_err(Trouble::from)?;
    stop::end_box(agent, from, grace, VERB).await?;
    // From here on there are only files, of either form.
    let converted = in_place(agent, to).await;
    let left_out = converted.map_err(|trouble| Setback::at(Rest::Stopped, trouble))?;
    Ok(format!("its isolation is {to} now{left_out}"))
}

/// Gives the home the form that a box of `spec` runs on, if it has another. Gives what to say of files that had to be left out: mostly nothing.
/// That is recorded by then.
pub(super) async fn into_form(agent: &Arc<Agent>, spec: &BoxSpec) -> Result<String, EngineError> {
    let converting = agent.ctx.engine.convert(spec);
    let left_out = match spec.isolation {
        Isolation::Container | Isolation::Gvisor => unless_unwanted(agent, converting).await?,
        Isolation::Vm => converting.await?,
    };
    if left_out.is_empty() {
        return Ok(String::new());
    }
    let what = left_out.join(", ");
    tracing::warn!(agent = %agent.profile.name, what, "not all files could be kept");
    let said = format!("of its files, {what}");
    tell_at_once(agent, &said).await;
    Ok(format!("; {said}"))
}

/// As an event of its own: what comes next may fail, or the daemon may die.
async fn tell_at_once(agent: &Agent, said: &str) {
    let under_way = agent.published().status;
    let status = Status::now(under_way.state, said).following(&under_way);
    let change = Change {
        agent: &agent.profile.id,
        from: under_way.state,
        to: &status,
        at: now(),
        millis: None,
        box_record: BoxChange::Keep,
        image: agent.image_as_it_is(),
    };
    if let Err(error) = agent.ctx.record(&change).await {
        tracing::warn!(agent = %agent.profile.name, %error, "what was left out could not be recorded");
    }
}

/// Files may take minutes to come out of a machine. If the agent is to be deleted, nobody wants them any more, and the machine is ended, as soon
/// as it is there.
async fn unless_unwanted<T>(agent: &Arc<Agent>, converting: impl Future<Output = T>) -> T {
    let mut converting = pin!(converting);
    let mut published = agent.subscribe();
    tokio::select! {
        biased;
        converted = &mut converting => return converted,
        _ = published.wait_for(|now| now.unwanted) => {}
    }
    loop {
        let mut swept = pin!(agent.ctx.engine.sweep(&agent.profile.id));
        // Side by side, as either may wait for what the other has locked.
        let swept = tokio::select! {
            swept = &mut swept => swept,
            converted = &mut converting => {
                let _ = swept.await;
                return converted;
            }
        };
        if let Err(error) = swept {
            tracing::warn!(agent = %agent.profile.name, %error, "its files are not wanted any more, and come all the same");
        }
        if let Ok(converted) = tokio::time::timeout(NEXT_LOOK, &mut converting).await {
            return converted;
        }
    }
}

async fn in_place(agent: &Arc<Agent>, to: Isolation) -> Result<String, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::ConvertBoxGone).await?;
    if let Some(image) = agent.image() {
        // It is given up, and no other home would know of what it has left in this one.
        images::release(agent, &image.id).await;
    }
    let mut spec = agent.box_spec();
    spec.isolation = to;
    let left_out = into_form(agent, &spec).await.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ConvertHomeMade).await?;
    ctx.store.set_isolation(id, to).await?;
    agent.now_isolated_by(to);
    ctx.faults.reach(Point::ConvertMoved).await?;
    Ok(left_out)
}
