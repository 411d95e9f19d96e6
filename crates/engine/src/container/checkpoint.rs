//! Memory images: made of a frozen box, and turned into a running one.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dorm_sys::process::Process;
use rustix::process::Signal;

use super::spare::Spare;
use super::start::{process_netns, record_of};
use super::{Container, LiveBox, ended};
use crate::criu::Criu;
use crate::criu::manifest::Manifest;
use crate::launch;
use crate::{BoxRecord, BoxSpec, EngineError, Id, MemoryImage, Result};

impl Container {
    pub(super) fn criu(&self) -> Result<&Criu> {
        self.criu
            .as_ref()
            .map_err(|reason| EngineError::CannotCheckpoint(reason.clone()))
    }

    pub(super) async fn checkpoint_box(&self, id: &Id, image: &Path) -> Result<MemoryImage> {
        let criu = self.criu()?;
        let live = self.live(id)?;
        let failed = || EngineError::io("cannot write the memory image");
        let unfinished = Unfinished::make(image).map_err(failed())?;
        criu.dump(
            &self.launcher,
            live.process.pid,
            &live.group.freezer(),
            &unfinished.0,
        )
        .await?;
        let (image, version) = (image.to_owned(), criu.version.clone());
        let (guest_hash, uid_base) = (live.guest_hash.clone(), live.uid_base);
        let committed = tokio::task::spawn_blocking(move || {
            let _ = fs::remove_file(unfinished.0.join("criu.log"));
            Manifest::commit(&unfinished.0, &image, &guest_hash, uid_base, &version)
        });
        committed
            .await
            .unwrap_or_else(|e| Err(std::io::Error::other(e)))
            .map_err(failed())
    }

    pub(super) async fn restore_box(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        let criu = self.criu()?;
        let manifest = {
            let image = image.to_owned();
            let verified = tokio::task::spawn_blocking(move || Manifest::verify(&image)).await;
            verified
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
        self.occupy(
            spec,
            self.bring_back(criu, spec, &manifest.guest_hash, guest, image, work.path()),
        )
        .await
    }

    async fn bring_back(
        &self,
        criu: &Criu,
        spec: &BoxSpec,
        guest_hash: &str,
        guest: PathBuf,
        image: &Path,
        work: &Path,
    ) -> Result<(LiveBox, BoxRecord)> {
        let limits = self.group_limits(&spec.limits)?;
        let mut launcher = self.spares.take().await?;
        let (group, join) = launcher.claim(&self.cgroups, &spec.id, &limits)?;
        let launch = launch::Spec {
            home: self.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            job: criu.job(Some(guest), join, 0),
        };
        let Spare {
            process: mut criu_process,
            socket,
            ..
        } = launcher;
        let restored = async {
            let restoring = criu.restore(&socket, &launch, image, work).await?;
            let pid = restoring.namespaces().await?;
            let netns = dorm_sys::namespace::open(pid, "net")
                .map_err(EngineError::io("cannot open the box's network"))?;
            self.network.attach(&spec.id, spec.slot, &Arc::new(netns)).await?;
            restoring.finish().await
        }
        .await;
        drop(socket);
        let _ = criu_process.wait().await;
        let process = Process::open(restored?).map_err(EngineError::io("cannot find the restored box"))?;
        let found = process_netns(&process).and_then(|netns| {
            // A fork comes back under the name of the agent that its memory was taken from.
            dorm_sys::namespace::open(process.pid, "uts")
                .and_then(|uts| dorm_sys::namespace::set_hostname(uts.as_fd(), &spec.hostname))
                .map_err(EngineError::io("cannot name the restored box"))?;
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
