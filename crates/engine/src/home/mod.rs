//! Homes and templates as subvolumes of one btrfs pool.
//!
//! Files in them carry the ids that the box sees. The host never follows a path inside a home:
//! it names homes by their id in a directory of its own, and what happens inside is done by processes
//! that are confined to it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dorm_sys::btrfs;

use crate::{Debian, EngineError, HomeUsage, Homes, Id, Kept, LogSink, Result, Space};

mod archive;
mod beside;
mod bootstrap;
mod machine;
pub mod oci;
mod pool;
mod quota;
mod snapshot;
pub mod tree;
pub mod unpack;

pub(crate) use beside::Room;
pub use pool::Config;
use pool::Filesystem;

/// How often the pool's free space is looked at. There is no notification for it.
const GROWTH_CHECK: Duration = Duration::from_secs(2);

/// The homes of this machine.
#[derive(Debug, Clone)]
pub struct Pool {
    filesystem: Arc<Filesystem>,
    launcher: PathBuf,
    /// Held while the disk of a template is made.
    making: machine::Making,
}

impl Pool {
    /// Opens the pool in the data directory, making and mounting it if need be. Must be called
    /// within a tokio runtime, which then keeps an eye on the pool's growth.
    pub fn open(config: &Config, launcher: &Path) -> Result<Self> {
        let filesystem = Arc::new(Filesystem::open(config)?);
        let watched = Arc::downgrade(&filesystem);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(GROWTH_CHECK);
            loop {
                tick.tick().await;
                let Some(filesystem) = watched.upgrade() else {
                    return;
                };
                if let Ok(Err(error)) = tokio::task::spawn_blocking(move || filesystem.grow_if_needed()).await
                {
                    tracing::warn!(error = %crate::chain(&error), "the pool could not grow");
                }
            }
        });
        let pool = Self {
            filesystem,
            launcher: launcher.to_owned(),
            making: machine::Making::default(),
        };
        pool.sweep_incoming();
        pool.sweep_groups();
        pool.sweep_disks();
        Ok(pool)
    }

    /// Unmounts the pool if nothing uses it any more, and nobody sleeps whose home is to stay as it is.
    pub fn close(self, anybody_sleeps: bool) {
        // The growth check may hold it for a moment.
        let mut filesystem = self.filesystem;
        for _ in 0..100 {
            match Arc::try_unwrap(filesystem) {
                Ok(filesystem) => return filesystem.close(anybody_sleeps),
                Err(shared) => filesystem = shared,
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn home_path(&self, id: &Id) -> PathBuf {
        self.filesystem.root.join("homes").join(id.as_str())
    }

    pub fn template_path(&self, id: &Id) -> PathBuf {
        self.filesystem.root.join("templates").join(id.as_str())
    }

    pub fn volume_path(&self, id: &Id) -> PathBuf {
        self.filesystem.root.join("volumes").join(id.as_str())
    }

    /// The pool's block device, as cgroups name it.
    pub fn device(&self) -> Result<(u32, u32)> {
        self.filesystem.device()
    }

    /// Runs `work` on the pool on a thread where it may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Pool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let pool = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&pool)).await;
        done.map_err(|e| EngineError::io("the pool's worker ended")(io::Error::other(e)))?
    }

    fn directory(&self, name: &str) -> Result<File> {
        File::open(self.filesystem.root.join(name))
            .map_err(EngineError::io(format!("cannot open the pool's {name}")))
    }

    fn ids_in(&self, name: &str) -> Result<Vec<Id>> {
        let failed = || EngineError::io(format!("cannot list the pool's {name}"));
        let mut ids = Vec::new();
        for entry in fs::read_dir(self.filesystem.root.join(name)).map_err(failed())? {
            let name = entry.map_err(failed())?.file_name();
            ids.extend(name.to_str().and_then(|n| n.parse::<Id>().ok()));
        }
        Ok(ids)
    }

    fn delete_in(&self, directory: &str, id: &Id) -> Result<()> {
        match btrfs::delete_subvolume(self.directory(directory)?.as_fd(), OsStr::new(id.as_str())) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(EngineError::io(format!("cannot delete the subvolume {id}"))(e))
            }
            _ => Ok(()),
        }
    }

    fn no_space_or(&self, doing: impl Into<String>) -> impl FnOnce(io::Error) -> EngineError {
        let doing = doing.into();
        let free = self.filesystem.space().map(|s| s.free).unwrap_or_default();
        move |error| match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => EngineError::NoSpace { free },
            _ => EngineError::io(doing)(error),
        }
    }
}

