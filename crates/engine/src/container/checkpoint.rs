//! Memory images: made of a frozen box, and turned into a running one.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dorm_sys::cgroup::{Group, GroupLimits};
use dorm_sys::process::Process;
use rustix::process::Signal;

use super::Container;
use super::spare::Spares;
use crate::criu::manifest::{Manifest, Pages, Unusable};
use crate::criu::{Criu, LENT, Talk};
use crate::host::image::{Still, Unfinished};
use crate::host::{LiveBox, ended, netns_of, record_of};
use crate::launch::{self, Job};
use crate::network::Owned;
use crate::{BoxRecord, BoxSpec, Dumped, EngineError, Isolation, Result};

/// How long a box goes on whose state of the moment cannot be saved: twice as long each time, up to the last.
const MOMENT: Duration = Duration::from_millis(50);
const LAST_MOMENT: Duration = Duration::from_millis(1600);
/// How long a process that was killed may take to be gone.
const REAPED_WITHIN: Duration = Duration::from_secs(1);

/// Whether what keeps the memory from being saved will not be so a moment later: a connection that its other end gave up before
/// anybody accepted it, a process between two identities, or one that is starting another.
fn passes(reason: &str) -> bool {
    ["in-flight socket", "/ns/net: Permission denied", LENT]
        .iter()
        .any(|passing| reason.contains(passing))
}

impl Container {
    /// The reason why not, in words.
    pub(super) fn usable_criu(&self) -> Result<&Criu, String> {
        let criu = self.criu.as_ref().map_err(Clone::clone)?;
        criu.still_there().map(|()| criu)
    }

    fn criu_spares(&self) -> Result<&Arc<Spares>> {
        let none = || EngineError::CannotCheckpoint("there is no criu".to_owned());
        self.criu_spares.as_ref().ok_or_else(none)
    }

    fn criu(&self) -> Result<&Criu> {
        self.usable_criu().map_err(EngineError::CannotCheckpoint)
    }

    pub(super) async fn dump_box(&self, live: &LiveBox, image: &Path) -> Result<Dumped> {
        let criu = self.criu()?;
        let failed = || EngineError::io("cannot write the memory image");
        let home = self.host.pool.home_path(&live.id);
        let began = Instant::now();
        let (mut moment, mut talk) = (MOMENT, Talk::Errors);
        let (unfinished, names) = loop {
            let unfinished = Unfinished::make(image).map_err(failed())?;
            let (launcher, pid) = (&self.host.launcher, live.process.pid);
            let volumes: Vec<String> = live.volumes.iter().map(|volume| volume.path.clone()).collect();
            let dumped = criu.dump(launcher, pid, &live.group, &home, &volumes, &unfinished.0, talk);
            match dumped.await {
                Ok(names) => break (unfinished, names),
                Err(EngineError::CannotCheckpoint(reason)) if moment <= LAST_MOMENT && passes(&reason) => {
                    tracing::debug!(id = %live.id, reason, "the box goes on for a moment");
                    live.thaw()?;
                    tokio::time::sleep(moment).await;
                    moment *= 2;
                    live.freeze().await?;
                }
                // Once more, to hear which process it is.
                Err(EngineError::CannotCheckpoint(_)) if talk == Talk::Errors => talk = Talk::Steps,
                Err(error) => {
                    // A CRIU that was killed may have left names.
                    crate::criu::release(&home, &unfinished.0);
                    return Err(error);
                }
            }
        };
        live.note_names(names);
        tracing::debug!(id = %live.id, took = ?began.elapsed(), "memory read");
        let (id, image, version) = (live.id.clone(), image.to_owned(), criu.version.clone());
        let (guest_hash, uid_base) = (live.guest_hash.clone(), live.uid_base);
        Ok(Dumped::new(async move {
            let began = Instant::now();
            let committed = tokio::task::spawn_blocking(move || {
                let _ = fs::remove_file(unfinished.0.join("criu.log"));
                Manifest::commit(&unfinished.0, &image, &guest_hash, uid_base, &version)
            });
            let committed = committed
                .await
                .unwrap_or_else(|e| Err(std::io::Error::other(e)))
                .map_err(failed());
            tracing::debug!(%id, took = ?began.elapsed(), "memory image on disk");
            committed
        }))
    }

