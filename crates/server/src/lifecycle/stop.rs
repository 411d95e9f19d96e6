//! `stopping`: from a box, asked to end or ended by itself, or from a memory image, to files alone.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::EngineError;

use super::decide::Rest;
use super::transition::Setback;
use super::{Agent, Trouble};
use crate::faults::Point;

const UNWRITTEN: &str = "have what it wrote put to disk";

pub(super) async fn stop(agent: &Arc<Agent>, from: Rest, grace: Duration) -> Result<(), Setback> {
    let ctx = &agent.ctx;
    ctx.faults
        .reach(Point::StopRecorded)
        .await
        .map_err(Trouble::from)?;
    end_box(agent, from, grace, "stop").await?;
    ctx.faults
        .reach(Point::StopBoxGone)
        .await
        .map_err(Trouble::from)?;
    // Its files are all that is left of it, and whoever is told so may turn the machine off.
    match ctx.homes.generation(&agent.profile.id).await {
        Ok(_) | Err(EngineError::NoHome(_)) => Ok(()),
        Err(error) => Err(Setback::at(Rest::Stopped, Trouble::engine(UNWRITTEN)(error))),
    }
}

/// Nothing is left of the box when this returns.
pub(super) async fn end_box(
    agent: &Arc<Agent>,
    from: Rest,
    grace: Duration,
    verb: &'static str,
) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    if from == Rest::Standby && !grace.is_zero() {
        // Processes that are frozen cannot end by themselves.
        agent.now_differs_from_image();
        if let Err(error) = ctx.engine.thaw(id).await {
            tracing::warn!(agent = %agent.profile.name, %error, "could not be thawed to be stopped");
        }
        ctx.faults.reach(Point::StopThawed).await?;
    }
    ctx.engine.stop(id, grace).await.map_err(Trouble::engine(verb))
}

/// Clears away a box that ended by itself.
pub(super) async fn settle(agent: &Arc<Agent>) -> Result<(), Trouble> {
    let ctx = &agent.ctx;
    ctx.faults.reach(Point::SettleBegun).await?;
    ctx.engine
        .stop(&agent.profile.id, Duration::ZERO)
        .await
        .map_err(Trouble::engine("be cleared away"))?;
    ctx.faults.reach(Point::SettleBoxGone).await?;
    Ok(())
}
