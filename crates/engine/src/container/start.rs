//! Bringing up a box.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dorm_sys::cgroup::GroupLimits;
use dorm_sys::process::{self, Process};
use rustix::process::Signal;

use super::spare::Spare;
use super::{Container, LiveBox, Slot, ended};
use crate::launch::{self, Job, Report};
use crate::packet::PacketSocket;
use crate::{BoxRecord, BoxSpec, EngineError, Limits, Result};

/// How long a guest may take to answer. A box on a busy host needs a fraction of a second.
const READY_WITHIN: Duration = Duration::from_secs(30);

type Cause = Box<dyn std::error::Error + Send + Sync>;

pub(super) fn failed(step: &str) -> impl FnOnce(Cause) -> EngineError {
    move |source| EngineError::Start {
        step: step.to_owned(),
        source,
    }
}

impl Container {
    pub(super) async fn start_box(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        self.occupy(spec, self.bring_up(spec)).await
    }

    /// Makes the box that `coming` brings up the one that runs on the home of `spec`, or leaves nothing of it.
    pub(super) async fn occupy(
        &self,
        spec: &BoxSpec,
        coming: impl Future<Output = Result<(LiveBox, BoxRecord)>>,
    ) -> Result<BoxRecord> {
        if !self.pool.home_path(&spec.id).exists() {
            return Err(EngineError::NoHome(spec.id.clone()));
        }
        {
            let mut boxes = self.boxes();
            if boxes.contains_key(&spec.id) {
                return Err(EngineError::AlreadyRunning(spec.id.clone()));
            }
            boxes.insert(spec.id.clone(), Slot::Starting);
        }
        // If this future is dropped halfway, the reservation goes, and the next start sweeps the rest.
        let reservation = Reservation {
            container: self,
            spec,
            settled: false,
        };
        if self.cgroups.group(spec.id.as_str()).exists() {
            self.remove_remains(&spec.id).await?;
        }
        match coming.await {
            Ok((live, record)) => {
                self.boxes().insert(spec.id.clone(), Slot::Live(Arc::new(live)));
                reservation.settle();
                Ok(record)
            }
            Err(error) => {
                if let Err(remains) = self.remove_remains(&spec.id).await {
                    tracing::warn!(id = %spec.id, error = %crate::chain(&remains), "remains of a box that did not come up");
                }
                Err(error)
            }
        }
    }

    async fn bring_up(&self, spec: &BoxSpec) -> Result<(LiveBox, BoxRecord)> {
        let limits = self.group_limits(&spec.limits)?;
        let mut launcher = self.spares.take().await?;
        let (group, join) = launcher.claim(&self.cgroups, &spec.id, &limits)?;
        let launch = launch::Spec {
            home: self.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes: self.volumes(spec)?,
            job: Job::Guest {
                guest: self.guest.path.clone(),
                hostname: spec.hostname.clone(),
                boot_id: random_uuid(),
                join,
                tmpfs_bytes: spec.limits.memory / 2,
            },
        };
        let process = tokio::time::timeout(READY_WITHIN, handshake(&launcher.socket, &launch))
            .await
            .map_err(|e| failed("was launched")(e.into()))??;
        let Spare {
            process: mut launcher,
            socket,
            ..
        } = launcher;
        let reap_launcher = async {
            let _ = launcher.wait().await;
        };

        let outcome = tokio::time::timeout(READY_WITHIN, async {
            let netns = process_netns(&process)?;
            let (attached, ()) = tokio::join!(
                self.network.attach(&spec.id, spec.slot, &spec.network, &netns),
                reap_launcher
            );
            // A box whose set-up failed is gone by now, and says why better than the network can.
            if let Err(error) = attached {
                return Err(match said(&socket).await {
                    Some(reason) => failed("was set up")(reason.into()),
                    None => error,
                });
            }
            let sent = socket.send_json(&spec.boot).await;
            match socket.receive().await {
                Ok(answer) if answer == dorm_proto::boot::READY => Ok(netns),
                Ok(answer) => Err(failed("was set up")(reason(&answer).into())),
                Err(error) => Err(failed("was booted")(sent.err().unwrap_or(error).into())),
            }
        })
        .await;
        let netns = match outcome.unwrap_or_else(|e| Err(failed("was booted")(e.into()))) {
            Ok(netns) => netns,
            Err(error) => {
                let _ = process.signal(Signal::KILL);
                ended(&process).await;
                return Err(error);
            }
        };

        let record = record_of(&process, &self.guest.hash).map_err(|e| failed("was recorded")(e.into()))?;
        Ok((LiveBox::new(process, netns, group, spec, &record), record))
    }

    pub(super) fn volumes(&self, spec: &BoxSpec) -> Result<Vec<launch::Volume>> {
        let volume = |mount: &crate::VolumeMount| {
            let source = self.pool.volume_path(&mount.volume);
            if !source.exists() {
                return Err(EngineError::NoVolume(mount.volume.clone()));
            }
            let at = mount.path.clone();
            Ok(launch::Volume { source, at })
        };
        spec.volumes.iter().map(volume).collect()
    }

    pub(super) fn group_limits(&self, limits: &Limits) -> Result<GroupLimits> {
        let io = match limits.io_bps {
            Some(bps) => Some((self.pool.device()?, bps)),
            None => None,
        };
        Ok(GroupLimits {
            cpu_millis: limits.cpu_millis,
            memory: limits.memory,
            pids: limits.pids,
            io,
        })
    }
}

/// What another daemon needs to know this box again.
pub(super) fn record_of(process: &Process, guest_hash: &str) -> std::io::Result<BoxRecord> {
    Ok(BoxRecord {
        pid: process.pid,
        pid_start: process::start_time(process.pid)?,
        host_boot_id: process::host_boot_id()?,
        guest_hash: guest_hash.to_owned(),
        engine: "container".to_owned(),
    })
}

/// Frees the place of a box that did not come up.
struct Reservation<'a> {
    container: &'a Container,
    spec: &'a BoxSpec,
    settled: bool,
}

impl Reservation<'_> {
    fn settle(mut self) {
        self.settled = true;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.container.boxes().remove(&self.spec.id);
        }
    }
}

/// Sends the launcher its orders and learns who process 1 is.
async fn handshake(socket: &PacketSocket, spec: &launch::Spec) -> Result<Process> {
    socket
        .send_json(spec)
        .await
        .map_err(|e| failed("was launched")(e.into()))?;
    let answer = socket
        .receive()
        .await
        .map_err(|e| failed("was launched")(e.into()))?;
    match serde_json::from_slice(&answer) {
        Ok(Report::Pid(pid)) => Process::open(pid).map_err(|e| failed("was launched")(e.into())),
        _ => Err(failed("was launched")(reason(&answer).into())),
    }
}

pub(super) fn process_netns(process: &Process) -> Result<Arc<OwnedFd>> {
    let netns = dorm_sys::namespace::open(process.pid, "net").map_err(|e| failed("was set up")(e.into()))?;
    Ok(Arc::new(netns))
}

/// What process 1 still said before it went, if it is gone.
async fn said(socket: &PacketSocket) -> Option<String> {
    let answer = tokio::time::timeout(Duration::from_millis(200), socket.receive()).await;
    answer.ok()?.ok().map(|packet| reason(&packet))
}

pub(super) fn reason(packet: &[u8]) -> String {
    match serde_json::from_slice(packet) {
        Ok(Report::Failed(reason)) => reason,
        _ => String::from_utf8_lossy(packet).into_owned(),
    }
}

fn random_uuid() -> String {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random source answers");
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    dorm_sys::uuid::text(bytes)
}
