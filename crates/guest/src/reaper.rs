//! Process 1 is the parent of every orphan. One task waits for all children, so that no exit status of a run is lost
//! to somebody else's wait.

use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::run::Runs;

/// Reaps until the process ends. The channel says whether children are left.
pub(crate) fn start(runs: Arc<Runs>) -> std::io::Result<watch::Receiver<bool>> {
    let mut child_signal = signal(SignalKind::child())?;
    let (children, watched) = watch::channel(true);
    tokio::spawn(async move {
        loop {
            let left = reap(&runs);
            children.send_if_modified(|was| std::mem::replace(was, left) != left);
            if child_signal.recv().await.is_none() {
                return;
            }
        }
    });
    Ok(watched)
}

/// Collects every child that has ended; whether others are left.
fn reap(runs: &Runs) -> bool {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int. __WALL also finds children that end with another signal than SIGCHLD.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        match pid {
            0 => return true,
            pid if pid > 0 => runs.exited(pid, status),
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}
