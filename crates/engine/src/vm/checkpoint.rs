//! The state of a machine on disk, and back.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dorm_proto::vm::{Answer, Order};
use dorm_sys::process::Process;

use super::command::Hardware;
use super::link::refused;
use super::reach::{in_time, now_ms, too_late};
use super::start::entropy;
use super::{Vm, state};
use crate::criu::manifest::{Manifest, Unusable};
use crate::criu::room;
use crate::host::image::Unfinished;
use crate::host::{LiveBox, ended, failed, record_of};
use crate::{BoxRecord, BoxSpec, Dumped, EngineError, Isolation, Result};

/// The state of the devices, as QEMU writes it.
pub(super) const STATE: &str = "state";
/// More than it takes: some 450 KB, whatever the memory, which is in the home.
pub(super) const STATE_SIZE: u64 = 1 << 20;
/// [`Hardware`], as JSON.
pub(super) const HARDWARE: &str = "hardware.json";
/// How long a machine that has gone on may take to hear who it is. Its guest waits a little longer before it lets the processes go on without.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(120);
/// Between one try and the next.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a QEMU that says nothing any more may take to be gone.
const ENDED_WITHIN: Duration = Duration::from_secs(5);

impl Vm {
    /// Of a machine that stands still, which it goes on doing.
    pub(super) async fn dump_machine(&self, live: &LiveBox, image: &Path) -> Result<Dumped> {
        let cannot = |e: io::Error| EngineError::CannotCheckpoint(e.to_string());
        let failed = || EngineError::io("cannot write the machine's state");
        let began = Instant::now();
        let hardware = std::fs::read(self.hardware_file(live)).map_err(failed())?;
        let unfinished = Unfinished::make(image).map_err(failed())?;
        std::fs::write(unfinished.0.join(HARDWARE), hardware).map_err(failed())?;
        let file = File::create_new(unfinished.0.join(STATE)).map_err(failed())?;
        // QEMU has to move for this; the machine does not.
        live.thaw()?;
        let saved = async {
            let mut monitor = self.monitor(live).await?;
            if monitor.is_running().await.map_err(cannot)? {
                return Err(cannot(io::Error::other("the machine does not stand still")));
            }
            let saved = state::keep(&mut monitor, file).await;
            saved.map_err(|e| room::unsaved(&unfinished.0, e.to_string()))?;
            Ok(monitor.version)
        }
        .await;
        live.freeze().await?;
        let version = saved?;
        tracing::debug!(id = %live.id, took = ?began.elapsed(), "the machine's state is read");

        let (pool, id, image) = (self.host.pool.clone(), live.id.clone(), image.to_owned());
        let (guest_hash, uid_base) = (live.guest_hash.clone(), live.uid_base);
        Ok(Dumped::new(async move {
            let committed = tokio::task::spawn_blocking(move || {
                // It counts with the home's files, of which it is one.
                pool.sync_machine_memory(&id)?;
                Manifest::commit(&unfinished.0, &image, &guest_hash, uid_base, &version)
            });
            let committed = committed.await.unwrap_or_else(|e| Err(io::Error::other(e)));
            committed.map_err(failed())
        }))
    }

    pub(super) async fn restore_machine(&self, spec: &BoxSpec, image: &Path) -> Result<(LiveBox, BoxRecord)> {
        let began = Instant::now();
        let qemu = self.usable_qemu()?;
        let (manifest, hardware, state) = {
            let (image, memory) = (image.to_owned(), self.host.pool.machine_memory(&spec.id));
            let read = tokio::task::spawn_blocking(move || read(&image, &memory)).await;
            read.unwrap_or_else(|e| Err(e.into()))
                .map_err(Unusable::into_error)?
        };
        // The limit on the home is as for one that is started; its disk keeps the size it had.
        let pool = &self.host.pool;
        pool.prepare_machine(&spec.id, spec.uid_base, 0).await?;
        let checked = began.elapsed();
        let guest = &manifest.guest_hash;
        let launched = self.launch(spec, &qemu, &hardware, guest, true).await?;
        let launched_after = began.elapsed();
        let mut monitor = self.monitor(&launched.live).await?;
        if let Err(error) = monitor.load(&state).await {
            let is_refusal = is_refusal(&launched.live.process, error.kind()).await;
            let version = monitor.version.clone();
            // QEMU listens to one at a time, and is asked for the console.
            drop(monitor);
            let reason = self.explain(&launched, error).await;
            return Err(match is_refusal {
                true => refusal(manifest.made_by(), &version, reason),
                false => failed("was given its state")(reason.into()),
            });
        }
        let loaded = began.elapsed();
        // Before it goes on: whatever fails after that costs its memory.
        self.keep_hardware(&launched.live, &hardware)?;
        monitor
            .go_on()
            .await
            .map_err(|e| failed("was let go on")(e.into()))?;
        drop(monitor);
        // Before the guest is asked anything: it may be waiting for a file.
        self.serve_volumes(&launched.live);
        match self.introduce(spec, &launched.live).await {
            Ok(()) => {
                tracing::debug!(id = %spec.id, ?checked, launched = ?launched_after, ?loaded, done = ?began.elapsed(), "restored");
                Ok(launched.settle())
            }
            // Its memory is no longer what its state was saved with.
            Err(error) => {
                let reason = self.explain(&launched, error).await;
                Err(EngineError::BadImage(format!(
                    "the machine went on, and then {reason}"
                )))
            }
        }
    }

