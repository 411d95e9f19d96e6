//! Homes of virtual machines: a disk as one file, in place of the files themselves.
//!
//! The disk of a template is made once, when the first machine is started from it, and every home has a copy that shares its
//! blocks. A home that has changed since it was made, by a container, is made into a disk by itself.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dorm_sys::btrfs;
use rustix::fs::{Mode, OFlags};

use super::Pool;
use crate::{EngineError, Id, Result};

/// Names of the files in the home of a machine.
const DISK: &str = "disk";
const MEMORY: &str = "memory";
/// Where in the pool the disks of templates are.
const DISKS: &str = "disks";
/// On the root of a home that holds a disk and not the files themselves. Names in a home prove nothing, since a template or a
/// container may have chosen them; attributes of this kind are beyond the reach of both, and snapshots keep them.
const MARK: &std::ffi::CStr = c"trusted.dorm.machine";
/// How often over a machine's disk and memory may be held, counting what snapshots keep of them. One that meets the limit ends at
/// once, so that it is above what the files can take by themselves.
const TIMES: u64 = 2;
/// What a machine may hold beyond that.
const SPARE: u64 = 1 << 30;
/// What a file system has beside the files, at the least.
const ROOM: u64 = 256 << 20;
const BYTES_PER_INODE: u64 = 16 << 10;
/// How long a disk may take to be made, in seconds: others that start for the first time wait for it.
const MADE_WITHIN: &str = "900";
/// What `timeout` ends with.
const TIMED_OUT: i32 = 124;

impl Pool {
    pub(crate) fn machine_disk(&self, id: &Id) -> PathBuf {
        self.home_path(id).join(DISK)
    }

    pub(crate) fn machine_memory(&self, id: &Id) -> PathBuf {
        self.home_path(id).join(MEMORY)
    }

