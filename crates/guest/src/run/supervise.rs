//! Starts runs and sees them through: output, deadline, end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use connectrpc::ConnectError;
use dorm_proto::process::StartRequest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use super::output::{Output, Stream};
use super::process::{End, Run, describe, window};
use super::{Runs, command, pty, spawn};
use crate::bridge;
use crate::settings::Settings;
use crate::sys;
use crate::users::User;

/// How long output of others is waited for once the process itself has ended.
const GRACE: Duration = Duration::from_millis(100);
/// No pipe holds more, so after this much the output cannot be the ended process's any more.
const PIPE_MAX: usize = 1 << 20;

struct Wiring {
    /// The child's ends, closed once it has them.
    child: [OwnedFd; 3],
    stdin: Option<AsyncFd<OwnedFd>>,
    terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    outputs: Vec<(Stream, Arc<AsyncFd<OwnedFd>>)>,
}

fn nonblocking(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    sys::set_nonblocking(fd.as_fd())?;
    sys::watched(fd)
}

fn wire(request: &StartRequest, user: &User) -> Result<Wiring, ConnectError> {
    let failed = |e: io::Error| match e.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOSPC) => {
            ConnectError::resource_exhausted(format!("no pipe or terminal is left: {e}"))
        }
        _ => ConnectError::internal(format!("cannot make the run's pipes or terminal: {e}")),
    };
    match request.pty.as_option() {
        Some(pty) => {
            let size = pty.size.as_option().map_or((80, 24), |s| (s.cols, s.rows));
            let (cols, rows) = window(size.0, size.1)?;
            wire_terminal(cols, rows, user).map_err(failed)
        }
        None => wire_pipes(request.stdin.unwrap_or(true)).map_err(failed),
    }
}

fn wire_terminal(cols: u16, rows: u16, user: &User) -> io::Result<Wiring> {
    let (master, slave) = pty::open(cols, rows, user.uid)?;
    let master = Arc::new(sys::watched(master)?);
    Ok(Wiring {
        child: [slave.try_clone()?, slave.try_clone()?, slave],
        stdin: None,
        terminal: Some(master.clone()),
        outputs: vec![(Stream::Pty, master)],
    })
}

fn wire_pipes(with_stdin: bool) -> io::Result<Wiring> {
    let (child_in, stdin) = if with_stdin {
        let (read, write) = sys::pipe()?;
        (read, Some(nonblocking(bridge::writing(write)?)?))
    } else {
        (std::fs::File::open("/dev/null")?.into(), None)
    };
    let (out, child_out) = sys::pipe()?;
    let (err, child_err) = sys::pipe()?;
    Ok(Wiring {
        child: [child_in, child_out, child_err],
        stdin,
        terminal: None,
        outputs: vec![
            (Stream::Stdout, Arc::new(nonblocking(bridge::reading(out)?)?)),
            (Stream::Stderr, Arc::new(nonblocking(bridge::reading(err)?)?)),
        ],
    })
}

/// Starts what is asked for. The caller must register the run before it yields, so that its end finds it.
pub(super) fn start(
    settings: &Settings,
    spill_folder: &Path,
    request: &StartRequest,
    user: &User,
) -> Result<(Arc<Run>, Vec<Pump>), ConnectError> {
    let config = request
        .process
        .as_option()
        .ok_or_else(|| ConnectError::invalid_argument("the request names no process"))?;
    let mut launch = command::launch(
        settings,
        config,
        user,
        request.limits.as_option(),
        request.pty.is_set(),
    )?;
    let wiring = wire(request, user)?;
    launch.stdio = std::array::from_fn(|i| wiring.child[i].as_raw_fd());
    let pid = spawn::spawn(&launch).map_err(|e| command::refusal(&e, &launch, user))?;
    let id = sys::random_id();
    let run = Arc::new(Run {
        output: Arc::new(Output::new(request.keep, spill_folder.join(&id))),
        id,
        pid,
        tag: request.tag.clone().filter(|t| !t.is_empty()),
        keep: request.keep,
        keeps_awake: request.keeps_awake.unwrap_or(true),
        config: config.clone(),
        user: user.name.clone(),
        started_ms: sys::now_ms(),
        terminal: wiring.terminal,
        stdin: Mutex::new(wiring.stdin),
        fed: Mutex::new(0),
        exit: watch::Sender::new(None),
        timed_out: AtomicBool::new(false),
        end: OnceLock::new(),
    });
    let pumps = wiring
        .outputs
        .into_iter()
        .map(|(stream, fd)| Pump { stream, fd })
        .collect();
    Ok((run, pumps))
}

