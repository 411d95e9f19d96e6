//! QEMU's control socket: QMP, one JSON object a line.
//!
//! Written here and not taken from a library, since a machine's state goes to and comes from a file that QEMU
//! could not open: its descriptor is sent along with a command, which no client at hand can do.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Interest};
use tokio::net::UnixStream;

use crate::launch::tellable;

/// An answer takes a fraction of a millisecond, unless the host is very busy.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Longest line that is read. QEMU is not trusted to keep to any.
const LONGEST: usize = 1 << 20;
const MIGRATION: &str = "MIGRATION";
/// A migration goes through a handful of states.
const MOST_EVENTS: usize = 64;

pub(crate) struct Monitor {
    /// Of the QEMU that runs: a newer one may have been installed since.
    pub(crate) version: String,
    stream: BufReader<UnixStream>,
    /// Events that came while an answer was waited for.
    events: Vec<Value>,
}

impl Monitor {
    pub(crate) async fn open(stream: UnixStream) -> io::Result<Self> {
        let mut monitor = Self {
            version: String::new(),
            stream: BufReader::new(stream),
            events: Vec::new(),
        };
        let greeting = tokio::time::timeout(ANSWER_WITHIN, monitor.line()).await??;
        let version = &greeting["QMP"]["version"]["qemu"];
        let [major, minor, micro] = ["major", "minor", "micro"].map(|part| &version[part]);
        monitor.version = tellable(&format!("qemu {major}.{minor}.{micro}"));
        monitor.execute("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }

    pub(crate) async fn execute(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        self.execute_with(command, arguments, None).await
    }

    async fn execute_with(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        let answer = tokio::time::timeout(ANSWER_WITHIN, async {
            self.send(line.as_bytes(), descriptor).await?;
            loop {
                let mut message = self.line().await?;
                if let Some(answer) = message.get_mut("return") {
                    return Ok(answer.take());
                }
                if let Some(error) = message.get("error") {
                    let reason = error["desc"].as_str().unwrap_or("no reason is given");
                    let reason = tellable(reason);
                    return Err(io::Error::other(format!("QEMU refuses {command}: {reason}")));
                }
                self.keep(message);
            }
        });
        answer
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("QEMU does not answer {command}")))?
    }

    /// For whoever waits for the event later. Of other events, which a machine can cause as it likes, nothing is kept.
    fn keep(&mut self, event: Value) {
        if event["event"] == MIGRATION && self.events.len() < MOST_EVENTS {
            self.events.push(event);
        }
    }

    async fn send(&mut self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            let stream = self.stream.get_ref();
            stream.writable().await?;
            let result = stream.try_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let fds: Vec<BorrowedFd<'_>> = descriptor.filter(|_| sent == 0).into_iter().collect();
                if !fds.is_empty() {
                    control.push(SendAncillaryMessage::ScmRights(&fds));
                }
                let rest = [io::IoSlice::new(&bytes[sent..])];
                Ok(rustix::net::sendmsg(
                    stream,
                    &rest,
                    &mut control,
                    SendFlags::NOSIGNAL,
                )?)
            });
            match result {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn line(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        loop {
            let part = self.stream.fill_buf().await?;
            if part.is_empty() {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "QEMU has ended"));
            }
            let end = part.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let taken = end.unwrap_or(part.len());
            line.extend_from_slice(&part[..taken]);
            self.stream.consume(taken);
            if end.is_some() {
                return Ok(serde_json::from_slice(&line)?);
            }
            if line.len() > LONGEST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "QEMU talks too much"));
            }
        }
    }

    /// Whether the machine's processors run.
    pub(crate) async fn is_running(&mut self) -> io::Result<bool> {
        let status = self.execute("query-status", json!({})).await?;
        Ok(status["running"].as_bool() == Some(true))
    }

    pub(crate) async fn stop(&mut self) -> io::Result<()> {
        self.execute("stop", json!({})).await.map(drop)
    }

    pub(crate) async fn go_on(&mut self) -> io::Result<()> {
        self.execute("cont", json!({})).await.map(drop)
    }

    /// Has QEMU write the state of the machine's devices to `file`, which it closes soon after. Its memory and its disk are in files of their own already.
    pub(crate) async fn save(&mut self, file: impl AsFd) -> io::Result<()> {
        let status = self.execute("query-status", json!({})).await?;
        if status["status"] == "postmigrate" {
            // QEMU saves no machine twice that has not run since. In this moment its guest still holds all processes.
            self.go_on().await?;
            self.stop().await?;
        }
        self.prepare(file.as_fd()).await?;
        // A file does not slow anybody down.
        let speed = json!({"max-bandwidth": 1u64 << 40});
        self.execute("migrate-set-parameters", speed).await?;
        self.execute("migrate", json!({"uri": "fd:state"})).await?;
        self.migrated().await
    }

    /// Reads what [`Monitor::save`] wrote, into a QEMU that waits for it. The machine stands still afterwards.
    pub(crate) async fn load(&mut self, file: impl AsFd) -> io::Result<()> {
        self.prepare(file.as_fd()).await?;
        self.execute("migrate-incoming", json!({"uri": "fd:state"}))
            .await?;
        self.migrated().await
    }

    async fn prepare(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let on = |capability: &str| json!({"capability": capability, "state": true});
        let capabilities = json!({"capabilities": [on("x-ignore-shared"), on("events")]});
        self.execute("migrate-set-capabilities", capabilities).await?;
        self.execute_with("getfd", json!({"fdname": "state"}), Some(file))
            .await
            .map(drop)
    }

    async fn migrated(&mut self) -> io::Result<()> {
        let end = async {
            loop {
                let event = match self.events.pop() {
                    Some(event) => event,
                    None => self.line().await?,
                };
                if event["event"] != MIGRATION {
                    continue;
                }
                match event["data"]["status"].as_str() {
                    Some("completed") => return Ok(()),
                    Some("failed" | "cancelled") => return Err(io::Error::other("it failed")),
                    _ => {}
                }
            }
        };
        let ended = tokio::time::timeout(ANSWER_WITHIN, end).await;
        let failure = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(late) => late.into(),
        };
        let said = self.execute("query-migrate", json!({})).await.unwrap_or_default();
        let reason = tellable(said["error-desc"].as_str().unwrap_or_default());
        let told = format!("the machine's state could not be moved: {failure} {reason}");
        Err(io::Error::new(failure.kind(), told))
    }

    /// The last of what the machine's kernel wrote to its console.
    pub(crate) async fn console(&mut self) -> io::Result<String> {
        let size = 4096;
        let read = json!({"device": "console", "size": size, "format": "utf8"});
        let text = self.execute("ringbuf-read", read).await?;
        Ok(text.as_str().unwrap_or_default().trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_monitor_says_which_version_runs() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let greeting =
            r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}}}"#;
        let said = format!("{greeting}\n{{\"return\": {{}}}}\n");
        qemu.write_all(said.as_bytes()).await.unwrap();
        assert_eq!(Monitor::open(ours).await.unwrap().version, "qemu 7.2.22");
    }
}