    /// Tells a machine that has just gone on who it is, and what time it is. Its memory is lost with it, so that it is tried for as long as
    /// there is hope: a guest may lose a conversation when its machine wakes, and the daemon may be short of descriptors or memory.
    async fn introduce(&self, spec: &BoxSpec, live: &LiveBox) -> io::Result<()> {
        let until = tokio::time::Instant::now() + INTRODUCED_WITHIN;
        loop {
            let telling = tokio::time::timeout_at(until, self.tell(spec, live));
            let told = tokio::select! {
                told = telling => told.unwrap_or_else(|_| Err(too_late())),
                _ = ended(&live.process) => return Err(io::Error::other("the machine has ended")),
            };
            match told {
                Err(error) if tokio::time::Instant::now() < until => {
                    tracing::debug!(id = %spec.id, %error, "the machine is told again who it is");
                    tokio::time::sleep(PAUSE).await;
                }
                told => return told,
            }
        }
    }

    async fn tell(&self, spec: &BoxSpec, live: &LiveBox) -> io::Result<()> {
        let network = self.host.network.of_machine(spec.slot);
        let order = Order::Resume {
            hostname: spec.hostname.clone(),
            network: network.map_err(io::Error::other)?,
            now_ms: now_ms(),
            entropy: entropy(),
            agent_id: Some(spec.id.to_string()),
        };
        let link = self.link(live, INTRODUCED_WITHIN).await?;
        let answer = in_time(&link, link.order(&order)).await;
        match answer.inspect_err(|_| link.end())? {
            Answer::Done => Ok(()),
            // It knows who it is, and goes on. Root in it can do to its interface what he likes.
            Answer::Failed(reason) => {
                tracing::warn!(id = %spec.id, reason, "the machine is back, but perhaps without a network");
                Ok(())
            }
            other => Err(refused(other)),
        }
    }

    pub(super) async fn recover_machine(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        let group = self.host.cgroups.group(spec.id.as_str());
        let failed = || EngineError::io("cannot take charge of the restored machine");
        if !group.exists() {
            return Ok(None);
        }
        let members = group.processes().map_err(failed())?;
        // Beside it there may be the file server of its volumes; a launcher alone is a machine that has not come up.
        let is_qemu = |pid: &i32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.starts_with("qemu"))
        };
        let [pid] = members.into_iter().filter(is_qemu).collect::<Vec<_>>()[..] else {
            return Ok(None);
        };
        let guest_hash = Manifest::read(image).map_err(Unusable::into_error)?.guest_hash;
        let found = Process::open(pid).and_then(|process| {
            let netns = Arc::new(dorm_sys::namespace::open(pid, "net")?);
            let record = record_of(Isolation::Vm, &process, &guest_hash)?;
            Ok((process, netns, record))
        });
        let Ok((process, netns, record)) = found else {
            return Ok(None);
        };
        let live = LiveBox::new(process, netns, group, spec, &record);
        let has_gone_on = async { self.monitor(&live).await.ok()?.is_running().await.ok() };
        if has_gone_on.await != Some(true) {
            return Ok(None);
        }
        self.host
            .network
            .attach_machine(&spec.id, spec.slot, &spec.network)
            .await?;
        self.serve_volumes(&live);
        let Ok(()) = self.introduce(spec, &live).await else {
            return Ok(None);
        };
        // Where a daemon of an earlier version let it go on, it is not kept yet.
        if !self.hardware_file(&live).exists() {
            let hardware = std::fs::read(image.join(HARDWARE)).map_err(failed())?;
            let hardware: Hardware = serde_json::from_slice(&hardware).map_err(|e| failed()(e.into()))?;
            self.keep_hardware(&live, &hardware)?;
        }
        self.host.remember(live);
        Ok(Some(record))
    }

    /// Where it is kept what a machine that runs is made of.
    fn hardware_file(&self, live: &LiveBox) -> PathBuf {
        self.host.run_directory(&live.id).join(HARDWARE)
    }

    pub(super) fn keep_hardware(&self, live: &LiveBox, hardware: &Hardware) -> Result<()> {
        let file = self.hardware_file(live);
        let kept = self
            .host
            .make_run_directory(&live.id)
            .and_then(|_| std::fs::write(file, serde_json::to_vec(hardware)?));
        kept.map_err(EngineError::io("cannot keep what the machine is made of"))
    }
}

