//! Memory images by CRIU.
//!
//! CRIU is a program of its own that speaks RPC over a socket. It runs through the launcher, which gives it a mount
//! namespace in which the home is mounted as the box sees it, and a /run where CRIU finds what it learned of this kernel.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dorm_sys::breakpoint::Ready;
use dorm_sys::cgroup::Group;
use tokio::task::JoinHandle;

use crate::launch::{self, Job, Launcher};
use crate::packet::PacketSocket;
use crate::{EngineError, Result};

pub mod bare;
mod culprit;
mod find;
mod hashed;
pub(crate) mod manifest;
mod names;
pub(crate) mod orphans;
pub(crate) mod room;
mod rpc;

pub use find::find;
pub(crate) use find::{is_self_test, self_test_process};
pub(crate) use names::{forget, has_names, lay_ghosts, release};

/// CRIU would wait seconds for such a process, which cannot stop before its child has gone on.
pub(crate) const LENT: &str = "waits for a child that has yet to execute its program";

/// How much CRIU tells of what it does: its own levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Talk {
    Errors = 2,
    Steps = 3,
}

/// CRIU's word for a process of the box that was killed while it was brought back.
const KILLED: &str = "killed by signal 9";

/// CRIU's words for what the machine, or the box's limits, had too little of.
const SHORT: [&str; 3] = [
    "Resource temporarily unavailable",
    "Cannot allocate memory",
    "Too many open files",
];

fn is_short(reason: &str) -> bool {
    SHORT.iter().any(|of| reason.contains(of))
}

/// Far beyond what CRIU takes: a slow disk or a busy machine is no reason to give up.
const PATIENCE: Duration = Duration::from_secs(120);
const BYTES_A_SECOND: u64 = 8 << 20;

/// How long CRIU may take for so many bytes.
pub(crate) fn patience_with(bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(bytes / BYTES_A_SECOND)
}

/// CRIU's own log, in its working directory.
const LOG: &str = "criu.log";

/// A CRIU that was seen to work on this host.
#[derive(Debug, Clone)]
pub struct Criu {
    /// Program and first arguments: a private copy is started through its own dynamic linker.
    pub command: Vec<PathBuf>,
    pub version: String,
    /// What CRIU learned of this kernel, so that it need not ask again.
    knowledge: Option<PathBuf>,
}

/// Mounts in a box that come from the host, as CRIU names them: where in the box, and where on the host.
/// `volumes` are the places of its volumes in the box.
fn external_mounts<'a>(in_box: bool, volumes: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut mounts: Vec<(String, String)> = launch::DEVICES
        .iter()
        .map(|device| (format!("/dev/{device}"), format!("/dev/{device}")))
        .collect();
    mounts.push((
        dorm_proto::boot::GUEST_PATH.to_owned(),
        launch::STAGED_GUEST.to_owned(),
    ));
    mounts.extend(launch::masked_files().map(|path| (path.to_owned(), "/dev/null".to_owned())));
    let mounts = mounts.into_iter().map(|(inside, outside)| {
        let key = inside.trim_start_matches('/').replace('/', "-");
        (inside, outside, key)
    });
    let volumes = volumes.enumerate().map(|(number, at)| {
        let key = format!("volume-{number}");
        (at.to_owned(), launch::staged_volume(number), key)
    });
    mounts
        .chain(volumes)
        .map(|(inside, outside, key)| {
            if in_box {
                format!("mnt[{inside}]:{key}")
            } else {
                format!("mnt[{key}]:{outside}")
            }
        })
        .collect()
}

impl Criu {
    /// Whether it can still be started: it may have been removed since it was found.
    pub(crate) fn still_there(&self) -> Result<(), String> {
        let programs = [self.command.first(), self.command.last()];
        match programs.into_iter().flatten().find(|file| !file.is_file()) {
            Some(gone) => Err(format!("{} is gone", gone.display())),
            None => Ok(()),
        }
    }

