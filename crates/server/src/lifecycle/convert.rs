//! Another isolation for an agent that keeps its files. The box ends, the home gets the form that the other engine runs on, in
//! one step, and then the record says so.
//!
//! A home says itself which form it has, and an engine that is to start on one of another form converts it. So a crash at any
//! moment leaves an agent that is stopped and whole, of the one isolation or the other.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::Isolation;

use super::decide::{Request, Rest};
use super::transition::Setback;
use super::{Agent, Trouble, stop};
use crate::faults::Point;
use crate::records::{SnapshotKind, SnapshotRecord, State};

const VERB: &str = "be given another isolation";

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
    let mut said = format!("its isolation is {to} now");
    if !left_out.is_empty() {
        said = format!("{said}; of its files, {}", left_out.join(", "));
        tracing::warn!(agent = %agent.profile.name, what = left_out.join(", "), "not all files could be kept");
    }
    Ok(said)
}

async fn in_place(agent: &Arc<Agent>, to: Isolation) -> Result<Vec<String>, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::ConvertBoxGone).await?;
    let mut spec = agent.box_spec();
    spec.isolation = to;
    let left_out = ctx.engine.convert(&spec).await.map_err(Trouble::engine(VERB))?;
    ctx.faults.reach(Point::ConvertHomeMade).await?;
    ctx.store.set_isolation(id, to).await?;
    agent.now_isolated_by(to);
    ctx.faults.reach(Point::ConvertMoved).await?;
    Ok(left_out)
}
