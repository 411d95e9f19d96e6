//! The part of CRIU's RPC that dorm speaks. Names and numbers are CRIU's, and never change there.

use std::os::fd::{AsRawFd, BorrowedFd};

use prost::Message;

use crate::packet::PacketSocket;

const DUMP: i32 = 1;
const RESTORE: i32 = 2;
const NOTIFY: i32 = 6;
const CGROUPS_IGNORED: i32 = 0;
const NETWORK_LOCK_SKIPPED: i32 = 3;
const NEW_NETWORK: u32 = 0x4000_0000;
/// Deleted files that are still open go into the image, up to this size each.
const GHOST_LIMIT: u32 = 1 << 30;

#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "2")]
    options: Option<Options>,
    #[prost(bool, optional, tag = "3")]
    notify_success: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Options {
    #[prost(int32, required, tag = "1")]
    images_dir_fd: i32,
    #[prost(int32, optional, tag = "2")]
    pub(super) pid: Option<i32>,
    #[prost(bool, optional, tag = "3")]
    pub(super) leave_running: Option<bool>,
    #[prost(bool, optional, tag = "8")]
    file_locks: Option<bool>,
    #[prost(int32, optional, tag = "9")]
    pub(super) log_level: Option<i32>,
    #[prost(string, optional, tag = "10")]
    log_file: Option<String>,
    #[prost(bool, optional, tag = "12")]
    pub(super) notify_scripts: Option<bool>,
    #[prost(string, optional, tag = "13")]
    pub(super) root: Option<String>,
    #[prost(int32, optional, tag = "17")]
    work_dir_fd: Option<i32>,
    #[prost(bool, optional, tag = "18")]
    link_remap: Option<bool>,
    #[prost(bool, optional, tag = "26")]
    pub(super) rst_sibling: Option<bool>,
    #[prost(int32, optional, tag = "34")]
    manage_cgroups_mode: Option<i32>,
    #[prost(uint32, optional, tag = "35")]
    ghost_limit: Option<u32>,
    #[prost(string, repeated, tag = "37")]
    pub(super) external: Vec<String>,
    #[prost(uint32, optional, tag = "38")]
    empty_ns: Option<u32>,
    #[prost(string, optional, tag = "44")]
    pub(super) freeze_cgroup: Option<String>,
    #[prost(bool, optional, tag = "46")]
    tcp_skip_in_flight: Option<bool>,
    #[prost(bool, optional, tag = "52")]
    tcp_close: Option<bool>,
    #[prost(int32, optional, tag = "64")]
    network_lock: Option<i32>,
    #[prost(bool, optional, tag = "67")]
    pub(super) unprivileged: Option<bool>,
}

impl Options {
    /// What holds for dumps and restores alike. The network is the daemon's to give back: connections to the
    /// outside are closed, and a restored box gets an empty namespace.
    pub(super) fn new(images: BorrowedFd<'_>, work: BorrowedFd<'_>) -> Self {
        Self {
            images_dir_fd: images.as_raw_fd(),
            work_dir_fd: Some(work.as_raw_fd()),
            log_level: Some(super::Talk::Errors as i32),
            log_file: Some(super::LOG.to_owned()),
            file_locks: Some(true),
            link_remap: Some(true),
            ghost_limit: Some(GHOST_LIMIT),
            manage_cgroups_mode: Some(CGROUPS_IGNORED),
            network_lock: Some(NETWORK_LOCK_SKIPPED),
            empty_ns: Some(NEW_NETWORK),
            tcp_close: Some(true),
            // Connections that nobody has accepted yet are closed like the others.
            tcp_skip_in_flight: Some(true),
            ..Self::default()
        }
    }
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(bool, required, tag = "2")]
    success: bool,
    #[prost(message, optional, tag = "4")]
    restored: Option<Restored>,
    #[prost(message, optional, tag = "5")]
    notify: Option<Notification>,
    #[prost(string, optional, tag = "9")]
    message: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Restored {
    #[prost(int32, required, tag = "1")]
    pid: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Notification {
    #[prost(string, optional, tag = "1")]
    script: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pid: Option<i32>,
}

/// CRIU did not do it. Its log may say why.
#[derive(Debug)]
pub(super) enum Refused {
    /// It said no.
    No(String),
    /// It ended without a word.
    Lost(std::io::Error),
}

/// One call of CRIU, while it lasts.
#[derive(Debug)]
pub(crate) struct Call<'a>(&'a PacketSocket);

