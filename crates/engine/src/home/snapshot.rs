//! Homes at an instant.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dorm_sys::btrfs;

use super::{Pool, machine};
use crate::{EngineError, Id, Result};

const UNKNOWN: &str = "cannot tell whether the home changed";

impl Pool {
    /// Without memory, also without the names that `image` has in the home.
    pub(super) fn take_snapshot(
        &self,
        id: &Id,
        snapshot: &Id,
        memory: bool,
        image: Option<&Path>,
    ) -> Result<()> {
        let failed = || self.no_space_or("cannot take the snapshot");
        let home = self.open_home(id)?;
        let into = self.directory("snapshots")?;
        let name = OsStr::new(snapshot.as_str());
        let machine = !memory && self.is_machine(id)?;
        if machine && machine::lacks_writes(&home).map_err(failed())? {
            return Err(EngineError::Unwritten);
        }
        let image = image.filter(|image| !memory && !machine && crate::criu::has_names(image));
        let whole = !machine && image.is_none();
        btrfs::snapshot(home.as_fd(), into.as_fd(), name, whole).map_err(failed())?;
        if whole {
            return Ok(());
        }
        let without_memory = || {
            let path = self.filesystem.root.join("snapshots").join(name);
            let kept = File::open(&path)?;
            match image {
                Some(image) => crate::criu::release(&path, image),
                None => machine::remove_memories(&kept)?,
            }
            btrfs::set_read_only(kept.as_fd(), true)
        };
        without_memory().map_err(|e| {
            let _ = btrfs::delete_subvolume(into.as_fd(), name);
            failed()(e)
        })
    }

    /// Makes a writable copy of a snapshot as `name` among the homes, for the agent `id`.
    pub(super) fn copy_snapshot(&self, snapshot: &Id, id: &Id, name: &str, disk: u64) -> Result<()> {
        let source = match File::open(self.filesystem.root.join("snapshots").join(snapshot.as_str())) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(EngineError::NoHome(snapshot.clone()));
            }
            opened => opened.map_err(EngineError::io("cannot open the snapshot"))?,
        };
        let into = self.directory("homes")?;
        btrfs::snapshot(source.as_fd(), into.as_fd(), OsStr::new(name), false)
            .map_err(self.no_space_or("cannot copy the snapshot"))?;
        let copy = self.filesystem.root.join("homes").join(name);
        let limited = File::open(copy).and_then(|home| self.limit(&home, id, disk));
        limited.map_err(|e| {
            let _ = btrfs::delete_subvolume(into.as_fd(), OsStr::new(name));
            self.no_space_or("cannot limit the home")(e)
        })
    }

    pub(super) fn written_between(&self, before: &Id, snapshot: &Id) -> Result<u64> {
        let failed = || EngineError::io("cannot measure the snapshot");
        let open = |path: PathBuf| match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(failed()),
        };
        let snapshots = self.filesystem.root.join("snapshots");
        let since = match open(snapshots.join(before.as_str()))? {
            Some(earlier) => btrfs::origin(earlier.as_fd()).map_err(failed())?.made,
            None => match open(self.template_path(before))? {
                Some(template) => btrfs::changed(template.as_fd()).map_err(failed())?,
                // Everything is newer than what is gone.
                None => 0,
            },
        };
        let later = open(snapshots.join(snapshot.as_str()))?;
        let later = later.ok_or_else(|| EngineError::NoHome(snapshot.clone()))?;
        btrfs::written_since(later.as_fd(), since).map_err(failed())
    }

    pub(super) fn stage_home(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<()> {
        self.unstage_home(id);
        self.copy_snapshot(snapshot, id, &staged(id), disk)
    }

    /// Whatever cannot be removed is removed by [`Pool::sweep_incoming`].
    pub(super) fn unstage_home(&self, id: &Id) {
        let Ok(homes) = self.directory("homes") else {
            return;
        };
        match btrfs::delete_subvolume(homes.as_fd(), OsStr::new(&staged(id))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%id, %error, "the home that was exchanged is left");
            }
            _ => {}
        }
    }

    pub(super) fn exchange_home(&self, id: &Id) -> Result<u64> {
        let failed = || EngineError::io("cannot put another home in its place");
        let homes = self.directory("homes")?;
        rustix::fs::renameat_with(
            &homes,
            staged(id),
            &homes,
            id.as_str(),
            rustix::fs::RenameFlags::EXCHANGE,
        )
        .map_err(|e| failed()(e.into()))?;
        btrfs::sync(&self.filesystem.directory).map_err(failed())?;
        self.unstage_home(id);
        self.generation_on_disk(id)
    }

    pub(super) fn home_generation(&self, id: &Id) -> Result<u64> {
        // Only what is committed counts. It is the whole pool's that is waited for: a home alone cannot be committed.
        btrfs::sync(&self.open_home(id)?).map_err(EngineError::io(UNKNOWN))?;
        self.generation_on_disk(id)
    }

    pub(super) fn generation_on_disk(&self, id: &Id) -> Result<u64> {
        btrfs::generation(self.open_home(id)?.as_fd()).map_err(EngineError::io(UNKNOWN))
    }

    pub(super) fn home_is_unchanged(&self, id: &Id, since: u64) -> Result<bool> {
        if self.generation_on_disk(id)? == since {
            return Ok(true);
        }
        let changed = btrfs::changed_since(self.open_home(id)?.as_fd(), since);
        changed.map(|changed| !changed).map_err(EngineError::io(UNKNOWN))
    }

    pub(crate) fn open_home(&self, id: &Id) -> Result<File> {
        match File::open(self.home_path(id)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(EngineError::NoHome(id.clone())),
            opened => opened.map_err(EngineError::io("cannot open the home")),
        }
    }

    /// Removes what an exchange that did not end has left.
    pub(super) fn sweep_incoming(&self) {
        let Ok(homes) = self.directory("homes") else {
            return;
        };
        for entry in fs::read_dir(self.filesystem.root.join("homes"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry.file_name().as_encoded_bytes().starts_with(b"incoming-") {
                let _ = btrfs::delete_subvolume(homes.as_fd(), &entry.file_name());
            }
        }
    }
}

pub(super) fn staged(id: &Id) -> String {
    format!("incoming-{id}")
}
