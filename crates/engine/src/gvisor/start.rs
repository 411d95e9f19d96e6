//! Bringing up a sandbox.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dorm_proto::boot::{BootOnStdio, READY, SECRET_LENGTH};
use dorm_sys::cgroup::{Group, GroupLimits};
use dorm_sys::process::Process;
use rustix::fs::{CWD, FileType, Mode};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use super::find::Runsc;
use super::{Gvisor, bundle, time_for};
use crate::host::{LiveBox, failed, netns_of, random_hex, record_of};
use crate::launch::{self, Job, Launcher, Staged, complaint, tellable};
use crate::{BoxRecord, BoxSpec, Id, Isolation, Result};

/// What gVisor takes on this machine for a process of the box, and for itself. Without room for more it breaks off.
const THREADS_PER_PROCESS: u32 = 3;
const OWN_THREADS: u32 = 256;
const MOST_WORDS: usize = 64 << 10;
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Names in the run directory: what connections to the guest begin with, and the number of the sandbox's process.
pub(super) const SECRET: &str = "secret";
pub(super) const PID: &str = "pid";

/// What a sandbox is to be made of.
pub(super) struct Plan<'a> {
    pub(super) guest: PathBuf,
    pub(super) guest_hash: &'a str,
    /// Of its guest.
    pub(super) secret: String,
    /// Of runsc.
    pub(super) subcommand: Vec<PathBuf>,
    /// Whether the guest is booted, and says when it is ready; otherwise it has been, long ago.
    pub(super) boots: bool,
    /// How long all that may take.
    pub(super) within: Duration,
}

impl Gvisor {
    pub(super) async fn start_box(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        let plan = Plan {
            guest: self.host.guest.path.clone(),
            guest_hash: &self.host.guest.hash,
            secret: random_hex::<{ SECRET_LENGTH / 2 }>(),
            subcommand: vec!["run".into()],
            boots: true,
            within: time_for(0),
        };
        self.host.occupy(spec, self.bring_up(spec, &plan)).await
    }

    pub(super) async fn bring_up(&self, spec: &BoxSpec, plan: &Plan<'_>) -> Result<(LiveBox, BoxRecord)> {
        let limits = self.host.group_limits(&spec.limits)?;
        let limits = GroupLimits {
            pids: limits
                .pids
                .saturating_mul(THREADS_PER_PROCESS)
                .saturating_add(OWN_THREADS),
            ..limits
        };
        let volumes = self.host.volumes(&spec.volumes)?;
        let group = self.host.cgroups.create(spec.id.as_str(), &limits);
        let group = group.map_err(|e| failed("was given its limits")(e.into()))?;
        let described = self
            .host
            .make_run_directory(&spec.id)
            .and_then(|directory| describe(directory, spec, &plan.secret));
        let (staged, said) = described.map_err(|e| failed("was described")(e.into()))?;
        let launch = launch::Spec {
            home: self.host.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes,
            job: Job::Runsc {
                command: command(&*self.runsc()?, &spec.id, &staged, &plan.subcommand),
                guest: plan.guest.clone(),
                directory: staged.0.clone(),
            },
        };
        let coming = self.come_up(spec, &group, &launch, said, plan.boots);
        let come = tokio::time::timeout(plan.within, coming).await;
        come.unwrap_or_else(|e| Err(failed("was booted")(e.into())))?;
        // It may hold what nobody else is to know, and has been read.
        let _ = fs::remove_file(staged.input());
        let found = self.find_sandbox(spec, group, plan.guest_hash);
        found.map_err(|e| failed("was recorded")(e.into()))
    }

    /// The box whose sandbox has left the number of its process.
    pub(super) fn find_sandbox(
        &self,
        spec: &BoxSpec,
        group: Group,
        guest_hash: &str,
    ) -> io::Result<(LiveBox, BoxRecord)> {
        let pid = fs::read_to_string(self.host.run_directory(&spec.id).join(PID))?;
        let pid = pid.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let process = Process::open(pid)?;
        if !group.processes()?.contains(&pid) {
            return Err(io::Error::other("the sandbox has ended"));
        }
        let netns = netns_of(&process)?;
        let record = record_of(Isolation::Gvisor, &process, guest_hash)?;
        let live = LiveBox::new(process, netns, group, spec, &record);
        Ok((live, record))
    }

