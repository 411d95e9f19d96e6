//! Homes of virtual machines: a disk as one file, in place of the files themselves.
//!
//! The disk of a template is made once, when the first machine is started from it, and every home has a copy that shares its
//! blocks. A home that has changed since it was made, by a container, is made into a disk by itself. The way back leads through
//! an archive of what is on the disk, which the machine itself makes: no file system that a box wrote is ever mounted on the host.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dorm_sys::btrfs;
use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use super::Pool;
use super::snapshot::staged;
use super::unpack::Names;
use crate::{EngineError, Homes, Id, Layer, Result, launch};

/// Names of the files in the home of a machine.
const DISK: &str = "disk";
const MEMORY: &str = "memory";
const BAD_MEMORY: &str = "memory.bad";
/// Where in the pool the disks of templates are.
const DISKS: &str = "disks";
/// On the root of a home that holds a disk and not the files themselves. Names in a home prove nothing, since a template or a
/// container may have chosen them; attributes of this kind are beyond the reach of both, and snapshots keep them.
const MARK: &std::ffi::CStr = c"trusted.dorm.machine";
/// On the same: how large the disk was made. Its length is for QEMU to choose, and so for whoever has broken out into that. Homes that
/// earlier versions made have none until they are started.
const GRANTED: &std::ffi::CStr = c"trusted.dorm.disk";
/// On the memory of a machine whose disk lacks something that was written in it.
const UNWRITTEN: &std::ffi::CStr = c"trusted.dorm.unwritten";
/// How often over a machine's disk and memory may be held, counting what snapshots keep of them. One that meets the limit ends at
/// once, so that it is above what the files can take by themselves.
const TIMES: u64 = 2;
/// What a machine may hold beyond that.
const SPARE: u64 = 1 << 30;
const MAKING: &str = "cannot make the machine's disk";

/// What a home holds.
enum Found {
    Machine,
    /// Files, those of a template perhaps.
    Files(Option<Template>),
}

struct Template {
    files: PathBuf,
    /// The name of its disk.
    disk: String,
}

/// A lock for each disk of a template that is being made.
#[derive(Debug, Clone, Default)]
pub(super) struct Making(Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>);

impl Making {
    fn of(&self, disk: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody holds.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(disk.to_owned()).or_default())
    }
}

impl Pool {
    pub(crate) fn machine_disk(&self, id: &Id) -> PathBuf {
        self.home_path(id).join(DISK)
    }

    pub(crate) fn machine_memory(&self, id: &Id) -> PathBuf {
        self.home_path(id).join(MEMORY)
    }

    /// Makes the home of `id` one of a machine, if it is not, with a disk of at least `size` bytes. A crash leaves either home.
    pub(crate) async fn prepare_machine(&self, id: &Id, uid_base: u32, size: u64) -> Result<()> {
        let made = async {
            let one = id.clone();
            let Found::Files(template) = self.blocking(move |pool| pool.look(&one, size)).await? else {
                return Ok(());
            };
            let template = match template {
                Some(template) => Some(self.template_disk(template, uid_base).await?),
                None => None,
            };
            let whole = template.is_some();
            let one = id.clone();
            self.blocking(move |pool| pool.stage_machine(&one, template.as_ref(), size))
                .await?;
            if !whole {
                let disk = self.staged_path(id).join(DISK);
                let made = launch::make_disk(&self.launcher, &self.home_path(id), uid_base, &disk).await;
                made.map_err(self.no_space_or(MAKING))?;
            }
            let one = id.clone();
            self.blocking(move |pool| pool.finish_machine(&one, size)).await
        };
        let made = made.await;
        if made.is_err() {
            self.unstage(id).await;
            // It may have been raised for a machine.
            let limited = self.set_limit(id, size).await;
            limited.unwrap_or_else(
                |error| tracing::warn!(%id, error = %crate::chain(&error), "the home may hold more than it should"),
            );
        }
        made
    }

    /// Whether the home of `id` holds a disk, and not the files themselves.
    pub(crate) fn is_machine(&self, id: &Id) -> Result<bool> {
        is_marked(&self.open_home(id)?).map_err(EngineError::io("cannot tell what the home holds"))
    }