    /// Writes the memory of the process tree of `pid`, which is in the frozen `group`, to the directory `images`. Gives
    /// the names that it had to leave in `home`, without which the image is of no use. CRIU tells what it does with `talk`, which
    /// takes time, and names the process where it fails. It is ended when `no_room` comes to an end.
    #[expect(
        clippy::too_many_arguments,
        reason = "they have one thing in common, this call"
    )]
    pub(crate) async fn dump(
        &self,
        launcher: &Path,
        pid: i32,
        group: &Group,
        home: &Path,
        volumes: &[String],
        images: &Path,
        talk: Talk,
        no_room: impl Future<Output = EngineError>,
    ) -> Result<Vec<PathBuf>> {
        let failed = || EngineError::io("cannot start criu");
        let directory = File::open(images).map_err(failed())?;
        let waits = group
            .waits()
            .map_err(EngineError::io("cannot look at the box's processes"))?;
        if let Some(thread) = waits.lender {
            let who = culprit::called(thread);
            return Err(EngineError::CannotCheckpoint(format!("{who} {LENT}")));
        }
        let owner =
            dorm_sys::namespace::open(pid, "user").and_then(|ns| dorm_sys::namespace::owner(ns.as_fd()));
        let user = owner.map_err(failed())?;
        let _breakpoints = breakpoints();
        let launcher = Launcher::start(launcher, Vec::new(), None)
            .await
            .map_err(failed())?;
        let mut launcher = launcher
            .become_criu(self.job(user, false))
            .await
            .map_err(failed())?;
        let limit = patience_with(group.stats().map_or(0, |stats| stats.memory));
        let done = async {
            let mut options = rpc::Options::new(directory.as_fd(), directory.as_fd());
            options.pid = Some(pid);
            options.log_level = Some(talk as i32);
            options.leave_running = Some(true);
            options.unprivileged = (user != 0).then_some(true);
            options.notify_scripts = Some(true);
            options.external = external_mounts(true, volumes.iter().map(String::as_str));
            let thawed = waits.stopped;
            if thawed {
                // Nobody can attach to a process that is both stopped and frozen. CRIU stops the others by itself then.
                group.thaw().map_err(failed())?;
            } else {
                options.freeze_cgroup = Some(group.freezer().display().to_string());
            }
            let dumped = rpc::dump(&launcher.socket, options, async || {
                if thawed {
                    group.freeze()?;
                }
                names::Names::hold(home, images)
            });
            let dumped = tokio::select! {
                dumped = dumped => Ok(dumped),
                () = tokio::time::sleep(limit) => {
                    launcher.kill().await;
                    let why = format!("criu did not come to an end within {} s", limit.as_secs());
                    Ok(Err(rpc::Refused::Lost(io::Error::new(io::ErrorKind::TimedOut, why))))
                }
                error = no_room => {
                    launcher.kill().await;
                    Err(error)
                }
            };
            // A CRIU that is killed leaves the box as it had it then, and that may be running.
            if thawed || !matches!(dumped, Ok(Ok(_))) {
                group.freeze().map_err(failed())?;
            }
            let held = dumped?.map_err(|refused| self.unsaved(images, refused))?;
            if group.is_thawed().map_err(failed())? {
                group.freeze().map_err(failed())?;
                let reason = "the box has gone on while its memory was read";
                return Err(EngineError::CannotCheckpoint(reason.to_owned()));
            }
            let held = held.unwrap_or_else(|| Ok(names::Names::default()));
            held.and_then(names::Names::leave)
                .map_err(EngineError::io("cannot keep files that have lost their names"))
        }
        .await;
        launcher.end().await;
        done
    }

    /// Has the CRIU behind `socket`, whose stage is set, bring back what `images` holds. `volumes` are where the box has them.
    pub(crate) async fn restore<'a>(
        &'a self,
        socket: &'a PacketSocket,
        volumes: &[launch::Volume],
        images: &Path,
        work: &'a Path,
    ) -> Result<Restoring<'a>> {
        let failed = || EngineError::io("cannot start criu");
        let breakpoints = breakpoints();
        let directory = File::open(images).map_err(failed())?;
        let work_directory = File::open(work).map_err(failed())?;
        let mut options = rpc::Options::new(directory.as_fd(), work_directory.as_fd());
        options.root = Some(launch::STAGED_ROOT.to_owned());
        options.rst_sibling = Some(true);
        options.notify_scripts = Some(true);
        options.external = external_mounts(false, volumes.iter().map(|volume| volume.at.as_str()));
        let call = rpc::restore(socket, options).await;
        let call = call.map_err(|refused| self.unrestored(work, refused))?;
        Ok(Restoring {
            criu: self,
            call,
            work,
            _open: [directory, work_directory],
            _breakpoints: breakpoints,
        })
    }

    /// For a launcher that is to become CRIU, as the user `user`; `ahead` of having something to do, if it is to wait for that.
    pub(crate) fn job(&self, user: u32, ahead: bool) -> Job {
        Job::Criu {
            command: self.command.clone(),
            knowledge: self.knowledge.clone(),
            user,
            ahead,
        }
    }

    fn reason(&self, work: &Path, refused: rpc::Refused) -> String {
        let log = std::fs::read(work.join(LOG)).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let reason = rpc::errors(&log).unwrap_or(match refused {
            rpc::Refused::No(reason) if reason.is_empty() => "criu gave no reason".to_owned(),
            rpc::Refused::No(reason) => reason,
            rpc::Refused::Lost(error) => format!("the connection to criu is lost: {error}"),
        });
        match culprit::in_log(&log) {
            Some(pid) => format!("{}: {reason}", culprit::called(pid)),
            None => reason,
        }
    }

    /// Why there is no image. A CRIU that was killed, or had too little of something, says nothing about the box.
    fn unsaved(&self, images: &Path, refused: rpc::Refused) -> EngineError {
        let lost = matches!(refused, rpc::Refused::Lost(_));
        let reason = self.reason(images, refused);
        match room::unsaved(images, reason) {
            EngineError::CannotCheckpoint(reason) if lost || is_short(&reason) => EngineError::Io {
                doing: "criu could not read the memory to its end".to_owned(),
                source: io::Error::other(reason),
            },
            error => error,
        }
    }

    /// Why nothing came back. That somebody was killed on the way, as the kernel does for want of memory, says nothing about the image.
    fn unrestored(&self, work: &Path, refused: rpc::Refused) -> EngineError {
        let lost = matches!(refused, rpc::Refused::Lost(_));
        let reason = self.reason(work, refused);
        let first = reason.split("; ").next().unwrap_or_default();
        let killed = lost || first.contains(KILLED);
        match room::is_lacking(work, &reason) {
            Some(free) => EngineError::NoSpace { free },
            None if killed => EngineError::Io {
                doing: "criu was killed while it brought the memory back, perhaps for want of memory"
                    .to_owned(),
                source: std::io::Error::other(reason),
            },
            None if is_short(&reason) => EngineError::Io {
                doing: "there were not enough processes or too little memory to bring its memory back"
                    .to_owned(),
                source: std::io::Error::other(reason),
            },
            None => EngineError::BadImage(reason),
        }
    }
}