/// Moves one stream of a process to the run's output.
pub(super) struct Pump {
    stream: Stream,
    fd: Arc<AsyncFd<OwnedFd>>,
}

thread_local! {
    /// Every pump reads through this: output is short most of the time, and runs are many.
    static SCRATCH: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; 64 * 1024]);
}

impl Pump {
    /// One read, empty at the end of the stream.
    fn read(&self) -> io::Result<Vec<u8>> {
        let read = SCRATCH.with_borrow_mut(|scratch| {
            sys::read(self.fd.get_ref().as_fd(), scratch).map(|n| scratch[..n].to_vec())
        });
        match read {
            // The terminal's other side is closed everywhere.
            Err(e) if e.raw_os_error() == Some(libc::EIO) => Ok(Vec::new()),
            read => read,
        }
    }

    /// Pumps to the end of the stream. `drained` is dropped when all that the process itself wrote is in the output,
    /// while processes it left behind may still hold the stream open.
    async fn run(
        self,
        output: Arc<Output>,
        mut exit: watch::Receiver<Option<i32>>,
        drained: watch::Sender<()>,
    ) {
        let mut drained = Some(drained);
        let mut deadline: Option<Instant> = None;
        let mut since_exit = 0;
        loop {
            let exited = exit.borrow_and_update().is_some();
            if exited && deadline.is_none() {
                deadline = Some(Instant::now() + GRACE);
            }
            let grace = deadline.filter(|_| drained.is_some());
            let read = tokio::select! {
                biased;
                ready = self.fd.readable() => match ready {
                    Ok(mut guard) => guard.try_io(|_| self.read()),
                    Err(e) => Ok(Err(e)),
                },
                _ = exit.changed(), if !exited => continue,
                () = async { tokio::time::sleep_until(grace.expect("guarded")).await }, if grace.is_some() => {
                    drained = None;
                    continue;
                }
            };
            match read {
                Ok(Ok(data)) if data.is_empty() => return,
                Ok(Ok(data)) => {
                    since_exit += if exited { data.len() } else { 0 };
                    if since_exit >= PIPE_MAX {
                        drained = None;
                    }
                    output.append(self.stream, &data).await;
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => {
                    crate::log::log!("output cannot be read: {e}");
                    return;
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// Follows a run to its end.
pub(super) async fn follow(runs: Arc<Runs>, run: Arc<Run>, pumps: Vec<Pump>, deadline: Option<Instant>) {
    let mut exit = run.exit.subscribe();
    let (drained, mut all_drained) = watch::channel(());
    for pump in pumps {
        tokio::spawn(pump.run(run.output.clone(), run.exit.subscribe(), drained.clone()));
    }
    drop(drained);

    let status = tokio::select! {
        status = async { *exit.wait_for(Option::is_some).await.expect("the run holds the sender") } => status,
        () = async { tokio::time::sleep_until(deadline.expect("guarded")).await }, if deadline.is_some() => {
            run.time_out();
            *exit.wait_for(Option::is_some).await.expect("the run holds the sender")
        }
    };
    while all_drained.changed().await.is_ok() {}
    run.stdin.lock().await.take();
    let status = status.expect("waited for");
    let timed_out = run.timed_out.load(Ordering::Relaxed);
    let oom = !timed_out
        && libc::WIFSIGNALED(status)
        && libc::WTERMSIG(status) == libc::SIGKILL
        && runs.oom.happened();
    let end = End {
        event: describe(status, timed_out, oom),
        ended_ms: sys::now_ms(),
    };
    run.end.get_or_init(|| end);
    run.output.close();
    runs.ended(&run);
}
