//! The control socket of a running sandbox: JSON calls with descriptors beside them.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;

use crate::Id;
use crate::launch::tellable;

/// A call is answered within a millisecond, unless the sandbox is stuck.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// Longest answer but for that with the stacks, which has some hundred bytes for each task.
const MAX_ANSWER: usize = 1 << 20;
const STACKS: &str = "debug.Stacks";
const MAX_STACKS: usize = 64 << 20;
/// What the stack of every task's goroutine has in it, and what that of one that is stopped has, whoever has stopped it.
const TASK: &str = "kernel.(*Task).run(";
const STOPPED: &str = "kernel.(*Task).doStop(";

#[derive(Serialize)]
struct Call<'a, T> {
    method: &'a str,
    arg: T,
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: serde_json::Value,
}

#[derive(Serialize)]
struct Nothing {}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct PortForward<'a> {
    #[serde(rename = "ContainerID")]
    container: &'a str,
    port: u16,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct SignalArgs<'a> {
    #[serde(rename = "CID")]
    container: &'a str,
    signo: i32,
    #[serde(rename = "PID")]
    pid: i32,
    mode: i32,
}

/// The way to a sandbox's kernel.
#[derive(Debug, Clone)]
pub(super) struct Control {
    socket: PathBuf,
    container: String,
}

impl Control {
    /// Of the box `id`, whose state runsc keeps in `directory`.
    pub(super) fn of(directory: PathBuf, id: &Id) -> Self {
        Self {
            socket: directory.join(format!("runsc-{id}.sock")),
            container: id.to_string(),
        }
    }

    /// A stream to a port on the sandbox's loopback interface, which must not send more than 16 KiB ahead of its reader.
    pub(super) async fn forward(&self, port: u16) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = theirs.into_std()?;
        theirs.set_nonblocking(false)?;
        let arguments = PortForward {
            container: &self.container,
            port,
        };
        self.call("containerManager.PortForward", arguments, Some(theirs.as_fd()))
            .await?;
        Ok(ours)
    }

    /// Stops every task of the box, not the sandbox's own kernel.
    pub(super) async fn pause(&self) -> io::Result<()> {
        self.call("containerManager.Pause", Nothing {}, None)
            .await
            .map(drop)
    }

    pub(super) async fn resume(&self) -> io::Result<()> {
        self.call("containerManager.Resume", Nothing {}, None)
            .await
            .map(drop)
    }

    /// Whether no task of the box moves, or can, for now.
    pub(super) async fn all_tasks_stand(&self) -> io::Result<bool> {
        let stacks = self.call(STACKS, Nothing {}, None).await?;
        let stacks = stacks.as_str().unwrap_or_default();
        let mut tasks = stacks
            .split("\n\n")
            .filter(|stack| stack.contains(TASK))
            .peekable();
        if tasks.peek().is_none() {
            return Err(io::Error::other("the sandbox does not say what its tasks do"));
        }
        Ok(tasks.all(|stack| stack.contains(STOPPED)))
    }

    /// What the tasks of the box have taken of processors, those that have ended included, to some ten milliseconds.
    pub(super) async fn worked(&self) -> io::Result<Duration> {
        let event = self.call("containerManager.Event", &self.container, None).await?;
        let nanoseconds = event["containerUsage"][&self.container].as_u64();
        let unknown = || io::Error::other("the sandbox does not say what its tasks take");
        nanoseconds.map(Duration::from_nanos).ok_or_else(unknown)
    }

    /// To process 1 of the box.
    pub(super) async fn signal(&self, signo: i32) -> io::Result<()> {
        let arguments = SignalArgs {
            container: &self.container,
            signo,
            pid: 0,
            mode: 0,
        };
        self.call("containerManager.Signal", arguments, None)
            .await
            .map(drop)
    }

    async fn call(
        &self,
        method: &str,
        arg: impl Serialize,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<serde_json::Value> {
        let call = serde_json::to_vec(&Call { method, arg })?;
        let longest = if method == STACKS { MAX_STACKS } else { MAX_ANSWER };
        let answer = tokio::time::timeout(PATIENCE, self.exchange(&call, fd, longest)).await??;
        match answer.success {
            true => Ok(answer.result),
            false => Err(io::Error::other(tellable(&answer.err))),
        }
    }

    async fn exchange(&self, call: &[u8], fd: Option<BorrowedFd<'_>>, longest: usize) -> io::Result<Answer> {
        let mut socket = loop {
            match UnixStream::connect(&self.socket).await {
                // So many are waiting already that there is no room for one more.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(PAUSE).await,
                connected => break connected?,
            }
        };
        // A call is far shorter than a socket's buffer: it goes in one piece, with its descriptor.
        let sent = socket
            .async_io(Interest::WRITABLE, || send(socket.as_fd(), call, fd))
            .await?;
        if sent != call.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut answer = Vec::new();
        let mut object = Object::default();
        loop {
            let known = answer.len();
            if socket.read_buf(&mut answer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if answer.len() > longest {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the sandbox talks too much",
                ));
            }
            if object.ends_in(&answer[known..]) {
                // An error has words of the answer in it.
                return serde_json::from_slice(&answer)
                    .map_err(|error| io::Error::other(tellable(&error.to_string())));
            }
        }
    }
}