    pub(super) async fn restore_box(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        let criu = self.criu()?;
        let (manifest, pages) = {
            let image = image.to_owned();
            let opened = tokio::task::spawn_blocking(move || Manifest::open(&image)).await;
            opened
                .unwrap_or_else(|e| Err(e.into()))
                .map_err(Unusable::into_error)?
        };
        let guest = self.host.guest_in(&manifest, spec)?;
        let work = tempfile::Builder::new()
            .prefix("restore-")
            .tempdir_in(&self.host.work);
        let work = work.map_err(EngineError::io("cannot make a directory for criu"))?;
        Still::mark(image).map_err(EngineError::io("cannot mark the memory image as untouched"))?;
        let check = Check::begin(pages);
        let come = self.bring_back(criu, spec, &manifest.guest_hash, guest, image, work.path(), check);
        let restored = self.host.occupy(spec, come).await;
        // Only now: a launcher that starts takes a core, and who waits for a wake is in a hurry.
        self.all_spares().for_each(Spares::refill);
        restored
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "they have one thing in common, this call"
    )]
    async fn bring_back(
        &self,
        criu: &Criu,
        spec: &BoxSpec,
        guest_hash: &str,
        guest: PathBuf,
        image: &Path,
        work: &Path,
        mut check: Check,
    ) -> Result<(LiveBox, BoxRecord)> {
        let began = Instant::now();
        let (limits, volumes) = (
            self.host.group_limits(&spec.limits)?,
            self.host.volumes(&spec.volumes)?,
        );
        let (mut waiting, hand) = tokio::try_join!(self.criu_spares()?.take(), self.spares.take())?;
        let (group, join) = waiting.claim(&self.host.cgroups, &spec.id, &with_room(&limits))?;
        let waiting = waiting.launcher;
        let launch = launch::Spec {
            home: self.host.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes,
            job: Job::Stage {
                criu: waiting.pid(),
                guest,
                join,
            },
        };
        let network = &self.host.network;
        let staged = hand.launcher.stage(&launch).await;
        tokio::spawn(hand.end());
        let mut first = None;
        let restored = async {
            staged.map_err(EngineError::io("cannot start criu"))?;
            let started = began.elapsed();
            let restoring = criu.restore(&waiting.socket, &launch.volumes, image, work).await?;
            let policy = network.apply(&spec.id, spec.slot, &spec.network);
            let (pid, ()) = tokio::try_join!(restoring.namespaces(), policy)?;
            first = Process::open(pid).ok();
            let namespaces = began.elapsed();
            let netns = dorm_sys::namespace::open(pid, "net")
                .map_err(EngineError::io("cannot open the box's network"))?;
            let netns = Arc::new(netns);
            network.connect(&spec.id, spec.slot, &netns, Owned::Every).await?;
            let connected = began.elapsed();
            restoring.memory().await?;
            let memory = began.elapsed();
            // Nothing of the box has run yet.
            if let Err(why) = check.verdict().await {
                restoring.give_up().await;
                return Err(why.into_error());
            }
            let checked = began.elapsed();
            network.inside().disown_others(netns).await?;
            renew(pid, &spec.hostname).map_err(EngineError::io("cannot give the box its identity"))?;
            // All of its processes are there. What they may take of memory has to wait until CRIU's is gone.
            let limited = group.limit_processes(limits.pids);
            limited.map_err(EngineError::io("cannot give the box its limits"))?;
            // The last step before it runs: a daemon that dies earlier takes CRIU, and with it the box, along.
            Still::unmark(image).map_err(EngineError::io("cannot mark the memory image as used"))?;
            let restored = restoring.finish().await;
            tracing::debug!(id = %spec.id, ?started, ?namespaces, ?connected, ?memory, ?checked, done = ?began.elapsed(), "restored");
            restored
        }
        .await;
        // It is a member of the box's group.
        waiting.end().await;
        let restored = match restored {
            Ok(restored) => restored,
            Err(error) => {
                // It is a child of the daemon's, and CRIU has ended it.
                if let Some(first) = first {
                    let _ = tokio::time::timeout(REAPED_WITHIN, ended(&first)).await;
                }
                // Memory that is damaged, or could not be read, explains whatever else went wrong.
                return Err(check.verdict().await.err().map_or(error, Unusable::into_error));
            }
        };
        limit_again(&group, &limits).await;
        let process = Process::open(restored).map_err(EngineError::io("cannot find the restored box"))?;
        let found = netns_of(&process)
            .and_then(|netns| Ok((netns, record_of(Isolation::Container, &process, guest_hash)?)))
            .map_err(EngineError::io("cannot find the restored box"));
        match found {
            Ok((netns, record)) => Ok((LiveBox::new(process, netns, group, spec, &record), record)),
            Err(error) => {
                let _ = process.signal(Signal::KILL);
                ended(&process).await;
                Err(error)
            }
        }
    }
}

/// What a box that was at its limits and CRIU, which brings it back within its group, take together. Nothing of the box runs meanwhile.
fn with_room(limits: &GroupLimits) -> GroupLimits {
    GroupLimits {
        // Processes that have ended but lead a session come back for a moment.
        pids: limits.pids.saturating_mul(2).saturating_add(64),
        memory: limits
            .memory
            .saturating_add(limits.memory / 4)
            .saturating_add(64 << 20),
        ..limits.clone()
    }
}

/// Of a box that is back, and alone in its group.
pub(super) async fn limit_again(group: &Group, limits: &GroupLimits) {
    let (to_limit, limits) = (group.clone(), limits.clone());
    // It waits for memory that is given back.
    let limited = tokio::task::spawn_blocking(move || to_limit.lower(&limits)).await;
    if let Err(error) = limited.unwrap_or_else(|e| Err(std::io::Error::other(e))) {
        tracing::warn!(%error, ?group, "a box that came back may take more than its limits");
    }
}

/// The comparison of an image's memory with its checksums, while CRIU reads it.
struct Check(Option<tokio::task::JoinHandle<Result<(), Unusable>>>);

impl Check {
    fn begin(pages: Pages) -> Self {
        Self(Some(tokio::task::spawn_blocking(move || pages.verify())))
    }

    /// An error is told once.
    async fn verdict(&mut self) -> Result<(), Unusable> {
        match self.0.take() {
            Some(running) => running.await?,
            None => Ok(()),
        }
    }
}

/// What must not be as it was when the image was made, which several boxes may come from. Nothing runs yet.
fn renew(pid: i32, hostname: &str) -> std::io::Result<()> {
    let uts = dorm_sys::namespace::open(pid, "uts")?;
    dorm_sys::namespace::set_hostname(uts.as_fd(), hostname)?;
    if let Err(error) = dorm_sys::random::reseed() {
        tracing::warn!(%error, "the random generator cannot be seeded anew");
    }
    Ok(())
}
