//! Makes an agent: home first, then the record, which decides; a home without a record is swept at
//! the next start.

use std::sync::Arc;

use dorm_engine::Id;

use super::decide::{Rest, Transition};
use super::registry::Context;
use super::{Agent, Trouble, driver};
use crate::faults::Point;
use crate::records::{
    AgentRecord, AgentSpec, Lifetime, NewAgentRecord, Reach, SandboxRecord, State, Status, Workspace,
};

/// What an agent is to be.
#[derive(Debug, Clone)]
pub struct Creation {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    /// Name or id.
    pub template: String,
    pub lifetime: Lifetime,
    pub spec: AgentSpec,
    pub reach: Reach,
    pub start: bool,
    /// If it is made through the E2B API.
    pub sandbox: Option<SandboxRecord>,
}

pub(super) async fn create(ctx: Arc<Context>, creation: Creation) -> Result<Arc<Agent>, Trouble> {
    let start = creation.start;
    let id = creation.id.clone();
    let record = match make(&ctx, &id, creation).await {
        Ok(record) => record,
        Err(trouble) => {
            if let Err(error) = ctx.homes.delete(&id).await {
                tracing::error!(%id, %error, "the home of an agent that was not created is left");
            }
            return Err(trouble);
        }
    };
    let agent = Agent::new(ctx.clone(), record);
    if !start {
        ctx.enroll(&agent);
        return Ok(agent);
    }
    let started = driver::resume(&agent, Transition::Start { why: "created" }, Rest::Stopped);
    ctx.enroll(&agent);
    match started.await.unwrap_or(Err(Trouble::ShuttingDown)) {
        Ok(()) => Ok(agent),
        Err(trouble) => {
            if let Err(error) = agent.delete().await {
                tracing::error!(agent = %agent.profile.name, reason = %error.in_full(), "is left, and failed");
            }
            Err(trouble)
        }
    }
}

async fn make(ctx: &Arc<Context>, id: &Id, creation: Creation) -> Result<AgentRecord, Trouble> {
    let template = ctx
        .store
        .template_by_name_or_id(&creation.workspace, &creation.template)
        .await?;
    let disk = creation.spec.limits.disk;
    ctx.homes
        .create(id, &template.id, disk)
        .await
        .map_err(Trouble::engine("be created"))?;
    ctx.faults.reach(Point::CreateHomeMade).await?;
    // Written as `starting` at once: one commit less than `stopped` first.
    let state = if creation.start {
        State::Starting
    } else {
        State::Stopped
    };
    let new = NewAgentRecord {
        id: id.clone(),
        workspace: creation.workspace,
        name: creation.name,
        template_id: template.id,
        template_name: template.name,
        lifetime: creation.lifetime,
        spec: creation.spec,
        defaults: template.defaults,
        status: Status::now(state, "created"),
        uid_base: None,
        image: None,
        reach: creation.reach,
        sandbox: creation.sandbox,
    };
    let record = ctx.store.insert_agent(&new, ctx.slots).await?;
    ctx.recorded.send_modify(|count| *count += 1);
    if let Err(fault) = ctx.faults.reach(Point::CreateRecorded).await {
        ctx.store.delete_agent(id).await?;
        return Err(fault.into());
    }
    Ok(record)
}
