//! `starting`: from files to a guest that answers.

use std::sync::Arc;

use dorm_engine::BoxRecord;

use super::{Agent, Trouble};
use crate::faults::Point;
use crate::records::State;

pub(super) async fn start(agent: &Arc<Agent>, from: State) -> Result<BoxRecord, Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::StartRecorded).await?;
    if let Some(damage) = &agent.profile.damage {
        return Err(Trouble::Damaged(format!("its record is damaged: {damage}")));
    }
    if from == State::Failed {
        // A stop may have failed half-way.
        ctx.engine.sweep(id).await.map_err(Trouble::engine("start"))?;
    }
    let record = ctx
        .engine
        .start(&agent.box_spec())
        .await
        .map_err(Trouble::engine("start"))?;
    if let Err(fault) = ctx.faults.reach(Point::StartBoxUp).await {
        let _ = ctx.engine.sweep(id).await;
        return Err(fault.into());
    }
    Ok(record)
}