    /// Gives the launcher its orders, the sandbox its network, and waits for the guest.
    async fn come_up(
        &self,
        spec: &BoxSpec,
        group: &Group,
        launch: &launch::Spec,
        mut said: pipe::Receiver,
        boots: bool,
    ) -> Result<()> {
        let launched = |e: io::Error| failed("was launched")(e.into());
        let launcher = Launcher::start(&self.host.launcher, group.join_files(), None).await;
        let mut launcher = launcher.map_err(launched)?;
        let process = launcher.launch(launch).await.map_err(launched)?;
        let netns = netns_of(&process).map_err(launched)?;
        self.host
            .network
            .attach(&spec.id, spec.slot, &spec.network, &netns)
            .await?;
        drop(netns);
        launcher.socket.send(b"go").await.map_err(launched)?;
        let status = launcher.process.wait().await.map_err(launched)?;
        let directory = self.host.run_directory(&spec.id);
        if !status.success() {
            // The launcher's own words, or else those of runsc.
            let said = tokio::time::timeout(Duration::ZERO, launcher.socket.receive()).await;
            let said = said.ok().and_then(Result::ok).map(|packet| complaint(&packet));
            let why = said.unwrap_or_else(|| explanation(&directory));
            return Err(failed("was booted")(why.into()));
        }
        if !boots {
            return Ok(());
        }
        let mut words = Vec::new();
        while words != READY {
            let read = said.read_buf(&mut words).await;
            read.map_err(|e| failed("was booted")(e.into()))?;
            if !READY.starts_with(&words) {
                let rest = async {
                    while words.len() < MOST_WORDS && said.read_buf(&mut words).await.is_ok_and(|n| n > 0) {}
                };
                let _ = tokio::time::timeout(LAST_WORDS, rest).await;
                let words = tellable(&String::from_utf8_lossy(&words));
                return Err(failed("was set up")(words.into()));
            }
        }
        Ok(())
    }
}

/// Writes down the sandbox and what its guest is to know. Returns what the guest will say.
pub(super) fn describe(
    directory: PathBuf,
    spec: &BoxSpec,
    secret: &str,
) -> io::Result<(Staged, pipe::Receiver)> {
    let staged = Staged(directory);
    let described = serde_json::to_vec(&bundle::describe(spec, &staged))?;
    write_private(&staged.0.join("config.json"), &described)?;
    write_private(&staged.0.join(SECRET), secret.as_bytes())?;
    let boot = BootOnStdio {
        config: spec.boot.clone(),
        secret: secret.to_owned(),
    };
    write_private(&staged.input(), &serde_json::to_vec(&boot)?)?;
    rustix::fs::mknodat(CWD, staged.output(), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Open for both, so that there is no end before the first word.
    let said = pipe::OpenOptions::new()
        .read_write(true)
        .open_receiver(staged.output())?;
    Ok((staged, said))
}

/// What brings up the sandbox that was described.
pub(super) fn command(runsc: &Runsc, id: &Id, staged: &Staged, subcommand: &[PathBuf]) -> Vec<PathBuf> {
    let mut command = runsc.command(&staged.0);
    command.extend_from_slice(subcommand);
    command.extend(["--detach".into(), "--pid-file".into(), staged.0.join(PID)]);
    command.extend(["--bundle".into(), staged.0.clone(), id.as_str().into()]);
    command
}

fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    io::Write::write_all(&mut file, contents)
}

/// What a file of the run directory says, as far as anybody would read it.
pub(super) fn words(path: &Path) -> String {
    let mut words = Vec::new();
    let read = fs::File::open(path)
        .and_then(|file| io::Read::read_to_end(&mut io::Read::take(file, MOST_WORDS as u64), &mut words));
    match read {
        Ok(_) => String::from_utf8_lossy(&words).into_owned(),
        Err(_) => String::new(),
    }
}

/// What runsc last had to say.
fn explanation(directory: &Path) -> String {
    let said = words(&Staged(directory.to_owned()).errors());
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    format!("runsc: {}", tellable(last.unwrap_or("it ended without a word")))
}
