//! A launcher as the daemon sees it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use dorm_sys::process::Process;
use tokio::process::Child;

use super::{Job, Preparation, Report, SUBCOMMAND, Spec};
use crate::packet::PacketSocket;

/// It ends at once, unless somebody holds it.
const ENDED_WITHIN: Duration = Duration::from_secs(2);
/// Bytes of a text that are told.
const LONGEST: usize = 1024;

/// One that is prepared and waits for what to do.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) process: Child,
    pub(crate) socket: PacketSocket,
}

impl Launcher {
    /// Starts `program` as a launcher that is a member of the groups of `join`, with the filter of a box's system calls if it is to have one.
    pub(crate) async fn start(program: &Path, join: Vec<PathBuf>, filter: Option<&[u8]>) -> io::Result<Self> {
        Self::start_with(program, join, filter, Stdio::null()).await
    }

    /// The same, with a standard output of its own.
    pub(crate) async fn start_with(
        program: &Path,
        join: Vec<PathBuf>,
        filter: Option<&[u8]>,
        output: Stdio,
    ) -> io::Result<Self> {
        let (socket, theirs) = PacketSocket::pair()?;
        let process = tokio::process::Command::new(program)
            .arg(SUBCOMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(output)
            .kill_on_drop(true)
            .spawn()?;
        let launcher = Self { process, socket };
        let prepared = launcher.prepare(join, filter).await;
        launcher.unless_failed(prepared).await
    }

    async fn unless_failed(self, done: io::Result<()>) -> io::Result<Self> {
        match done {
            Ok(()) => Ok(self),
            Err(error) => {
                self.end().await;
                Err(error)
            }
        }
    }

    async fn prepare(&self, join: Vec<PathBuf>, filter: Option<&[u8]>) -> io::Result<()> {
        let preparation = Preparation {
            join,
            filter: filter.is_some(),
        };
        self.socket.send_json(&preparation).await?;
        if let Some(filter) = filter {
            self.socket.send(filter).await?;
        }
        self.expect(&Report::Prepared).await
    }

    /// Tells it what to launch, and learns who process 1 is.
    pub(crate) async fn launch(&self, spec: &Spec) -> io::Result<Process> {
        self.socket.send_json(spec).await?;
        match self.report().await? {
            Report::Pid(pid) => Process::open(pid),
            other => Err(unexpected(&other)),
        }
    }

    /// Has it become CRIU.
    pub(crate) async fn become_criu(self, job: Job) -> io::Result<Self> {
        let become_so = async {
            self.socket.send_json(&Spec::without_home(job)).await?;
            self.expect(&Report::Executing).await
        };
        let done = become_so.await;
        self.unless_failed(done).await
    }

    /// Has it set the stage for a CRIU that waits.
    pub(crate) async fn stage(&self, spec: &Spec) -> io::Result<()> {
        self.socket.send_json(spec).await?;
        self.expect(&Report::Staged).await
    }

    /// What it says next. A failure, or what is no report, is an error in those words.
    pub(super) async fn report(&self) -> io::Result<Report> {
        let said = self.socket.receive().await?;
        match serde_json::from_slice(&said) {
            Ok(Report::Failed(_)) | Err(_) => Err(io::Error::other(complaint(&said))),
            Ok(report) => Ok(report),
        }
    }

    async fn expect(&self, wanted: &Report) -> io::Result<()> {
        match self.report().await? {
            report if report == *wanted => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Zero, which no process has, once it was waited for.
    pub(crate) fn pid(&self) -> i32 {
        self.process
            .id()
            .and_then(|pid| pid.try_into().ok())
            .unwrap_or_default()
    }

    /// For one that does not come to an end. Returns when it has, if it does so at once.
    pub(crate) async fn kill(&mut self) {
        let _ = tokio::time::timeout(ENDED_WITHIN, self.process.kill()).await;
    }

    /// Lets it end, and waits for that. One that has nothing to do and does not end is killed.
    pub(crate) async fn end(self) {
        let Self { mut process, socket } = self;
        drop(socket);
        if tokio::time::timeout(ENDED_WITHIN, process.wait()).await.is_err() {
            let _ = process.kill().await;
        }
    }
}

pub(super) fn unexpected(report: &Report) -> io::Error {
    io::Error::other(tellable(&format!("the launcher said {report:?}")))
}

/// What a launcher, or the program that it has become, says of its end.
pub(crate) fn complaint(packet: &[u8]) -> String {
    match serde_json::from_slice(packet) {
        Ok(Report::Failed(reason)) => tellable(&reason),
        _ => tellable(&String::from_utf8_lossy(packet)),
    }
}

/// What is told of a text that a box, or a program that it may have taken over, has written: so much of it, and nothing that steers a
/// terminal.
pub(crate) fn tellable(text: &str) -> String {
    let text = text.trim();
    text[..text.floor_char_boundary(LONGEST)].replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_a_box_says_a_kilobyte_is_told_without_what_steers_a_terminal() {
        assert_eq!(tellable("  no\n\u{1b}[2Jroom \n"), "no  [2Jroom");
        let long = tellable(&"\u{20ac}".repeat(LONGEST));
        assert!(long.len() <= LONGEST && long.chars().all(|c| c == '\u{20ac}'));
        assert_eq!(complaint(br#"{"failed":"mount /: no"}"#), "mount /: no");
        assert_eq!(complaint(b"qemu: no\n"), "qemu: no");
    }
}