/// Whether QEMU, which failed to load a state, has seen it and would have none of it. That it was too slow, or was killed, says
/// nothing against the state.
async fn is_refusal(qemu: &Process, failure: io::ErrorKind) -> bool {
    match failure {
        io::ErrorKind::Other => true,
        io::ErrorKind::TimedOut => false,
        // It leaves with an exit code when it cannot read a state.
        _ => {
            let end = tokio::time::timeout(ENDED_WITHIN, ended(qemu)).await;
            end.ok().flatten().is_some_and(|end| end.exit_status().is_some())
        }
    }
}

/// The state is whole, as its checksum says. So the QEMU that wrote it would read it, if it is another.
fn refusal(made_by: &str, version: &str, reason: String) -> EngineError {
    if made_by == version {
        return EngineError::BadImage(reason);
    }
    let why = format!(
        "its memory was saved by {made_by} and is refused by {version}: {reason}; with that version it can be woken, and after \
         `dorm stop` it can be started from its files"
    );
    failed("was given its state")(why.into())
}

/// Everything of an image, compared with its manifest.
fn read(image: &Path, memory: &Path) -> Result<(Manifest, Hardware, File), Unusable> {
    let (manifest, _) = Manifest::open(image)?;
    let hardware = std::fs::read(image.join(HARDWARE)).map_err(Unusable::without(HARDWARE))?;
    let hardware: Hardware =
        serde_json::from_slice(&hardware).map_err(|e| Unusable::Damaged(format!("{HARDWARE}: {e}")))?;
    let found = std::fs::symlink_metadata(memory)
        .map_err(Unusable::without("the memory in the home that goes with it"))?;
    if !found.is_file() || found.len() != hardware.memory {
        let wrong = "the memory in the home is not the one that goes with it";
        return Err(Unusable::Damaged(wrong.to_owned()));
    }
    let state = File::open(image.join(STATE)).map_err(Unusable::without(STATE))?;
    Ok((manifest, hardware, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_qemu_that_left_by_itself_has_refused_a_state() {
        let refuses = async |script: &str, failure: io::ErrorKind| {
            let mut qemu = std::process::Command::new("sh")
                .args(["-c", script])
                .spawn()
                .unwrap();
            let process = Process::open(qemu.id() as i32).unwrap();
            let refuses = is_refusal(&process, failure).await;
            let _ = qemu.wait();
            refuses
        };
        assert!(refuses("exit 1", io::ErrorKind::UnexpectedEof).await);
        assert!(!refuses("kill -9 $$", io::ErrorKind::UnexpectedEof).await);
        assert!(!refuses("exit 1", io::ErrorKind::TimedOut).await);
    }

    #[test]
    fn a_state_that_another_version_refuses_is_kept_and_the_version_is_named() {
        let same = refusal("qemu 7.2.22", "qemu 7.2.22", "no such device".to_owned());
        assert!(matches!(same, EngineError::BadImage(_)), "{same:?}");
        let other = refusal("qemu 7.2.22", "qemu 10.0.2", "no such device".to_owned());
        assert!(matches!(other, EngineError::Start { .. }), "{other:?}");
        let told = crate::chain(&other);
        assert!(
            told.contains("saved by qemu 7.2.22") && told.contains("refused by qemu 10.0.2"),
            "{told}"
        );
    }
}
