//! `stopping`: from a box, asked to end or ended by itself, or from a memory image, to files alone.

use std::sync::Arc;
use std::time::Duration;

use super::decide::Rest;
use super::{Agent, Trouble};
use crate::faults::Point;

pub(super) async fn stop(agent: &Arc<Agent>, from: Rest, grace: Duration) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::StopRecorded).await?;
    if from == Rest::Standby && !grace.is_zero() {
        // Processes that are frozen cannot end by themselves.
        agent.now_differs_from_image();
        if let Err(error) = ctx.engine.thaw(id).await {
            tracing::warn!(agent = %agent.profile.name, %error, "could not be thawed to be stopped");
        }
        ctx.faults.reach(Point::StopThawed).await?;
    }
    ctx.engine
        .stop(id, grace)
        .await
        .map_err(Trouble::engine("stop"))?;
    ctx.faults.reach(Point::StopBoxGone).await?;
    Ok(())
}

/// Clears away a box that ended by itself.
pub(super) async fn settle(agent: &Arc<Agent>) -> Result<(), Trouble> {
    let ctx = &agent.ctx;
    ctx.faults.reach(Point::SettleRecorded).await?;
    ctx.engine
        .stop(&agent.profile.id, Duration::ZERO)
        .await
        .map_err(Trouble::engine("be cleared away"))?;
    ctx.faults.reach(Point::SettleBoxGone).await?;
    Ok(())
}