/// CRIU sets them in processes that it reads or brings back. The kernel gets ready for that while CRIU does everything before.
fn breakpoints() -> JoinHandle<Option<Ready>> {
    tokio::task::spawn_blocking(|| Ready::make().ok())
}

/// A restore under way.
pub(crate) struct Restoring<'a> {
    criu: &'a Criu,
    call: rpc::Call<'a>,
    work: &'a Path,
    /// CRIU opens them through this process.
    _open: [File; 2],
    _breakpoints: JoinHandle<Option<Ready>>,
}

impl Restoring<'_> {
    /// Waits for the namespaces and gives the pid of process 1 in them.
    pub(crate) async fn namespaces(&self) -> Result<i32> {
        match self.next().await? {
            rpc::Progress::Namespaces(pid) => Ok(pid),
            _ => Err(EngineError::BadImage(
                "it has no namespaces of its own".to_owned(),
            )),
        }
    }

    /// Lets CRIU go on until all processes are there, with their memory, and none of them runs.
    pub(crate) async fn memory(&self) -> Result<()> {
        loop {
            self.go_on().await?;
            match self.next().await? {
                rpc::Progress::Restored => return Ok(()),
                rpc::Progress::Namespaces(_) | rpc::Progress::Dumped => {}
                rpc::Progress::Done { .. } => {
                    return Err(EngineError::BadImage("it ran too early".to_owned()));
                }
            }
        }
    }

    /// Lets CRIU go on, and gives the pid of process 1 when the box runs.
    pub(crate) async fn finish(&self) -> Result<i32> {
        loop {
            self.go_on().await?;
            if let rpc::Progress::Done { pid } = self.next().await? {
                return pid.ok_or_else(|| EngineError::BadImage("no process came back".to_owned()));
            }
        }
    }

    /// Has CRIU end what it has brought back.
    pub(crate) async fn give_up(&self) {
        if self.call.give_up().await.is_ok() {
            let _ = self.call.next().await;
        }
    }

    async fn go_on(&self) -> Result<()> {
        let gone_on = self.call.go_on().await;
        gone_on.map_err(|refused| self.criu.unrestored(self.work, refused))
    }

    async fn next(&self) -> Result<rpc::Progress> {
        let next = self.call.next().await;
        next.map_err(|refused| self.criu.unrestored(self.work, refused))
    }
}
