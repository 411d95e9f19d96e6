//! The file servers of machines that have volumes: one process for each, beside QEMU in the box's group.
//!
//! A server may end at any time, by an accident or with the box; as long as QEMU lives, and is not frozen, there is another. It outlives the
//! daemon as QEMU does, so files go on to be there while no daemon is. The next daemon puts one of its own in its place.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dorm_sys::cgroup::Group;
use dorm_sys::confine::SystemCallFilter;
use dorm_sys::process::{Process, is_kernel_thread};
use rustix::process::Signal;

use super::{Vm, command};
use crate::host::{Host, LiveBox, ended, ending};
use crate::launch;
use crate::{EngineError, Id, Result, VolumeMount};

/// How long a server may take to be there.
const SERVING_WITHIN: Duration = Duration::from_secs(30);
/// Before a server that has ended is replaced; longer each time, as long as they do not last.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// One that served so long was no failure.
const LASTING: Duration = Duration::from_secs(10);

/// Who looks after the servers of which machines.
#[derive(Debug)]
pub(super) struct Servers {
    /// Of a server's system calls.
    filter: Arc<[u8]>,
    tended: Mutex<HashMap<Id, Tended>>,
}

#[derive(Debug)]
struct Tended {
    /// Of QEMU.
    pid: i32,
    task: tokio::task::JoinHandle<()>,
}

impl Servers {
    pub(super) fn new() -> Result<Self> {
        let filter = SystemCallFilter::for_files().map_err(EngineError::io("cannot prepare file servers"))?;
        Ok(Self {
            filter: filter.to_bytes().into(),
            tended: Mutex::default(),
        })
    }
}

impl Vm {
    /// Sees to it that the volumes of a machine are served, from now until it ends or is frozen.
    pub(super) fn serve_volumes(&self, live: &LiveBox) {
        if live.volumes.is_empty() {
            return;
        }
        let mut tended = self.files.tended.lock().unwrap_or_else(PoisonError::into_inner);
        tended.retain(|_, tended| !tended.task.is_finished());
        if tended
            .get(&live.id)
            .is_some_and(|tended| tended.pid == live.process.pid)
        {
            return;
        }
        // It is opened while the box is known to be there, so that it is no other process of this number.
        let qemu = match Process::open(live.process.pid) {
            Ok(qemu) if !live.process.has_ended() => qemu,
            _ => return,
        };
        let machine = Machine {
            host: Arc::clone(&self.host),
            filter: Arc::clone(&self.files.filter),
            id: live.id.clone(),
            qemu,
            netns: Arc::clone(&live.netns),
            group: live.group.clone(),
            uid_base: live.uid_base,
            volumes: live.volumes.clone(),
        };
        let pid = live.process.pid;
        let task = tokio::spawn(async move { machine.tend().await });
        tended.insert(live.id.clone(), Tended { pid, task });
    }
}

/// What is needed to serve a machine's volumes.
struct Machine {
    host: Arc<Host>,
    filter: Arc<[u8]>,
    id: Id,
    qemu: Process,
    netns: Arc<OwnedFd>,
    group: Group,
    uid_base: u32,
    volumes: Vec<VolumeMount>,
}

impl Machine {
    async fn tend(&self) {
        let mut pause = PAUSE;
        // A frozen machine asks for nothing, and a process that joins its group is frozen, too. It is tended again when it goes on.
        while !self.qemu.has_ended() && !self.group.frozen().unwrap_or(true) {
            let began = tokio::time::Instant::now();
            let started = async {
                self.end_others().await?;
                tokio::time::timeout(SERVING_WITHIN, self.start()).await?
            };
            match started.await {
                Ok(server) => tokio::select! {
                    _ = ended(&server) => {}
                    () = ending(&self.qemu) => {
                        let _ = server.signal(Signal::KILL);
                        ended(&server).await;
                        return;
                    }
                },
                Err(error) if !self.qemu.has_ended() => {
                    tracing::warn!(id = %self.id, %error, "the volumes of the machine cannot be served");
                }
                Err(_) => return,
            }
            pause = match began.elapsed() > LASTING {
                true => PAUSE,
                false => LONGEST_PAUSE.min(pause * 2),
            };
            // Where the whole box comes to its end, the server may be the first.
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = ending(&self.qemu) => return,
            }
            tracing::warn!(id = %self.id, "the machine's volumes are given another file server");
        }
    }

    async fn start(&self) -> io::Result<Process> {
        let inside = self.host.network.inside();
        let channel = inside
            .connect(Arc::clone(&self.netns), command::VOLUMES_SOCKET)
            .await?;
        channel.set_nonblocking(false)?;
        let volumes = self.host.volumes(&self.volumes).map_err(io::Error::other)?;
        let join: Vec<PathBuf> = self.group.join_files();
        let (launcher, filter) = (&self.host.launcher, &self.filter);
        launch::serve_volumes(launcher, join, filter, channel.into(), self.uid_base, volumes).await
    }

    /// Ends what an earlier daemon, or a start that was broken off, has left of servers: whatever is in the group and is not QEMU.
    async fn end_others(&self) -> io::Result<()> {
        for pid in self.group.processes()? {
            // KVM has a thread of the kernel in it.
            if pid == self.qemu.pid || is_kernel_thread(pid).unwrap_or(false) {
                continue;
            }
            let Ok(process) = Process::open(pid) else { continue };
            // One that went to a stranger before it was opened is not in the group now.
            if self.group.processes()?.contains(&pid) {
                process.signal(Signal::KILL)?;
                let _ = tokio::time::timeout(SERVING_WITHIN, ended(&process)).await;
            }
        }
        Ok(())
    }
}
