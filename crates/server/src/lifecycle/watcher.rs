//! Waits for the end of one box. Lives as long as the box does.

use std::sync::Arc;

use super::Agent;
use super::agent::Asked;
use super::decide::Request;

pub(super) fn spawn(agent: &Arc<Agent>, generation: u64) {
    tokio::spawn(watch(agent.clone(), generation));
}

async fn watch(agent: Arc<Agent>, generation: u64) {
    let mut published = agent.subscribe();
    let replaced = published.wait_for(|now| now.current_box.is_none() || now.generation != generation);
    tokio::select! {
        exit = agent.ctx.engine.exited(&agent.profile.id) => {
            let reason = match exit {
                Ok(exit) => exit.reason,
                Err(error) => error.to_string(),
            };
            tracing::info!(agent = %agent.profile.name, %reason, "a box ended by itself");
            agent.enqueue(Asked { request: Request::BoxExited { generation, reason, saved: false }, reply: None });
        }
        _ = replaced => {}
        () = agent.ctx.closed.cancelled() => {}
    }
}
