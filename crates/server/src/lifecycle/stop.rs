//! `stopping`: from a box, asked to end or ended by itself, to files alone.

use std::sync::Arc;
use std::time::Duration;

use super::{Agent, Trouble};
use crate::faults::Point;

pub(super) async fn stop(agent: &Arc<Agent>, grace: Duration) -> Result<(), Trouble> {
    let ctx = &agent.ctx;
    ctx.faults.reach(Point::StopRecorded).await?;
    ctx.engine
        .stop(&agent.profile.id, grace)
        .await
        .map_err(Trouble::engine("stop"))?;
    ctx.faults.reach(Point::StopBoxGone).await?;
    Ok(())
}

/// Clears away a box that ended by itself.
pub(super) async fn settle(agent: &Arc<Agent>) -> Result<(), Trouble> {
    agent
        .ctx
        .engine
        .stop(&agent.profile.id, Duration::ZERO)
        .await
        .map_err(Trouble::engine("be cleared away"))
}
