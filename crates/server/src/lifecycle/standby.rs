//! `freezing` and back: to standby, where a box is in memory and gets no CPU, and out of it.

use std::sync::Arc;

use tokio::time::Instant;

use super::transition::Setback;
use super::{Agent, Trouble};
use crate::faults::Point;
use crate::lifecycle::decide::Rest;

/// The agent is published as `freezing` already, so that whoever comes now waits.
pub(super) async fn freeze(agent: &Arc<Agent>, if_idle: Option<Instant>) -> Result<(), Setback> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    if let Some(since) = if_idle {
        // Somebody may have come, or asked for it to stay awake, since it was found idle. Who has gone again may have begun
        // something: the requests come first, as each is noted as a use of it before it is over.
        let open = agent.open_requests() > 0;
        if open || agent.quiet_since() != since || agent.sleep().is_never() || agent.is_held() {
            return Err(Setback::at(Rest::Running, Trouble::InUse));
        }
    }
    // A kept connection would stand in the way of a memory image later.
    if agent.open_requests() == 0 {
        agent.cut_links().await;
    }
    let frozen = match ctx.faults.reach(Point::FreezeBegun).await {
        Ok(()) => ctx.engine.freeze(id).await.map_err(Trouble::engine("be paused")),
        Err(fault) => Err(fault.into()),
    };
    let frozen = match frozen {
        Ok(()) => ctx.faults.reach(Point::FreezeFrozen).await.map_err(Trouble::from),
        Err(trouble) => Err(trouble),
    };
    match frozen {
        Ok(()) => Ok(()),
        // Perhaps some of it is frozen.
        Err(trouble) => Err(thawed_again(agent, trouble).await),
    }
}

/// Lets a box go on that could not be put to sleep.
pub(super) async fn thawed_again(agent: &Arc<Agent>, trouble: Trouble) -> Setback {
    agent.now_differs_from_image();
    match agent.ctx.engine.thaw(&agent.profile.id).await {
        Ok(()) => Setback::at(Rest::Running, trouble),
        Err(error) => {
            tracing::error!(agent = %agent.profile.name, %error, "a box could not be thawed again");
            Setback::at(Rest::Standby, trouble)
        }
    }
}

/// Leaves an agent that was held still for something as it was.
pub(super) async fn as_before(agent: &Arc<Agent>, from: Rest, trouble: Trouble) -> Setback {
    match from {
        Rest::Running => thawed_again(agent, trouble).await,
        // It may have gone on for a moment.
        Rest::Standby => match agent.ctx.engine.freeze(&agent.profile.id).await {
            Ok(()) => Setback::at(from, trouble),
            Err(_) => thawed_again(agent, trouble).await,
        },
        Rest::Hibernated | Rest::Stopped | Rest::Failed => Setback::at(from, trouble),
    }
}

/// What nobody waits for the disk for.
pub(super) async fn thaw(agent: &Arc<Agent>) -> Result<(), Setback> {
    let still = |trouble| Setback::at(Rest::Standby, trouble);
    let ctx = &agent.ctx;
    ctx.faults
        .reach(Point::ThawBegun)
        .await
        .map_err(|fault| still(fault.into()))?;
    // From the first instruction on, the memory is not what the image holds.
    agent.now_differs_from_image();
    ctx.engine
        .thaw(&agent.profile.id)
        .await
        .map_err(|error| still(Trouble::engine("wake")(error)))?;
    match ctx.faults.reach(Point::ThawThawed).await {
        Ok(()) => Ok(()),
        Err(fault) => {
            let frozen = ctx.engine.freeze(&agent.profile.id).await;
            let left = if frozen.is_ok() {
                Rest::Standby
            } else {
                Rest::Running
            };
            Err(Setback::at(left, fault.into()))
        }
    }
}