/// Follows an answer, which is one JSON object, so that it is read once, and when it is whole.
#[derive(Default)]
struct Object {
    depth: usize,
    in_text: bool,
    escaped: bool,
}

impl Object {
    /// Whether it has come to its end with the next `bytes`.
    fn ends_in(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_text,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' => self.depth += 1,
                b'}' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return true;
                    }
                }
                _ => {}
            }
        }
        false
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn answering(answer: &'static str) -> (tempfile::TempDir, Control, std::thread::JoinHandle<String>) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut call = vec![0; 4096];
            let length = peer.read(&mut call).unwrap();
            // In two pieces, as a stream may come.
            let (first, rest) = answer.split_at(5);
            peer.write_all(first.as_bytes()).unwrap();
            peer.write_all(rest.as_bytes()).unwrap();
            String::from_utf8_lossy(&call[..length]).into_owned()
        });
        let control = Control {
            socket,
            container: "box".to_owned(),
        };
        (folder, control, server)
    }

    #[tokio::test]
    async fn a_call_names_its_method_and_waits_for_the_whole_answer() {
        let (_folder, control, server) = answering(r#"{"success":true,"err":"","result":null}"#);
        control.signal(15).await.unwrap();
        assert_eq!(
            server.join().unwrap(),
            r#"{"method":"containerManager.Signal","arg":{"CID":"box","Signo":15,"PID":0,"Mode":0}}"#
        );
    }

    #[tokio::test]
    async fn tasks_stand_when_each_of_them_is_stopped() {
        const STOPPED_TASK: &str =
            r"goroutine 7 [sync.Cond.Wait]:\nkernel.(*Task).doStop(0x1)\nkernel.(*Task).run(0x1)";
        let asked = async |stacks: &str| {
            let answer = format!(r#"{{"success":true,"err":"","result":"{stacks}"}}"#);
            let (_folder, control, _server) = answering(Box::leak(answer.into_boxed_str()));
            control.all_tasks_stand().await
        };
        let running = r"goroutine 8 [running]:\nplatform.Switch()\nkernel.(*Task).run(0x2)";
        let other = r"goroutine 9 [select]:\nmain.main()";
        assert!(asked(&format!(r"{STOPPED_TASK}\n\n{other}")).await.unwrap());
        assert!(!asked(&format!(r"{STOPPED_TASK}\n\n{running}")).await.unwrap());
        assert!(asked(other).await.is_err(), "a version that names them otherwise");
    }

    #[tokio::test]
    async fn what_tasks_take_is_told_by_container() {
        let (_folder, control, _server) = answering(
            r#"{"success":true,"result":{"event":{},"containerUsage":{"box":40000000,"other":1}}}"#,
        );
        assert_eq!(control.worked().await.unwrap(), Duration::from_millis(40));
        let (_folder, control, _server) = answering(r#"{"success":true,"result":{"event":{}}}"#);
        assert!(control.worked().await.is_err());
    }

    #[test]
    fn an_answer_ends_with_its_last_brace_however_it_is_cut() {
        let answer = br#"{"success":true,"err":"a \" and a } and \\","result":{"a":[{}]}}"#;
        for part in 1..=answer.len() {
            let mut object = Object::default();
            let mut parts = answer.chunks(part).map(|bytes| object.ends_in(bytes));
            assert!(
                parts.position(|ended| ended) == Some(answer.len().div_ceil(part) - 1),
                "{part}"
            );
        }
    }

    #[tokio::test]
    async fn only_stacks_may_be_long() {
        let long = format!(
            r#"{{"success":true,"result":"{TASK} {STOPPED} {}"}}"#,
            "x".repeat(MAX_ANSWER)
        );
        let long: &'static str = Box::leak(long.into_boxed_str());
        let (_folder, control, _server) = answering(long);
        assert!(control.all_tasks_stand().await.unwrap());
        let (_folder, control, _server) = answering(long);
        let error = control.pause().await.unwrap_err();
        assert_eq!(error.to_string(), "the sandbox talks too much");
    }

    #[tokio::test]
    async fn a_refusal_is_an_error_in_the_words_of_the_sandbox() {
        let (_folder, control, _server) =
            answering(r#"{"success":false,"err":"no such container","result":null}"#);
        assert_eq!(
            control.pause().await.unwrap_err().to_string(),
            "no such container"
        );
    }
}
