//! A sandbox whose template has a ready command is there once that succeeds.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::errors::{Error, Result};
use super::view::Found;
use crate::api::AppState;
use crate::guest_client::{GuestClient, Next, Run};

/// The SDKs wait for a minute.
const PATIENCE: Duration = Duration::from_secs(50);
const PAUSE: Duration = Duration::from_millis(200);
const SHELL: &str = r#"if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec /bin/sh -l -c "$1""#;

/// Deletes the sandbox again if it does not become ready.
pub(super) async fn wait(state: &AppState, found: &Found, command: &str) -> Result<()> {
    let agent = &found.agent;
    let _open = agent.open_request();
    let guest = GuestClient::new(state.engine.clone(), agent.profile.id.clone());
    let user = agent.profile.defaults.user.as_deref().unwrap_or("root");
    let asking = async {
        while !succeeds(&guest, user, command).await {
            sleep(PAUSE).await;
        }
    };
    if timeout(PATIENCE, asking).await.is_ok() {
        return Ok(());
    }
    match agent.delete().await {
        Ok(()) => state.sandboxes.forget(&agent.profile.id),
        Err(trouble) => {
            tracing::error!(agent = %agent.profile.name, reason = %trouble.in_full(), "is left, and not ready");
        }
    }
    let seconds = PATIENCE.as_secs();
    Err(Error::new(
        http::StatusCode::INTERNAL_SERVER_ERROR,
        format!("the template's ready command did not succeed within {seconds} seconds: {command}"),
    ))
}

async fn succeeds(guest: &GuestClient, user: &str, command: &str) -> bool {
    let run = Run {
        command: "/bin/sh",
        args: &["-c", SHELL, "sh", command],
        user,
        workdir: None,
        env: BTreeMap::new(),
    };
    let Ok(mut running) = guest.start(&run).await else {
        return false;
    };
    loop {
        match running.next().await {
            Ok(Next::Output(_)) => {}
            Ok(Next::End(exit)) => return exit.succeeded(),
            Err(_) => return false,
        }
    }
}