/// What CRIU has come to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The namespaces of the process with this pid are there. CRIU waits for [`Call::go_on`].
    Namespaces(i32),
    /// All processes are there, with their memory, and none of them runs. CRIU waits for [`Call::go_on`] or
    /// [`Call::give_up`].
    Restored,
    /// The image is written, and the processes are held still. CRIU waits for [`Call::go_on`].
    Dumped,
    Done {
        /// Process 1 of what was restored.
        pid: Option<i32>,
    },
}

/// Does `held` while the image is written and the processes are still held.
pub(super) async fn dump<T>(
    socket: &PacketSocket,
    options: Options,
    held: impl AsyncFnOnce() -> T,
) -> Result<Option<T>, Refused> {
    let call = Call::begin(socket, DUMP, options).await?;
    let (mut held, mut kept) = (Some(held), None);
    loop {
        match call.next().await? {
            Progress::Done { .. } => return Ok(kept),
            Progress::Dumped => {
                if let Some(held) = held.take() {
                    kept = Some(held().await);
                }
            }
            Progress::Namespaces(_) | Progress::Restored => {}
        }
        call.go_on().await?;
    }
}

pub(super) async fn restore(socket: &PacketSocket, options: Options) -> Result<Call<'_>, Refused> {
    Call::begin(socket, RESTORE, options).await
}

impl<'a> Call<'a> {
    async fn begin(socket: &'a PacketSocket, kind: i32, options: Options) -> Result<Self, Refused> {
        let call = Self(socket);
        call.send(Request {
            kind,
            options: Some(options),
            notify_success: None,
        })
        .await?;
        Ok(call)
    }

    pub(super) async fn next(&self) -> Result<Progress, Refused> {
        loop {
            let packet = self.0.receive().await.map_err(Refused::Lost)?;
            let response = Response::decode(&packet[..])
                .map_err(|e| Refused::No(format!("criu's answer makes no sense: {e}")))?;
            if response.kind != NOTIFY {
                return match response.success {
                    true => Ok(Progress::Done {
                        pid: response.restored.map(|r| r.pid),
                    }),
                    false => Err(Refused::No(response.message.unwrap_or_default())),
                };
            }
            let notify = response.notify.unwrap_or_default();
            match notify.script() {
                "setup-namespaces" => return Ok(Progress::Namespaces(notify.pid())),
                "post-restore" => return Ok(Progress::Restored),
                "post-dump" => return Ok(Progress::Dumped),
                _ => self.go_on().await?,
            }
        }
    }

    pub(super) async fn go_on(&self) -> Result<(), Refused> {
        self.acknowledge(true).await
    }

    /// CRIU ends what it has brought back.
    pub(super) async fn give_up(&self) -> Result<(), Refused> {
        self.acknowledge(false).await
    }

    async fn acknowledge(&self, success: bool) -> Result<(), Refused> {
        self.send(Request {
            kind: NOTIFY,
            options: None,
            notify_success: Some(success),
        })
        .await
    }

    async fn send(&self, request: Request) -> Result<(), Refused> {
        self.0.send(&request.encode_to_vec()).await.map_err(Refused::Lost)
    }
}

/// The lines of CRIU's log that tell of errors, the first ones first: later ones follow from them.
pub(super) fn errors(log: &str) -> Option<String> {
    let message = |line: &str| {
        Some(
            line.split_once("Error (")?
                .1
                .split_once("): ")?
                .1
                .trim()
                .to_owned(),
        )
    };
    let harmless = |line: &String| !line.starts_with("rlimit:");
    let lines: Vec<String> = log.lines().filter_map(message).filter(harmless).take(3).collect();
    (!lines.is_empty()).then(|| lines.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_errors_of_a_log_are_the_reason() {
        let log = "(00.1) Warn  (criu/a.c:1): mnt: x\n(00.2) Error (criu/util.c:1): rlimit: no\n\
            (00.3) Error (criu/files.c:2): Can't dump file 7 of process 12 (io_uring)\n(00.4) Error (criu/cr.c:9): Dumping FAILED.\n";
        let reason = errors(log).unwrap();
        assert_eq!(
            reason,
            "Can't dump file 7 of process 12 (io_uring); Dumping FAILED."
        );
    }
}
