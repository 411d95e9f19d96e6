//! Process 1 is the parent of every orphan. One task waits for all children, so that no exit status of a run is lost
//! to somebody else's wait.

use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::run::Runs;

/// Tells when children were reaped.
pub(crate) struct Reaped(watch::Receiver<()>);

impl Reaped {
    /// Waits until there is no child. Asked of the kernel each time: a child that was started since the last one
    /// ended has sent no signal yet.
    pub(crate) async fn all(&mut self) {
        loop {
            self.0.borrow_and_update();
            if !children_left() || self.0.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Reaps until the process ends.
pub(crate) fn start(runs: Arc<Runs>) -> std::io::Result<Reaped> {
    let mut child_signal = signal(SignalKind::child())?;
    let (rounds, watched) = watch::channel(());
    tokio::spawn(async move {
        loop {
            reap(&runs);
            rounds.send_replace(());
            if child_signal.recv().await.is_none() {
                return;
            }
        }
    });
    Ok(Reaped(watched))
}

fn children_left() -> bool {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::uninit();
    // SAFETY: waitid writes one siginfo_t, which is not read. WNOWAIT leaves the child to `reap`.
    unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags) == 0 }
}

/// Collects every child that has ended.
fn reap(runs: &Runs) {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int. __WALL also finds children that end with another signal than SIGCHLD.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        match pid {
            0 => return,
            pid if pid > 0 => runs.exited(pid, status),
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}
