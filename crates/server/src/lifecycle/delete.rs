//! `deleting`: box, home, snapshots, memory images, record, in this order, so that the record remains until all else is gone.
//! Snapshots that are kept outlive it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Agent, Trouble, images};
use crate::faults::Point;

pub(super) async fn delete(agent: &Arc<Agent>) -> Result<(), Trouble> {
    let (ctx, id) = (&agent.ctx, &agent.profile.id);
    ctx.faults.reach(Point::DeleteRecorded).await?;
    let gone = match agent.published().current_box {
        Some(_) => ctx.engine.stop(id, Duration::ZERO).await,
        None => ctx.engine.sweep(id).await,
    };
    gone.map_err(Trouble::engine("be deleted"))?;
    agent.publish_no_box();
    ctx.faults.reach(Point::DeleteBoxGone).await?;
    ctx.homes
        .delete(id)
        .await
        .map_err(Trouble::engine("be deleted"))?;
    ctx.faults.reach(Point::DeleteHomeGone).await?;
    let mut kept = HashSet::new();
    for snapshot in ctx.store.snapshots_of(id).await? {
        if snapshot.origin.is_some() {
            kept.insert(snapshot.id);
            continue;
        }
        ctx.homes
            .delete_snapshot(&snapshot.id)
            .await
            .map_err(Trouble::engine("be deleted"))?;
    }
    ctx.faults.reach(Point::DeleteSnapshotsGone).await?;
    images::remove_all_but(agent, &kept).await;
    ctx.faults.reach(Point::DeleteImagesGone).await?;
    if let Err(error) = ctx.departures.keep(agent, &*ctx.store).await {
        tracing::warn!(agent = %agent.profile.name, %error, "whoever follows its events may miss the last");
    }
    ctx.store.delete_agent(id).await?;
    Ok(())
}
