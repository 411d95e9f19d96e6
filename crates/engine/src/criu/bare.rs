//! The freezer and CRIU with nothing of dorm around them, for `dorm bench` to compare with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dorm_sys::cgroup::{Group, Hierarchy};
use dorm_sys::process::Process;
use rustix::process::Signal;

use super::manifest::{Manifest, Unusable};
use super::{Criu, Talk};
use crate::host::large_pages::LargePages;
use crate::host::{ended, instance};
use crate::launch::{Job, Launcher, Spec};
use crate::{EngineError, Id, Result};

/// Does `work` as a restore does, where it can be: with memory in large pages.
pub fn in_large_pages<T>(work: impl FnOnce() -> T) -> T {
    let _large = LargePages::hold();
    work()
}

/// For boxes and images of the daemon whose data directory is `data`.
#[derive(Debug, Clone)]
pub struct Bare {
    data: PathBuf,
    launcher: PathBuf,
    cgroups: Hierarchy,
    criu: Result<Criu, String>,
}

impl Bare {
    /// The error says in words why there is nothing to compare with.
    pub fn open(data: &Path, launcher: &Path) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("it needs root".to_owned());
        }
        if !data.join("pool/homes").is_dir() {
            return Err(format!("{} is no data directory of this machine", data.display()));
        }
        Ok(Self {
            data: std::fs::canonicalize(data).map_err(|e| e.to_string())?,
            launcher: launcher.to_owned(),
            cgroups: Hierarchy::open(&format!("dorm-{}", instance(data))).map_err(|e| e.to_string())?,
            criu: super::find(data, launcher),
        })
    }

    /// `Ok` if there is a CRIU, otherwise the reason why not.
    pub fn has_criu(&self) -> Result<(), String> {
        self.criu.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    fn criu(&self) -> Result<&Criu> {
        self.criu
            .as_ref()
            .map_err(|reason| EngineError::CannotCheckpoint(reason.clone()))
    }

    fn group(&self, id: &Id) -> Group {
        self.cgroups.group(id.as_str())
    }

    /// Bytes of memory of all processes of a box, each page divided among those that share it.
    pub fn pss(&self, id: &Id) -> io::Result<u64> {
        let mut kilobytes = 0;
        for pid in self.group(id).processes()? {
            let told = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            let pss = told.lines().find_map(|line| line.strip_prefix("Pss:"));
            let pss = pss.and_then(|text| text.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
            kilobytes += pss.ok_or(io::ErrorKind::InvalidData)?;
        }
        Ok(kilobytes << 10)
    }

    pub fn freeze(&self, id: &Id) -> io::Result<()> {
        self.group(id).freeze()
    }

    pub fn thaw(&self, id: &Id) -> io::Result<()> {
        self.group(id).thaw()
    }

    /// Where the image of a hibernated agent is.
    pub fn image_of(&self, id: &Id) -> io::Result<PathBuf> {
        let folder = std::fs::read_dir(self.data.join("images").join(id.as_str()))?;
        let whole = |path: &PathBuf| path.extension().is_none();
        let found = folder.filter_map(|entry| Some(entry.ok()?.path())).find(whole);
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Writes the memory of a frozen box to the directory `images`, and leaves the box as it is.
    pub async fn dump(&self, id: &Id, pid: i32, images: &Path) -> Result<Duration> {
        let began = Instant::now();
        let home = self.data.join("pool/homes").join(id.as_str());
        let names = self
            .criu()?
            .dump(
                &self.launcher,
                pid,
                &self.group(id),
                &home,
                &[],
                images,
                Talk::Errors,
                std::future::pending(),
            )
            .await?;
        let took = began.elapsed();
        super::forget(&home, &names);
        Ok(took)
    }

    /// Brings back the box of an image in large pages, without network, limits or a look at its checksums, and ends it. Measured is CRIU
    /// alone, from its start until the box runs; its stage is set while it starts.
    pub async fn restore(&self, id: &Id, image: &Path) -> Result<Duration> {
        let criu = self.criu()?;
        let failed = || EngineError::io("cannot start criu");
        let (manifest, _) = Manifest::open(image).map_err(Unusable::into_error)?;
        let work = tempfile::tempdir().map_err(failed())?;
        let (program, hand) = (self.launcher().await?, self.launcher().await?);
        let began = Instant::now();
        let waiting = program.become_criu(criu.job(0, false)).await;
        let waiting = waiting.map_err(failed())?;
        let restored = async {
            let spec = Spec {
                volumes: Vec::new(),
                home: self.data.join("pool/homes").join(id.as_str()),
                uid_base: manifest.uid_base,
                job: Job::Stage {
                    criu: waiting.pid(),
                    guest: self.data.join("guests").join(&manifest.guest_hash),
                    join: Vec::new(),
                },
            };
            hand.stage(&spec).await.map_err(failed())?;
            let large = LargePages::hold();
            let restoring = criu.restore(&waiting.socket, &[], image, work.path()).await?;
            restoring.namespaces().await?;
            restoring.memory().await?;
            drop(large);
            let pid = restoring.finish().await?;
            Ok((pid, began.elapsed()))
        }
        .await;
        hand.end().await;
        waiting.end().await;
        let (pid, took) = restored?;
        let restored = Process::open(pid).map_err(EngineError::io("cannot find the restored box"))?;
        let _ = restored.signal(Signal::KILL);
        ended(&restored).await;
        Ok(took)
    }

    async fn launcher(&self) -> Result<Launcher> {
        let launcher = Launcher::start(&self.launcher, Vec::new(), None).await;
        launcher.map_err(EngineError::io("cannot start criu"))
    }
}