    /// Makes the home of `id` one of a machine, if it is not, with a disk of at least `size` bytes.
    pub(crate) async fn prepare_machine(&self, id: &Id, size: u64) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| pool.make_machine(&id, size)).await
    }

    /// Gives the home an empty memory of `size` bytes.
    pub(crate) async fn renew_machine_memory(&self, id: &Id, size: u64) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let make = || {
                pool.forget_memory(&id)?;
                let mut options = File::options();
                options.write(true).create_new(true).mode(0o600);
                options.open(pool.machine_memory(&id))?.set_len(size)?;
                pool.limit(&File::open(pool.home_path(&id))?, &id, 0)
            };
            make().map_err(EngineError::io("cannot make the machine's memory"))
        })
        .await
    }

    /// Removes a memory that nobody will go on with.
    pub(crate) fn forget_memory(&self, id: &Id) -> io::Result<()> {
        match fs::remove_file(self.machine_memory(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// The machine's memory, if the home holds one: its size, and what it takes on disk. Synced.
    pub(crate) fn machine_memory_on_disk(&self, id: &Id) -> io::Result<(u64, u64)> {
        let home = File::open(self.home_path(id))?;
        let memory = open_file(&home, MEMORY, OFlags::RDONLY)?;
        memory.sync_all()?;
        let found = memory.metadata()?;
        Ok((found.len(), found.blocks() * 512))
    }

    fn make_machine(&self, id: &Id, size: u64) -> Result<()> {
        let failed = || self.no_space_or("cannot make the machine's disk");
        let home = self.open_home(id)?;
        if is_marked(&home).map_err(failed())? {
            let disk = open_file(&home, DISK, OFlags::RDWR).map_err(failed())?;
            if disk.metadata().map_err(failed())?.len() < size {
                disk.set_len(size).map_err(failed())?;
            }
            return self.limit(&home, id, size).map_err(failed());
        }
        let incoming = format!("incoming-{id}");
        let homes = self.directory("homes")?;
        let _ = btrfs::delete_subvolume(homes.as_fd(), OsStr::new(&incoming));
        btrfs::create_subvolume(homes.as_fd(), OsStr::new(&incoming)).map_err(failed())?;
        let made = self.fill_machine(
            &home,
            id,
            &self.filesystem.root.join("homes").join(&incoming),
            size,
        );
        let exchanged = made.and_then(|()| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(&homes, incoming.as_str(), &homes, id.as_str(), flags)?;
            btrfs::sync(&self.filesystem.directory)
        });
        drop(home);
        // The old home, or what was to become the new one.
        let _ = btrfs::delete_subvolume(homes.as_fd(), OsStr::new(&incoming));
        exchanged.map_err(failed())
    }

    fn fill_machine(&self, home: &File, id: &Id, into: &Path, size: u64) -> io::Result<()> {
        let new = File::open(into)?;
        rustix::fs::fsetxattr(&new, MARK, b"1", rustix::fs::XattrFlags::empty())?;
        self.limit(&new, id, size)?;
        let path = into.join(DISK);
        match self.template_disk(home)? {
            Some(template) => {
                let disk = File::create_new(&path)?;
                rustix::fs::ioctl_ficlone(&disk, &template)?;
            }
            None => make_disk(&self.home_path(id), &path)?,
        }
        let disk = File::options().write(true).open(&path)?;
        rustix::fs::fchmod(&disk, Mode::RUSR | Mode::WUSR)?;
        if disk.metadata()?.len() < size {
            disk.set_len(size)?;
        }
        Ok(())
    }

    /// The disk of the template that `home` is still like.
    fn template_disk(&self, home: &File) -> io::Result<Option<File>> {
        let origin = btrfs::origin(home.as_fd())?;
        if btrfs::changed_since(home.as_fd(), origin.made)? {
            return Ok(None);
        }
        let templates = self.filesystem.root.join("templates");
        for entry in fs::read_dir(&templates)?.flatten() {
            let is_it = File::open(entry.path())
                .and_then(|template| btrfs::origin(template.as_fd()))
                .is_ok_and(|template| template.uuid == origin.parent);
            if !is_it {
                continue;
            }
            let disks = self.filesystem.root.join(DISKS);
            fs::create_dir_all(&disks)?;
            let disk = disks.join(dorm_sys::uuid::text(origin.parent));
            if !disk.exists() {
                let unfinished = disk.with_extension("new");
                let _ = fs::remove_file(&unfinished);
                make_disk(&entry.path(), &unfinished)?;
                fs::rename(&unfinished, &disk)?;
            }
            return File::open(disk).map(Some);
        }
        Ok(None)
    }

    /// Removes the disks of templates that are gone.
    pub(super) fn sweep_disks(&self) {
        let uuid_of = |path: PathBuf| {
            let origin = File::open(path).and_then(|template| btrfs::origin(template.as_fd()));
            origin.ok().map(|origin| dorm_sys::uuid::text(origin.uuid))
        };
        let entries = |name: &str| {
            let listed = fs::read_dir(self.filesystem.root.join(name));
            listed.into_iter().flatten().flatten()
        };
        let wanted: Vec<String> = entries("templates").filter_map(|e| uuid_of(e.path())).collect();
        for entry in entries(DISKS) {
            if !wanted.iter().any(|uuid| entry.file_name() == uuid.as_str()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Whether a home holds a disk, and not the files themselves.
fn is_marked(home: &File) -> io::Result<bool> {
    match rustix::fs::fgetxattr(home, MARK, &mut [0; 8]) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// How large the disk in a home is, if it is a machine's.
pub(super) fn disk_size(home: &File) -> io::Result<Option<u64>> {
    is_marked(home)?.then(|| size_of(home, DISK)).transpose()
}

/// What the home of an agent that may have `disk` bytes may take in the pool.
pub(super) fn limit_of(home: &File, disk: u64) -> io::Result<u64> {
    Ok(match disk_size(home)? {
        Some(size) => TIMES * (size.max(disk) + size_of(home, MEMORY)?) + SPARE,
        None => disk,
    })
}

fn size_of(home: &File, name: &str) -> io::Result<u64> {
    match open_file(home, name, OFlags::RDONLY) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
        opened => Ok(opened?.metadata()?.len()),
    }
}

/// A file of a home. A link that a container left there leads nowhere.
fn open_file(home: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(home, name, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other(format!("{name} is no file"))),
    }
}

/// Makes a disk with an ext4 file system of everything in `from`, where nothing runs. The guest makes it larger.
fn make_disk(from: &Path, disk: &Path) -> io::Result<()> {
    let weight = weigh(from)?;
    let bytes = weight.bytes + weight.bytes / 4 + ROOM;
    let megabytes = bytes.div_ceil(1 << 20);
    // As many as usual, of which a larger disk has more later; and enough for what is there.
    let inodes = (bytes / BYTES_PER_INODE).max(weight.entries + weight.entries / 3 + 16_384);
    let made = std::process::Command::new("timeout")
        .args(["--kill-after=5", MADE_WITHIN, "mke2fs"])
        .args([
            "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-J", "size=16", "-N",
        ])
        .arg(inodes.to_string())
        .arg("-d")
        .arg(from)
        .arg(disk)
        .arg(format!("{megabytes}M"))
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("timeout (package coreutils): {e}")))?;
    if made.status.code() == Some(TIMED_OUT) {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("mke2fs: not done after {MADE_WITHIN} s"),
        ));
    }
    if !made.status.success() {
        let text = String::from_utf8_lossy(&made.stderr);
        return Err(io::Error::other(format!(
            "mke2fs (package e2fsprogs): {}",
            text.trim().lines().last().unwrap_or("failed")
        )));
    }
    File::open(disk)?.sync_all()
}

struct Weight {
    bytes: u64,
    entries: u64,
}

/// What the files below `folder` take as blocks; of one with holes, what it has beside them. No link is followed.
fn weigh(folder: &Path) -> io::Result<Weight> {
    let mut folders = vec![folder.to_owned()];
    let mut weight = Weight { bytes: 0, entries: 0 };
    let mut linked = HashSet::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let found = entry.metadata()?;
            // For its name, and its inode.
            weight.bytes += 512;
            if found.is_dir() {
                weight.bytes += 4096;
                folders.push(entry.path());
            } else if found.nlink() > 1 && !linked.insert((found.dev(), found.ino())) {
                continue;
            }
            weight.bytes += (found.blocks() * 512).next_multiple_of(4096);
            weight.entries += 1;
        }
    }
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_and_other_names_of_a_file_weigh_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let holes = File::create(folder.path().join("holes")).unwrap();
        holes.set_len(1 << 40).unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        let file = folder.path().join("below/file");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        File::open(&file).unwrap().sync_all().unwrap();
        for name in 0..100 {
            fs::hard_link(&file, folder.path().join(name.to_string())).unwrap();
        }
        let weight = weigh(folder.path()).unwrap();
        assert!((1 << 20..3 << 20).contains(&weight.bytes), "{}", weight.bytes);
        assert_eq!(weight.entries, 3);
    }
}