    /// Whether the files of the home of `id` have room a second time, in the other form.
    pub(crate) async fn has_room_to_convert(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let failed = || EngineError::io("cannot tell how much is in the home");
            let home = pool.open_home(&id)?;
            let mut free = pool.filesystem.space()?.free;
            let needed = if is_marked(&home).map_err(failed())? {
                // Its memory goes before.
                free += taken_by(&home, MEMORY).map_err(failed())?;
                taken_by(&home, DISK).map_err(failed())?
            } else {
                let disks = pool.filesystem.root.join(DISKS);
                match pool.template_of(&home).map_err(failed())? {
                    Some(template) if disks.join(&template.disk).exists() => 0,
                    _ => btrfs::written_since(home.as_fd(), 0).map_err(failed())?,
                }
            };
            match needed > free {
                true => Err(EngineError::TooLittleSpace { needed, free }),
                false => Ok(()),
            }
        })
        .await
    }

    /// Fills a new home with the files in `archive`, for [`Pool::exchange_files`]: what the machine's disk has. Gives what had to
    /// be left out, in words.
    pub(crate) async fn stage_files(
        &self,
        id: &Id,
        uid_base: u32,
        archive: Layer,
        within: Duration,
    ) -> Result<Vec<String>> {
        let one = id.clone();
        self.blocking(move |pool| pool.stage_empty(&one)).await?;
        let staged = self.staged_path(id);
        let (launcher, names) = (&self.launcher, Names::OfFiles);
        let unpacked = launch::unpack_within(launcher, &staged, uid_base, archive, names, Some(within));
        Ok(unpacked.await?.warnings)
    }

    /// Puts the files that were staged in the place of the disk, in one step. The home may then hold `disk` bytes, or as many as
    /// the machine's disk could.
    pub(crate) async fn exchange_files(&self, id: &Id, disk: u64) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let failed = || pool.no_space_or("cannot put the files in the place of the machine's disk");
            let size = disk_size(&pool.open_home(&id)?).map_err(failed())?.unwrap_or(0);
            // All that is in them before their name is.
            btrfs::sync(&pool.filesystem.directory).map_err(failed())?;
            pool.exchange_home(&id)?;
            pool.limit(&pool.open_home(&id)?, &id, size.max(disk))
                .map_err(failed())
        })
        .await
    }

    fn stage_empty(&self, id: &Id) -> Result<()> {
        let failed = || self.no_space_or("cannot make a home for the machine's files");
        self.unstage_home(id);
        let size = disk_size(&self.open_home(id)?).map_err(failed())?.unwrap_or(0);
        let homes = self.directory("homes")?;
        btrfs::create_subvolume(homes.as_fd(), OsStr::new(&staged(id))).map_err(failed())?;
        let new = File::open(self.staged_path(id)).map_err(failed())?;
        rustix::fs::fchmod(&new, Mode::from_raw_mode(0o755)).map_err(|e| failed()(e.into()))?;
        self.limit_beside(&new, id, size).map_err(failed())
    }

    /// Gives the home an empty memory of `size` bytes.
    pub(crate) async fn renew_machine_memory(&self, id: &Id, size: u64) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let make = || {
                pool.forget_memory(&id)?;
                private_file(&pool.machine_memory(&id))?.set_len(size)?;
                pool.limit(&File::open(pool.home_path(&id))?, &id, 0)
            };
            make().map_err(EngineError::io("cannot make the machine's memory"))
        })
        .await
    }

    /// As [`Pool::forget_memory`], of any home: what a container has by that name is a file of its own.
    pub(crate) async fn forget_memory_of_machine(&self, id: &Id) -> Result<()> {
        let id = id.clone();
        self.blocking(move |pool| {
            let home = pool.open_home(&id)?;
            let forget = || match is_marked(&home)? {
                true if is_copy(&home)? => remove_memories(&home),
                true => remove(&home, MEMORY),
                false => Ok(()),
            };
            forget().map_err(EngineError::io("cannot remove the machine's memory"))
        })
        .await
    }

    /// As [`Pool::forget_memory_of_machine`], of a home whose files are to be enough without.
    pub(crate) async fn leave_memory_out(&self, id: &Id) -> Result<()> {
        let one = id.clone();
        self.blocking(move |pool| {
            let home = pool.open_home(&one)?;
            let lacks = is_marked(&home).and_then(|is_machine| Ok(is_machine && lacks_writes(&home)?));
            match lacks.map_err(EngineError::io("cannot tell what the machine's disk lacks"))? {
                true => Err(EngineError::Unwritten),
                false => Ok(()),
            }
        })
        .await?;
        self.forget_memory_of_machine(id).await
    }

    /// Removes a memory that nobody will go on with.
    pub(crate) fn forget_memory(&self, id: &Id) -> io::Result<()> {
        remove(&File::open(self.home_path(id))?, MEMORY)
    }

    /// Keeps a memory that could not be used, the last of them only, for people to look at.
    pub(crate) fn set_memory_aside(&self, id: &Id) -> io::Result<()> {
        let home = File::open(self.home_path(id))?;
        if !is_marked(&home)? {
            return Ok(());
        }
        match rustix::fs::renameat(&home, MEMORY, &home, BAD_MEMORY) {
            Err(e) if e != Errno::NOENT => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Returns when the machine's memory is on disk.
    pub(crate) fn sync_machine_memory(&self, id: &Id) -> io::Result<()> {
        let home = File::open(self.home_path(id))?;
        open_file(&home, MEMORY, OFlags::RDONLY)?.sync_all()
    }

    /// Notes whether the memory has something that was written and that the disk lacks. It holds for every copy of the two.
    pub(crate) fn note_unwritten(&self, id: &Id, unwritten: bool) -> io::Result<()> {
        let home = File::open(self.home_path(id))?;
        let memory = open_file(&home, MEMORY, OFlags::RDONLY)?;
        let noted = match unwritten {
            true => rustix::fs::fsetxattr(&memory, UNWRITTEN, b"", XattrFlags::empty()),
            false => rustix::fs::fremovexattr(&memory, UNWRITTEN),
        };
        match noted {
            Err(error) if error != Errno::NODATA => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// What the home is. If it is a machine's, its disk has at least `size` bytes from now on.
    fn look(&self, id: &Id, size: u64) -> Result<Found> {
        let failed = || self.no_space_or(MAKING);
        let home = self.open_home(id)?;
        if is_marked(&home).map_err(failed())? {
            // Of one that goes on with its memory, nothing may change.
            if size > 0 {
                let disk = open_file(&home, DISK, OFlags::RDWR).map_err(failed())?;
                grow(&home, &disk, size).map_err(failed())?;
            }
            self.limit(&home, id, size).map_err(failed())?;
            return Ok(Found::Machine);
        }
        self.template_of(&home).map(Found::Files).map_err(failed())
    }

    /// A home for a machine beside the present one: with the disk of a template, or with an empty file in its place.
    fn stage_machine(&self, id: &Id, template: Option<&File>, size: u64) -> Result<()> {
        let failed = || self.no_space_or(MAKING);
        self.unstage_home(id);
        let homes = self.directory("homes")?;
        btrfs::create_subvolume(homes.as_fd(), OsStr::new(&staged(id))).map_err(failed())?;
        let fill = || {
            let new = File::open(self.staged_path(id))?;
            rustix::fs::fsetxattr(&new, MARK, b"1", rustix::fs::XattrFlags::empty())?;
            self.limit(&new, id, size)?;
            let disk = private_file(&self.staged_path(id).join(DISK))?;
            match template {
                Some(template) => Ok(rustix::fs::ioctl_ficlone(&disk, template)?),
                None => Ok(()),
            }
        };
        fill().map_err(failed())
    }

    fn finish_machine(&self, id: &Id, size: u64) -> Result<()> {
        let path = self.staged_path(id);
        let grown = File::open(&path).and_then(|home| {
            let disk = File::options().write(true).open(path.join(DISK))?;
            grow(&home, &disk, size)?;
            disk.sync_all()
        });
        grown.map_err(self.no_space_or(MAKING))?;
        self.exchange_home(id).map(drop)
    }

    fn staged_path(&self, id: &Id) -> PathBuf {
        self.filesystem.root.join("homes").join(staged(id))
    }

    /// The template that `home` is still like.
    fn template_of(&self, home: &File) -> io::Result<Option<Template>> {
        let origin = btrfs::origin(home.as_fd())?;
        if btrfs::changed_since(home.as_fd(), origin.made)? {
            return Ok(None);
        }
        for entry in fs::read_dir(self.filesystem.root.join("templates"))?.flatten() {
            let is_it = File::open(entry.path())
                .and_then(|template| btrfs::origin(template.as_fd()))
                .is_ok_and(|template| template.uuid == origin.parent);
            if is_it {
                return Ok(Some(Template {
                    files: entry.path(),
                    disk: dorm_sys::uuid::text(origin.parent),
                }));
            }
        }
        Ok(None)
    }

    /// The disk of a template, made if there is none yet. Whoever wants the same one meanwhile waits.
    async fn template_disk(&self, template: Template, uid_base: u32) -> Result<File> {
        let making = self.making.of(&template.disk);
        let _alone = making.lock().await;
        let disks = self.filesystem.root.join(DISKS);
        let disk = disks.join(&template.disk);
        let made = async {
            if !disk.exists() {
                fs::create_dir_all(&disks)?;
                let unfinished = disk.with_extension("new");
                let _ = fs::remove_file(&unfinished);
                private_file(&unfinished)?;
                let made = launch::make_disk(&self.launcher, &template.files, uid_base, &unfinished).await;
                let named = made.and_then(|()| fs::rename(&unfinished, &disk));
                // It may be what has filled the pool.
                named.inspect_err(|_| drop(fs::remove_file(&unfinished)))?;
            }
            File::open(&disk)
        };
        made.await.map_err(self.no_space_or(MAKING))
    }

    /// Where the disk of a template is, or would be.
    pub(super) fn disk_of_template(&self, id: &Id) -> io::Result<PathBuf> {
        let disk = disk_name(&self.template_path(id))?;
        Ok(self.filesystem.root.join(DISKS).join(disk))
    }

    /// Removes the disks of templates that are gone.
    pub(super) fn sweep_disks(&self) {
        let entries = |name: &str| {
            let listed = fs::read_dir(self.filesystem.root.join(name));
            listed.into_iter().flatten().flatten()
        };
        let wanted: Vec<String> = entries("templates")
            .filter_map(|template| disk_name(&template.path()).ok())
            .collect();
        for entry in entries(DISKS) {
            if !wanted.iter().any(|uuid| entry.file_name() == uuid.as_str()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// What the disk of the template at `path` is called.
fn disk_name(path: &Path) -> io::Result<String> {
    let origin = btrfs::origin(File::open(path)?.as_fd())?;
    Ok(dorm_sys::uuid::text(origin.uuid))
}

/// Whether a home holds a disk, and not the files themselves.
fn is_marked(home: &File) -> io::Result<bool> {
    has_mark(home, MARK)
}

/// Whether the disk in a machine's home lacks something that its memory has.
pub(super) fn lacks_writes(home: &File) -> io::Result<bool> {
    match open_file(home, MEMORY, OFlags::RDONLY) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        memory => has_mark(&memory?, UNWRITTEN),
    }
}

fn has_mark(file: &File, mark: &std::ffi::CStr) -> io::Result<bool> {
    match rustix::fs::fgetxattr(file, mark, &mut [0; 8]) {
        Ok(_) => Ok(true),
        Err(Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether a machine's home was made from a snapshot. What is set aside in it may be of another agent's memory.
fn is_copy(home: &File) -> io::Result<bool> {
    Ok(btrfs::origin(home.as_fd())?.parent != [0; 16])
}

/// Makes the disk of a machine's home at least `size` bytes large.
fn grow(home: &File, disk: &File, size: u64) -> io::Result<()> {
    let length = disk.metadata()?.len();
    let before = granted(home)?;
    let granted = before.unwrap_or(length).max(size);
    if before != Some(granted) {
        let text = granted.to_string();
        rustix::fs::fsetxattr(home, GRANTED, text.as_bytes(), XattrFlags::empty())?;
    }
    match length < size {
        true => disk.set_len(size),
        false => Ok(()),
    }
}

fn granted(home: &File) -> io::Result<Option<u64>> {
    let mut text = [0; 20];
    match rustix::fs::fgetxattr(home, GRANTED, &mut text) {
        Ok(length) => {
            let size = std::str::from_utf8(&text[..length])
                .ok()
                .and_then(|text| text.parse().ok());
            size.map(Some)
                .ok_or_else(|| io::Error::other("the home does not say how large its disk is"))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// How large the disk in a home is, if it is a machine's.
pub(super) fn disk_size(home: &File) -> io::Result<Option<u64>> {
    if !is_marked(home)? {
        return Ok(None);
    }
    let length = size_of(home, DISK)?;
    Ok(Some(granted(home)?.map_or(length, |granted| granted.min(length))))
}

/// What the home of an agent that may have `disk` bytes may take in the pool.
pub(super) fn limit_of(home: &File, disk: u64) -> io::Result<u64> {
    Ok(match disk_size(home)? {
        Some(size) => {
            let held = size.max(disk).saturating_add(size_of(home, MEMORY)?);
            TIMES.saturating_mul(held).saturating_add(SPARE)
        }
        None => disk,
    })
}

fn size_of(home: &File, name: &str) -> io::Result<u64> {
    Ok(file_in(home, name)?.map_or(0, |found| found.len()))
}

/// What a file of a home takes on disk.
fn taken_by(home: &File, name: &str) -> io::Result<u64> {
    Ok(file_in(home, name)?.map_or(0, |found| found.blocks() * 512))
}

fn file_in(home: &File, name: &str) -> io::Result<Option<fs::Metadata>> {
    match open_file(home, name, OFlags::RDONLY) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened?.metadata().map(Some),
    }
}

/// A new file that only the host's root may read.
fn private_file(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
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

/// All that there is of memory in a copy of a machine's home.
pub(super) fn remove_memories(copy: &File) -> io::Result<()> {
    remove(copy, MEMORY)?;
    remove(copy, BAD_MEMORY)
}

fn remove(home: &File, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(home, name, AtFlags::empty()) {
        Err(e) if e != Errno::NOENT => Err(e.into()),
        _ => Ok(()),
    }
}
