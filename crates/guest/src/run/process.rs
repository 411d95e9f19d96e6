//! One run: its process, its descriptors, its output, and how it ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use connectrpc::ConnectError;
use dorm_proto::process::process_event::EndEvent;
use dorm_proto::process::{ProcessConfig, ProcessInfo};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, watch};

use super::output::Output;
use super::pty;
use crate::sys;

pub(crate) struct Run {
    pub(crate) id: String,
    pub(crate) pid: i32,
    pub(crate) tag: Option<String>,
    pub(crate) keep: bool,
    pub(super) keeps_awake: bool,
    pub(crate) output: Arc<Output>,
    pub(super) config: ProcessConfig,
    pub(super) user: String,
    pub(super) started_ms: i64,
    /// The guest's end of the terminal, if the run has one.
    pub(super) terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    pub(super) stdin: Mutex<Option<AsyncFd<OwnedFd>>>,
    /// Bytes of the input that says where it belongs. Locked by whoever writes of it.
    pub(super) fed: Mutex<u64>,
    /// The wait status, once process 1 has it.
    pub(super) exit: watch::Sender<Option<i32>>,
    pub(super) timed_out: AtomicBool,
    pub(super) end: OnceLock<End>,
}

pub(crate) struct End {
    pub(crate) event: EndEvent,
    pub(super) ended_ms: i64,
}

/// Describes a wait status as E2B's envd does.
pub(super) fn describe(status: i32, timed_out: bool, oom: bool) -> EndEvent {
    let mut event = EndEvent {
        timed_out,
        oom,
        ..Default::default()
    };
    if libc::WIFEXITED(status) {
        event.exit_code = libc::WEXITSTATUS(status);
        event.exited = true;
        event.status = format!("exit status {}", event.exit_code);
    } else {
        let signal = libc::WTERMSIG(status);
        event.exit_code = -1;
        event.signal = signal.unsigned_abs();
        event.status = format!("signal: {}", signal_name(signal));
    }
    if !event.exited || event.exit_code != 0 {
        event.error = Some(event.status.clone());
    }
    event
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        _ => return signal.to_string(),
    };
    name.to_owned()
}

impl Run {
    pub(crate) fn ended(&self) -> Option<&End> {
        self.end.get()
    }

    /// The process is there to be signalled: its pid is not anyone else's before it is reaped.
    pub(crate) fn alive(&self) -> bool {
        self.exit.borrow().is_none()
    }

    pub(crate) fn info(&self) -> ProcessInfo {
        let end = self.ended();
        ProcessInfo {
            config: self.config.clone().into(),
            pid: self.pid.unsigned_abs(),
            tag: self.tag.clone(),
            run_id: self.id.clone(),
            started_ms: self.started_ms,
            user: self.user.clone(),
            ended: end.is_some(),
            exit_code: end.map(|e| e.event.exit_code),
            output_bytes: self.output.len(),
            keep: self.keep,
            ended_ms: end.map(|e| e.ended_ms),
            signal: end.map_or(0, |e| e.event.signal),
            timed_out: end.is_some_and(|e| e.event.timed_out),
            pty: self.terminal.is_some(),
            keeps_awake: Some(self.keeps_awake),
            ..Default::default()
        }
    }

    fn gone(&self) -> ConnectError {
        ConnectError::failed_precondition(format!("run {} has ended", self.id))
    }

    /// Writes to the terminal or to the standard input, waiting until the process takes it.
    pub(crate) async fn input(&self, data: &[u8], to_terminal: bool) -> Result<(), ConnectError> {
        self.write(data, to_terminal, |_| {}).await
    }

    /// As [`Run::input`], of data that begins at `offset` of all that is written so. What was written before is passed over,
    /// also if whoever sent it went away in the midst of it.
    pub(crate) async fn feed(&self, data: &[u8], to_terminal: bool, offset: u64) -> Result<(), ConnectError> {
        let mut fed = self.fed.lock().await;
        let known = fed.checked_sub(offset).ok_or_else(|| {
            ConnectError::invalid_argument(format!(
                "the input begins at {offset}, and the run has had {} bytes of it",
                *fed
            ))
        })?;
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        let new = data.get(known..).unwrap_or_default();
        self.write(new, to_terminal, |written| *fed += written as u64)
            .await
    }

