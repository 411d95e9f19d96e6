//! runsc with nothing of dorm around it, for `dorm bench` to compare with.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::find::{Runsc, find};
use super::reach::tables_of;
use super::start::{SECRET, command, describe};
use crate::criu::manifest::Manifest;
use crate::host::netns_of;
use crate::launch::{Job, Launcher, Spec, Staged};
use crate::network::Inside;
use crate::{BootConfig, BoxSpec, Id, Isolation, Limits, network};

const PAUSE: Duration = Duration::from_millis(1);
const WITHIN: Duration = Duration::from_secs(60);
/// A copy of a home, in the pool.
const COPY: &str = "bench-runsc";

/// For boxes of the daemon whose data directory is `data`.
#[derive(Debug, Clone)]
pub struct BareRunsc {
    data: PathBuf,
    launcher: PathBuf,
    runsc: Runsc,
}

impl BareRunsc {
    /// The error says in words why there is nothing to compare with.
    pub fn open(data: &Path, launcher: &Path) -> Result<Self, String> {
        Ok(Self {
            data: data.to_owned(),
            launcher: launcher.to_owned(),
            runsc: find(data)?,
        })
    }

    /// How long a plain runsc takes to run `true` on the files in `root`, which stay as they are.
    pub async fn run(&self, root: &Path) -> io::Result<Duration> {
        let folder = directory()?;
        let description = json!({
            "ociVersion": "1.0.2",
            "process": { "user": { "uid": 0, "gid": 0 }, "args": ["/bin/true"], "cwd": "/" },
            "root": { "path": fs::canonicalize(root)?, "readonly": true },
            "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
            "linux": { "namespaces": [
                { "type": "network" }, { "type": "pid" }, { "type": "mount" }, { "type": "ipc" }, { "type": "uts" },
            ] },
        });
        fs::write(
            folder.path().join("config.json"),
            serde_json::to_vec(&description)?,
        )?;
        let name = Path::new("bench");
        let begun = Instant::now();
        // Without a network: that of a box is prepared by its launcher.
        let run = ["--network=none", "run", "--bundle"];
        let ran = self.call(folder.path(), &run, &[folder.path(), name]).await;
        let took = begun.elapsed();
        let _ = self.call(folder.path(), &["delete", "--force"], &[name]).await;
        ran.map(|()| took)
    }

    /// How long a plain runsc takes to bring back the box of `image`, which has so much memory, until its guest answers, and then to
    /// write an image of its own. It has no network but its loopback, and no limits, its home is a copy, and nobody looks at checksums.
    pub async fn restore(&self, id: &Id, image: &Path, memory: u64) -> io::Result<(Duration, Duration)> {
        let manifest = Manifest::read(image).map_err(io::Error::other)?;
        let home = Copied::make(&self.data, id)?;
        let folder = directory()?;
        let spec = spec(id, manifest.uid_base, memory);
        let secret = fs::read_to_string(image.join(SECRET))?;
        let (staged, _said) = describe(folder.path().to_owned(), &spec, &secret)?;
        let measured = async {
            let begun = Instant::now();
            self.launch(&spec, &staged, &home.path(), image, &manifest)
                .await?;
            while let Err(error) = tables_of(&staged.0, id).await {
                if begun.elapsed() > WITHIN {
                    return Err(error);
                }
                tokio::time::sleep(PAUSE).await;
            }
            let restored = begun.elapsed();
            let written = folder.path().join("image");
            fs::create_dir(&written)?;
            let begun = Instant::now();
            let options = [
                "checkpoint",
                "--leave-running",
                "--compression=none",
                "--exclude-committed-zero-pages",
                "--image-path",
            ];
            self.call(&staged.0, &options, &[&written, Path::new(id.as_str())])
                .await?;
            Ok((restored, begun.elapsed()))
        }
        .await;
        let ended = self
            .call(&staged.0, &["delete", "--force"], &[Path::new(id.as_str())])
            .await;
        let measured = measured?;
        ended?;
        Ok(measured)
    }

    async fn launch(
        &self,
        spec: &BoxSpec,
        staged: &Staged,
        home: &Path,
        image: &Path,
        manifest: &Manifest,
    ) -> io::Result<()> {
        let mut launcher = Launcher::start(&self.launcher, Vec::new(), None).await?;
        let launch = Spec {
            home: home.to_owned(),
            uid_base: spec.uid_base,
            volumes: Vec::new(),
            job: Job::Runsc {
                command: command(&self.runsc, &spec.id, staged, &self.runsc.restore(image)),
                guest: self.data.join("guests").join(&manifest.guest_hash),
                directory: staged.0.clone(),
            },
        };
        let process = launcher.launch(&launch).await?;
        // The guest listens there, and gVisor breaks off if it cannot bind again what was bound.
        let inside = Inside::start().map_err(io::Error::other)?;
        let prepared = inside.loop_back(netns_of(&process)?).await;
        prepared.map_err(io::Error::other)?;
        launcher.socket.send(b"go").await?;
        match launcher.process.wait().await?.success() {
            true => Ok(()),
            false => Err(io::Error::other(
                fs::read_to_string(staged.errors()).unwrap_or_default(),
            )),
        }
    }

    async fn call(&self, state: &Path, options: &[&str], rest: &[&Path]) -> io::Result<()> {
        let words = self.runsc.command(state);
        let mut command = tokio::process::Command::new(&words[0]);
        command.args(&words[1..]).args(options).args(rest);
        command.current_dir("/").stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(WITHIN, command.output()).await??;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(format!(
            "runsc {}: {}",
            options.join(" "),
            said.lines().next().unwrap_or_default()
        )))
    }
}

/// Where paths of sockets are short, and users of a box get through.
fn directory() -> io::Result<TempDir> {
    let folder = tempfile::Builder::new()
        .prefix("dorm-bench-")
        .tempdir_in("/run")?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711))?;
    Ok(folder)
}

fn spec(id: &Id, uid_base: u32, memory: u64) -> BoxSpec {
    BoxSpec {
        id: id.clone(),
        isolation: Isolation::Gvisor,
        hostname: "bench".to_owned(),
        slot: 0,
        uid_base,
        limits: Limits {
            cpu_millis: 0,
            memory,
            pids: 0,
            disk: 0,
            io_bps: None,
        },
        boot: BootConfig::default(),
        network: network::Policy::default(),
        volumes: Vec::new(),
    }
}

/// A copy of a home, that goes with this.
struct Copied {
    pool: PathBuf,
}

impl Copied {
    fn make(data: &Path, id: &Id) -> io::Result<Self> {
        let pool = data.join("pool");
        let home = File::open(pool.join("homes").join(id.as_str()))?;
        let parent = File::open(&pool)?;
        let _ = dorm_sys::btrfs::delete_subvolume(parent.as_fd(), OsStr::new(COPY));
        dorm_sys::btrfs::snapshot(home.as_fd(), parent.as_fd(), OsStr::new(COPY), false)?;
        Ok(Self { pool })
    }

    fn path(&self) -> PathBuf {
        self.pool.join(COPY)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Ok(parent) = File::open(&self.pool) {
            let _ = dorm_sys::btrfs::delete_subvolume(parent.as_fd(), OsStr::new(COPY));
        }
    }
}
