//! Short work on a home, by a process that has nothing but that home: the daemon's side.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use super::{Launcher, Report, Spec};

/// Starts such a process, and waits for what it has to say, and for its end.
pub(super) async fn run(
    launcher: &Path,
    spec: &Spec,
    output: Stdio,
    within: Option<Duration>,
) -> io::Result<Report> {
    let launcher = Launcher::start_with(launcher, Vec::new(), None, output).await?;
    let process = match launcher.launch(spec).await {
        Ok(process) => process,
        Err(error) => {
            launcher.end().await;
            return Err(error);
        }
    };
    let said = async {
        match launcher.report().await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(io::Error::other("the process ended without a word"))
            }
            said => said,
        }
    };
    let said = match within {
        None => said.await,
        Some(within) => tokio::time::timeout(within, said).await.unwrap_or_else(|_| {
            let late = format!("it is not done after {} s", within.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, late))
        }),
    };
    // Process 1 is a child of this process, not of the launcher.
    let _ = process.signal(rustix::process::Signal::KILL);
    crate::host::ended(&process).await;
    launcher.end().await;
    said
}
