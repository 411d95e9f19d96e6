//! The orderly end of a box: everyone is asked to end at the first SIGTERM, and made to at the second. How long to
//! wait in between is the daemon's to know.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::Signal;

use crate::log::log;
use crate::reaper::Reaped;
use crate::run::{Run, Runs};
use crate::sys;

/// What is left for clients to hear of it.
const FAREWELL: Duration = Duration::from_millis(500);

/// Signals every other process of the box; outside of a box, only the runs.
fn signal_all(runs: &[Arc<Run>], signal: i32) {
    if sys::is_init() {
        let _ = sys::kill(-1, signal);
        return;
    }
    for run in runs.iter().filter(|r| r.alive()) {
        let _ = run.signal(signal, true);
    }
}

pub(crate) async fn stop(runs: &Runs, mut children: Reaped, mut terminate: Signal) {
    log!("stopping");
    let running = runs.stop();
    signal_all(&running, libc::SIGTERM);
    for run in &running {
        run.hang_up();
    }
    // A process that is stopped hears no other signal.
    signal_all(&running, libc::SIGCONT);
    let all_ended = tokio::select! {
        () = children.all() => true,
        _ = terminate.recv() => false,
    };
    if !all_ended {
        log!("some processes did not end in time and are killed");
        signal_all(&running, libc::SIGKILL);
        let _ = tokio::time::timeout(Duration::from_secs(1), children.all()).await;
    }
    let told = tokio::time::timeout(FAREWELL, tell_clients(&running)).await;
    log!(
        "stopped{}",
        if told.is_err() {
            ", not every client has seen the end of its run"
        } else {
            ""
        }
    );
}

/// Waits until whoever reads a run's output has had its end.
async fn tell_clients(runs: &[Arc<Run>]) {
    if runs.iter().all(|r| !r.output.has_readers()) {
        return;
    }
    while runs.iter().any(|r| r.output.has_readers()) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // A reader is done when the last event is handed to its connection, which still has to write it.
    tokio::time::sleep(Duration::from_millis(10)).await;
}
