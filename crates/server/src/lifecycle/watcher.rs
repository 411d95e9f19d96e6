//! Waits for the end of one box. Lives as long as the box does, and until its end is dealt with.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::Agent;
use super::decide::Request;
use super::lag::AGAIN;

/// Between two tries to deal with an end, which double from the first.
const AT_LAST: Duration = Duration::from_secs(30);

pub(super) fn spawn(agent: &Arc<Agent>, generation: u64) {
    tokio::spawn(watch(agent.clone(), generation));
}

async fn watch(agent: Arc<Agent>, generation: u64) {
    let mut published = agent.subscribe();
    let replaced = published.wait_for(|now| now.current_box.is_none() || now.generation != generation);
    let ended = async {
        let reason = match agent.ctx.engine.exited(&agent.profile.id).await {
            Ok(exit) => exit.reason,
            Err(error) => error.to_string(),
        };
        tracing::info!(agent = %agent.profile.name, %reason, "a box ended by itself");
        let exited = || Request::BoxExited {
            generation,
            reason: reason.clone(),
            saved: false,
        };
        // What follows may have to be recorded first, on a disk that is full.
        let mut pause = AGAIN;
        while agent.ask(exited()).await.is_err() {
            sleep(pause).await;
            pause = (pause * 2).min(AT_LAST);
        }
    };
    tokio::select! {
        () = ended => {}
        _ = replaced => {}
        () = agent.ctx.closed.cancelled() => {}
    }
}