#[async_trait]
impl Homes for Pool {
    async fn create(&self, id: &Id, template: &Id, disk: u64) -> Result<()> {
        let (id, template) = (id.clone(), template.clone());
        self.blocking(move |pool| {
            let source = match File::open(pool.template_path(&template)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(EngineError::NoHome(template)),
                opened => opened.map_err(EngineError::io("cannot open the template"))?,
            };
            let homes = pool.directory("homes")?;
            btrfs::snapshot(source.as_fd(), homes.as_fd(), OsStr::new(id.as_str()), false)
                .map_err(pool.no_space_or("cannot make the home"))?;
            let limited = File::open(pool.home_path(&id)).and_then(|home| pool.limit(&home, &id, disk));
            limited.map_err(|e| {
                let _ = pool.delete_in("homes", &id);
                pool.no_space_or("cannot limit the home")(e)
            })
        })
        .await
    }

    async fn delete(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| pool.delete_in("homes", &id)).await
    }

    async fn usage(&self, id: &Id) -> Result<HomeUsage> {
        let id = id.clone();
        self.blocking(move |pool| pool.measure(&id)).await
    }

    async fn set_limit(&self, id: &Id, disk: u64) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let limited = File::open(pool.home_path(&id)).and_then(|home| pool.limit(&home, &id, disk));
            limited.map_err(EngineError::io("cannot limit the home"))
        })
        .await
    }

    async fn list(&self) -> Result<Vec<Id>> {
        self.blocking(|pool| pool.ids_in("homes")).await
    }

    async fn templates(&self) -> Result<Vec<Id>> {
        self.blocking(|pool| pool.ids_in("templates")).await
    }

    async fn create_empty(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            btrfs::create_subvolume(pool.directory("homes")?.as_fd(), OsStr::new(id.as_str()))
                .map_err(pool.no_space_or("cannot make an empty home"))?;
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(pool.home_path(&id), fs::Permissions::from_mode(0o755))
                .map_err(EngineError::io("cannot open up the empty home"))
        })
        .await
    }

    async fn bootstrap(&self, id: &Id, debian: &Debian, log: LogSink) -> Result<()> {
        bootstrap::mmdebstrap(&self.home_path(id), debian, log).await
    }

    async fn unpack(&self, id: &Id, uid_base: u32, layer: crate::Layer, log: LogSink) -> Result<()> {
        let home = self.home_path(id);
        let unpacked =
            crate::launch::unpack(&self.launcher, &home, uid_base, layer, unpack::Names::OfLayer).await?;
        for warning in unpacked.warnings {
            let _ = log.send(format!("warning: {warning}"));
        }
        let _ = log.send(format!("{} entries", unpacked.entries));
        Ok(())
    }

    async fn seal(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let failed = || pool.no_space_or("cannot seal the template");
            let (home, template) = (pool.home_path(&id), pool.template_path(&id));
            fs::rename(&home, &template).map_err(failed())?;
            File::open(&template)
                .and_then(|t| btrfs::set_read_only(t.as_fd(), true))
                .map_err(failed())?;
            btrfs::sync(&pool.filesystem.directory).map_err(failed())
        })
        .await
    }

    async fn delete_template(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let disk = pool.disk_of_template(&id);
            pool.delete_in("templates", &id)?;
            // Without it, it goes when the next daemon starts.
            let _ = disk.and_then(fs::remove_file);
            Ok(())
        })
        .await
    }

    async fn export_template(&self, id: &Id, to: &Path) -> Result<()> {
        archive::export(&self.template_path(id), to).await
    }

    async fn import_template(&self, id: &Id, from: &Path) -> Result<()> {
        let incoming = self.filesystem.root.join(format!("incoming-{id}"));
        let target = self.template_path(id);
        let received = archive::receive(from, &incoming, &target).await;
        let filesystem = Arc::clone(&self.filesystem);
        let _ = tokio::task::spawn_blocking(move || archive::discard(&filesystem, &incoming)).await;
        received
    }

    async fn space(&self) -> Result<Space> {
        self.blocking(|pool| pool.filesystem.space()).await
    }

    async fn snapshot(&self, id: &Id, snapshot: &Id, kept: Kept<'_>) -> Result<()> {
        let (id, snapshot) = (id.clone(), snapshot.clone());
        let (memory, image) = match kept {
            Kept::Memory => (true, None),
            Kept::Files(image) => (false, image.map(Path::to_owned)),
        };
        self.blocking(move |pool| pool.take_snapshot(&id, &snapshot, memory, image.as_deref()))
            .await
    }

    async fn create_from_snapshot(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<u64> {
        let (id, snapshot) = (id.clone(), snapshot.clone());
        let copied = self.blocking(move |pool| {
            pool.copy_snapshot(&snapshot, &id, id.as_str(), disk)?;
            pool.generation_on_disk(&id)
        });
        copied.await
    }

    async fn stage(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<()> {
        let (id, snapshot) = (id.clone(), snapshot.clone());
        self.blocking(move |pool| pool.stage_home(&id, &snapshot, disk))
            .await
    }

    async fn unstage(&self, id: &Id) {
        let id = id.clone();
        let unstaged = self.blocking(move |pool| {
            pool.unstage_home(&id);
            Ok(())
        });
        let _ = unstaged.await;
    }

    async fn exchange(&self, id: &Id) -> Result<u64> {
        let id = id.clone();
        self.blocking(move |pool| pool.exchange_home(&id)).await
    }

    async fn delete_snapshot(&self, snapshot: &Id) -> Result<()> {
        let snapshot = snapshot.clone();
        self.blocking(move |pool| pool.delete_in("snapshots", &snapshot))
            .await
    }

    async fn written_since(&self, snapshot: &Id, before: &Id) -> Result<u64> {
        let (snapshot, before) = (snapshot.clone(), before.clone());
        self.blocking(move |pool| pool.written_between(&before, &snapshot))
            .await
    }

    async fn snapshots(&self) -> Result<Vec<Id>> {
        self.blocking(|pool| pool.ids_in("snapshots")).await
    }

    async fn create_volume(&self, volume: &Id, disk: u64) -> Result<()> {
        let volume = volume.clone();
        self.blocking(move |pool| {
            use std::os::unix::fs::PermissionsExt;
            btrfs::create_subvolume(pool.directory("volumes")?.as_fd(), OsStr::new(volume.as_str()))
                .map_err(pool.no_space_or("cannot make the volume"))?;
            let path = pool.volume_path(&volume);
            let ready = File::open(&path)
                .and_then(|files| pool.limit(&files, &volume, disk))
                // Whoever mounts it, as any user, may write.
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o777)))
                .and_then(|()| btrfs::sync(&pool.filesystem.directory));
            ready.map_err(|error| {
                let _ = pool.delete_in("volumes", &volume);
                pool.no_space_or("cannot prepare the volume")(error)
            })
        })
        .await
    }

    async fn delete_volume(&self, volume: &Id) -> Result<()> {
        let volume = volume.clone();
        self.blocking(move |pool| pool.delete_in("volumes", &volume))
            .await
    }

    async fn volumes(&self) -> Result<Vec<Id>> {
        self.blocking(|pool| pool.ids_in("volumes")).await
    }

    async fn volume_files(&self, volume: &Id) -> Result<tree::Tree> {
        let volume = volume.clone();
        self.blocking(move |pool| match tree::Tree::open(&pool.volume_path(&volume)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(EngineError::NoVolume(volume)),
            opened => opened.map_err(EngineError::io("cannot open the volume")),
        })
        .await
    }

    async fn generation(&self, id: &Id) -> Result<u64> {
        let id = id.clone();
        self.blocking(move |pool| pool.home_generation(&id)).await
    }

    async fn is_unchanged(&self, id: &Id, since: u64) -> Result<bool> {
        let id = id.clone();
        self.blocking(move |pool| pool.home_is_unchanged(&id, since))
            .await
    }
}
