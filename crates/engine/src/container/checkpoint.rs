//! Memory images: made of a frozen box, and turned into a running one.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use dorm_sys::process::Process;
use rustix::process::Signal;

use super::spare::Spare;
use super::start::{process_netns, record_of};
use super::{Container, LiveBox, ended};
use crate::criu::Criu;
use crate::criu::manifest::{Manifest, Pages};
use crate::launch;
use crate::{BoxRecord, BoxSpec, Dumped, EngineError, Id, Result};

impl Container {
    /// The reason why not, in words.
    pub(super) fn usable_criu(&self) -> Result<&Criu, String> {
        let criu = self.criu.as_ref().map_err(Clone::clone)?;
        criu.still_there().map(|()| criu)
    }

    fn criu(&self) -> Result<&Criu> {
        self.usable_criu().map_err(EngineError::CannotCheckpoint)
    }

    pub(super) async fn dump_box(&self, id: &Id, image: &Path) -> Result<Dumped> {
        let criu = self.criu()?;
        let live = self.live(id)?;
        let failed = || EngineError::io("cannot write the memory image");
        let unfinished = Unfinished::make(image).map_err(failed())?;
        let home = self.pool.home_path(id);
        let began = Instant::now();
        let names = criu
            .dump(
                &self.launcher,
                live.process.pid,
                &live.group,
                &home,
                &live.volumes,
                &unfinished.0,
            )
            .await?;
        live.note_names(names);
        tracing::debug!(%id, took = ?began.elapsed(), "memory read");
        let (id, image, version) = (id.clone(), image.to_owned(), criu.version.clone());
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
                .unwrap_or_else(|e| Err(e.to_string()))
                .map_err(EngineError::BadImage)?
        };
        let guest = self.guest.path.with_file_name(&manifest.guest_hash);
        if !guest.exists() {
            return Err(EngineError::BadImage(format!(
                "its guest {} is no longer here",
                manifest.guest_hash
            )));
        }
        if manifest.uid_base != spec.uid_base {
            return Err(EngineError::BadImage(format!(
                "it was made for ids from {} on",
                manifest.uid_base
            )));
        }
        let work = tempfile::Builder::new().prefix("restore-").tempdir_in(&self.work);
        let work = work.map_err(EngineError::io("cannot make a directory for criu"))?;
        Still::mark(image);
        let check = Check::begin(pages);
        let come = self.bring_back(criu, spec, &manifest.guest_hash, guest, image, work.path(), check);
        self.occupy(spec, come).await
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
        let limits = self.group_limits(&spec.limits)?;
        let mut launcher = self.spares.take().await?;
        let (group, join) = launcher.claim(&self.cgroups, &spec.id, &limits)?;
        let launch = launch::Spec {
            home: self.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes: self.volumes(spec)?,
            job: criu.job(Some(guest), join, 0),
        };
        let Spare {
            process: mut criu_process,
            socket,
            ..
        } = launcher;
        let restored = async {
            let restoring = criu.restore(&socket, &launch, image, work).await?;
            let started = began.elapsed();
            let pid = restoring.namespaces().await?;
            let namespaces = began.elapsed();
            let netns = dorm_sys::namespace::open(pid, "net")
                .map_err(EngineError::io("cannot open the box's network"))?;
            let (netns, inside) = (Arc::new(netns), self.network.inside());
            self.network
                .attach(&spec.id, spec.slot, &spec.network, &netns)
                .await?;
            inside.own_every_address(netns.clone(), true).await?;
            let network = began.elapsed();
            restoring.memory().await?;
            let memory = began.elapsed();
            // Nothing of the box has run yet.
            if let Err(reason) = check.verdict().await {
                restoring.give_up().await;
                return Err(EngineError::BadImage(reason));
            }
            let checked = began.elapsed();
            Still::unmark(image).map_err(EngineError::io("cannot mark the memory image as used"))?;
            inside.own_every_address(netns, false).await?;
            renew(pid, &spec.hostname).map_err(EngineError::io("cannot give the box its identity"))?;
            let restored = restoring.finish().await;
            tracing::debug!(id = %spec.id, ?started, ?namespaces, ?network, ?memory, ?checked, done = ?began.elapsed(), "restored");
            restored
        }
        .await;
        drop(socket);
        let _ = criu_process.wait().await;
        let restored = match restored {
            // Memory that is damaged explains whatever else went wrong.
            Err(EngineError::BadImage(reason)) => {
                return Err(EngineError::BadImage(
                    check.verdict().await.err().unwrap_or(reason),
                ));
            }
            restored => restored?,
        };
        let process = Process::open(restored).map_err(EngineError::io("cannot find the restored box"))?;
        let found = process_netns(&process).and_then(|netns| {
            let record =
                record_of(&process, guest_hash).map_err(EngineError::io("cannot find the restored box"))?;
            Ok((netns, record))
        });
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

/// Tells of a restore that was broken off before anything of the box ran: what it has changed in the home, as files that have
/// lost their names get passing ones, is undone by the next. The mark is good for one boot of the host, so that it need not reach
/// the disk: after a crash of the host nobody knows what ran.
pub(super) struct Still;

impl Still {
    const NAME: &str = "still";

    /// Where the disk is full, a restore that is broken off counts as one that is not.
    fn mark(image: &Path) {
        let _ = dorm_sys::process::host_boot_id().and_then(|boot| fs::write(image.join(Self::NAME), boot));
    }

    fn unmark(image: &Path) -> std::io::Result<()> {
        match fs::remove_file(image.join(Self::NAME)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn is_marked(image: &Path) -> bool {
        let marked = fs::read_to_string(image.join(Self::NAME)).ok();
        marked.is_some() && marked == dorm_sys::process::host_boot_id().ok()
    }
}

/// The comparison of an image's memory with its checksums, while CRIU reads it.
struct Check {
    running: Option<tokio::task::JoinHandle<Result<(), String>>>,
    verdict: Result<(), String>,
}

impl Check {
    fn begin(pages: Pages) -> Self {
        Self {
            running: Some(tokio::task::spawn_blocking(move || pages.verify())),
            verdict: Ok(()),
        }
    }

    async fn verdict(&mut self) -> Result<(), String> {
        if let Some(running) = self.running.take() {
            self.verdict = running.await.unwrap_or_else(|e| Err(e.to_string()));
        }
        self.verdict.clone()
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

/// An image that has not got its name yet, and is removed if it never does.
struct Unfinished(PathBuf);

impl Unfinished {
    fn make(image: &Path) -> std::io::Result<Self> {
        let mut name = image.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let directory = image.with_file_name(name);
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        // Restored processes look for files here after they have become an ordinary user. The data directory around it
        // lets nobody in.
        fs::DirBuilder::new()
            .mode(0o755)
            .recursive(true)
            .create(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