    async fn write(
        &self,
        data: &[u8],
        to_terminal: bool,
        written: impl FnMut(usize),
    ) -> Result<(), ConnectError> {
        let mut exit = self.exit.subscribe();
        let write = async {
            match &self.terminal {
                Some(terminal) if to_terminal => {
                    sys::write_all(terminal, data, written).await.map_err(io_gone)
                }
                None if !to_terminal => match &*self.stdin.lock().await {
                    Some(stdin) => sys::write_all(stdin, data, written).await.map_err(io_gone),
                    None => Err(ConnectError::failed_precondition("standard input is closed")),
                },
                Some(_) => Err(ConnectError::invalid_argument(
                    "the run has a PTY: send its input as 'pty'",
                )),
                None => Err(ConnectError::invalid_argument(
                    "the run has no PTY: send its input as 'stdin'",
                )),
            }
        };
        tokio::select! {
            biased;
            _ = exit.wait_for(Option::is_some) => Err(self.gone()),
            written = write => written,
        }
    }

    pub(crate) async fn close_stdin(&self) -> Result<(), ConnectError> {
        if self.terminal.is_some() {
            return Err(ConnectError::failed_precondition(
                "the run has a PTY, whose input ends with the character Ctrl+D",
            ));
        }
        self.stdin.lock().await.take();
        Ok(())
    }

    pub(crate) fn resize(&self, cols: u32, rows: u32) -> Result<(), ConnectError> {
        let terminal = self
            .terminal
            .as_ref()
            .ok_or_else(|| ConnectError::failed_precondition("the run has no PTY to resize"))?;
        let (cols, rows) = window(cols, rows)?;
        pty::resize(terminal.get_ref(), cols, rows)
            .map_err(|e| ConnectError::internal(format!("the PTY cannot be resized: {e}")))?;
        if sys::is_gvisor() {
            self.tell_of_resize();
        }
        Ok(())
    }

    /// To all of the terminal's session: gVisor itself tells nobody, and whoever does not mind is not harmed.
    fn tell_of_resize(&self) {
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
            if sys::session_of(pid) == Some(self.pid) {
                let _ = sys::kill(pid, libc::SIGWINCH);
            }
        }
    }

    /// Signals the process, or its group; with a terminal, the group in the foreground.
    pub(crate) fn signal(&self, signal: i32, group: bool) -> Result<(), ConnectError> {
        // As of one that was never there: clients take it for done.
        let gone = || ConnectError::not_found(format!("run {} has ended", self.id));
        if !self.alive() {
            return Err(gone());
        }
        let target = match &self.terminal {
            _ if !group => self.pid,
            Some(terminal) => -pty::foreground(terminal.get_ref().as_fd())
                .ok()
                .filter(|g| *g > 1)
                .unwrap_or(self.pid),
            None => -self.pid,
        };
        sys::kill(target, signal).map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL) => ConnectError::invalid_argument(format!("there is no signal {signal}")),
            Some(libc::ESRCH) => gone(),
            _ => ConnectError::internal(format!("cannot send signal {signal}: {e}")),
        })
    }

    /// Ends the whole process group at its deadline.
    pub(super) fn time_out(&self) {
        self.timed_out.store(true, Ordering::Relaxed);
        if self.alive() {
            let _ = sys::kill(-self.pid, libc::SIGKILL);
        }
    }

    /// What a terminal's users get when it goes away: interactive shells heed no other signal.
    pub(crate) fn hang_up(&self) {
        if self.alive() && self.terminal.is_some() {
            let _ = self.signal(libc::SIGHUP, true);
            let _ = sys::kill(-self.pid, libc::SIGHUP);
        }
    }
}

fn io_gone(e: io::Error) -> ConnectError {
    match e.kind() {
        io::ErrorKind::BrokenPipe => {
            ConnectError::failed_precondition("the process has closed its standard input")
        }
        _ => ConnectError::failed_precondition(format!("the input cannot be written: {e}")),
    }
}

/// A window size as the kernel takes it.
pub(super) fn window(cols: u32, rows: u32) -> Result<(u16, u16), ConnectError> {
    match (u16::try_from(cols), u16::try_from(rows)) {
        (Ok(cols), Ok(rows)) => Ok((cols, rows)),
        _ => Err(ConnectError::invalid_argument(
            "a PTY has at most 65535 columns and rows",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_described_as_envd_does() {
        let ok = describe(0, false, false);
        assert_eq!(
            (ok.exit_code, ok.exited, ok.status.as_str(), ok.error),
            (0, true, "exit status 0", None)
        );
        let failed = describe(3 << 8, false, false);
        assert_eq!(
            (failed.exit_code, failed.error.as_deref()),
            (3, Some("exit status 3"))
        );
        let killed = describe(libc::SIGKILL, true, false);
        assert_eq!(
            (killed.exit_code, killed.exited, killed.signal, killed.timed_out),
            (-1, false, 9, true)
        );
        assert_eq!(killed.status, "signal: killed");
    }
}
