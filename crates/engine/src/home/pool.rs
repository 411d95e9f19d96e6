//! The btrfs filesystem that holds all homes: a part of the data directory where that lies on btrfs, and
//! otherwise a file that grows, mounted over a loop device. Either is mounted so that nobody changes a home by reading it: a memory
//! image is valid with the very home that it was made with. A disk that somebody has mounted in its place is taken as it is.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dorm_sys::loopdev::{self, LoopDevice};
use dorm_sys::{btrfs, mount::Detached};
use rustix::fs::XattrFlags;
use rustix::mount::MountFlags;

use super::beside::Announced;
use crate::{EngineError, Result, Space};

#[derive(Debug, Clone)]
pub struct Config {
    pub data: PathBuf,
    /// Size of a new pool file. It is sparse: only what is written takes space.
    pub initial_size: u64,
    /// What the pool file may grow to; 0 for what its filesystem has room for.
    pub max_size: u64,
}

/// Room that the pool's own filesystem keeps when the pool file grows.
const HOST_RESERVE: u64 = 1 << 30;
/// Of a pool file, whatever room there is.
const LEAST_SIZE: u64 = 512 << 20;
/// On a pool file whose disk had room for all of it. From then on nobody is given what it may still take.
const HAS_ROOM: &std::ffi::CStr = c"trusted.dorm.room";

#[derive(Debug)]
pub(super) struct Filesystem {
    pub(super) root: PathBuf,
    pub(super) directory: File,
    pub(super) uuid: String,
    /// The pool file and its device, where the pool is one.
    image: Option<(PathBuf, LoopDevice)>,
    over_itself: bool,
    max_size: u64,
    /// As where a version of dorm made the pool file that did not look at its disk.
    may_outgrow_disk: bool,
    announced: Announced,
}

impl Filesystem {
    pub(super) fn open(config: &Config) -> Result<Self> {
        make_private_dir(&config.data)?;
        let data = File::open(&config.data).map_err(EngineError::io("cannot open the data directory"))?;
        let root = config.data.join("pool");
        make_private_dir(&root)?;
        let on_btrfs =
            btrfs::is_btrfs(data.as_fd()).map_err(EngineError::io("cannot look at the data directory"))?;
        let (image, over_itself) = if on_btrfs {
            let mounted = mount_over_itself(&data, &root);
            (None, mounted.map_err(EngineError::io("cannot mount the pool"))?)
        } else {
            (mount_image(config, &root)?, false)
        };

        let directory = File::open(&root).map_err(EngineError::io("cannot open the pool"))?;
        btrfs::enable_quota(directory.as_fd())
            .map_err(EngineError::io("cannot turn on quotas in the pool"))?;
        let uuid = btrfs::uuid(directory.as_fd()).map_err(EngineError::io("cannot identify the pool"))?;
        for name in ["homes", "templates", "snapshots", "volumes"] {
            make_private_dir(&root.join(name))?;
        }
        let backing = image.as_ref().map(|(image, _)| Backing::of(image)).transpose()?;
        let may_outgrow_disk = backing.as_ref().is_some_and(|file| !file.had_room);
        if let Some(file) = backing.filter(|file| file.promised() > file.host_free) {
            tracing::warn!(
                pool_may_still_take = file.promised(),
                free = file.host_free,
                "the pool file may outgrow its disk"
            );
        }
        Ok(Self {
            root,
            directory,
            uuid,
            image,
            over_itself,
            max_size: config.max_size,
            may_outgrow_disk,
            announced: Announced::default(),
        })
    }

    /// No btrfs, for tests of what is beside one.
    #[cfg(test)]
    pub(super) fn like(root: &Path, image: Option<&Path>) -> Self {
        let with_device = |image: &Path| (image.to_owned(), LoopDevice::open(image).unwrap());
        Self {
            root: root.to_owned(),
            directory: File::open(root).unwrap(),
            uuid: String::new(),
            image: image.map(with_device),
            over_itself: false,
            max_size: 0,
            may_outgrow_disk: false,
            announced: Announced::default(),
        }
    }

    /// The device that the pool's traffic goes to, as cgroups name it.
    pub(super) fn device(&self) -> Result<(u32, u32)> {
        let path = match &self.image {
            Some((_, device)) => device.path.clone(),
            None => device_below(&self.root).map_err(EngineError::io("cannot find the pool's device"))?,
        };
        let stat = rustix::fs::stat(&path)
            .map_err(|e| EngineError::io("cannot look at the pool's device")(e.into()))?;
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        whole_disk(Path::new("/sys/dev/block"), device)
            .map_err(EngineError::io("cannot look at the pool's device"))
    }

    pub(super) fn space(&self) -> Result<Space> {
        let of = |file: &File| {
            rustix::fs::fstatvfs(file).map_err(|e| EngineError::io("cannot measure the pool")(e.into()))
        };
        let stat = of(&self.directory)?;
        let mut space = Space {
            total: stat.f_blocks * stat.f_frsize,
            free: stat.f_bavail * stat.f_frsize,
        };
        if let Some((image, _)) = &self.image {
            let room = self.room_to_grow(image, *self.announced.bytes())?;
            space.total += room;
            space.free += room;
        }
        Ok(space)
    }

    /// Bytes by which the pool file may grow while so many are announced beside it.
    fn room_to_grow(&self, image: &Path, announced: u64) -> Result<u64> {
        let limit = if self.max_size == 0 {
            u64::MAX
        } else {
            self.max_size
        };
        Ok(Backing::of(image)?.room_to_grow(announced, limit))
    }

    pub(super) fn announced(&self) -> &Announced {
        &self.announced
    }

    /// Bytes that may be written beside the pool file, `None` where there is no such file.
    pub(super) fn room_beside(&self) -> Result<Option<u64>> {
        let Some((image, _)) = &self.image else {
            return Ok(None);
        };
        let file = Backing::of(image)?;
        // Otherwise agents whose pool was made too large could never go to disk.
        let most = match self.may_outgrow_disk {
            true => file.host_free / 2,
            false => u64::MAX,
        };
        Ok(Some(file.host_free.saturating_sub(file.promised().min(most))))
    }

    /// Grows the pool file by half when less than a fifth of it is free. `true` if it grew.
    pub(super) fn grow_if_needed(&self) -> Result<bool> {
        let Some((image, device)) = &self.image else {
            return Ok(false);
        };
        let failed = || EngineError::io("cannot grow the pool");
        let stat = rustix::fs::fstatvfs(&self.directory).map_err(|e| failed()(e.into()))?;
        if stat.f_bavail * 5 > stat.f_blocks {
            return Ok(false);
        }
        let size = fs::metadata(image).map_err(failed())?.len();
        // Until the file is longer, and what it grew by is promised.
        let announced = self.announced.bytes();
        let step = (size / 2).min(self.room_to_grow(image, *announced)?) & !((1 << 20) - 1);
        if step < 64 << 20 {
            return Ok(false);
        }
        fs::OpenOptions::new()
            .write(true)
            .open(image)
            .and_then(|f| f.set_len(size + step))
            .map_err(failed())?;
        drop(announced);
        device.update_size().map_err(failed())?;
        btrfs::grow_to_device(self.directory.as_fd()).map_err(failed())?;
        tracing::info!(from = size, to = size + step, "the pool grew");
        Ok(true)
    }

    /// Unmounts the pool if nobody uses it. What only keeps it from being changed by readers stays for those who sleep.
    pub(super) fn close(self, anybody_sleeps: bool) {
        let Self {
            root,
            directory,
            image,
            over_itself,
            ..
        } = self;
        drop(directory);
        if image.is_none() && (anybody_sleeps || !over_itself) {
            return;
        }
        match rustix::mount::unmount(&root, rustix::mount::UnmountFlags::empty()) {
            Ok(()) => tracing::debug!("the pool is unmounted"),
            Err(error) => tracing::debug!(%error, "the pool stays mounted"),
        }
    }
}

/// A pool file, and the filesystem that it lies on.
struct Backing {
    size: u64,
    used: u64,
    host_free: u64,
    had_room: bool,
}

impl Backing {
    fn of(image: &Path) -> Result<Self> {
        let failed = || EngineError::io("cannot measure the pool file");
        let file = fs::metadata(image).map_err(failed())?;
        Ok(Self {
            size: file.len(),
            used: file.blocks() * 512,
            host_free: free_at(image).map_err(failed())?,
            had_room: rustix::fs::getxattr(image, HAS_ROOM, &mut [0; 1]).is_ok(),
        })
    }

    /// What the pool takes for its own, and nobody has given it yet.
    fn promised(&self) -> u64 {
        self.size.saturating_sub(self.used)
    }

    fn room_to_grow(&self, announced: u64, limit: u64) -> u64 {
        let free = self
            .host_free
            .saturating_sub(HOST_RESERVE.saturating_add(announced));
        (self.used + free).min(limit).saturating_sub(self.size)
    }
}

fn free_at(path: &Path) -> io::Result<u64> {
    let host = rustix::fs::statvfs(path)?;
    Ok(host.f_bavail * host.f_frsize)
}

fn make_private_dir(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(path)
        .map_err(EngineError::io(format!("cannot make {}", path.display())))
}

/// Unless an earlier daemon has left it so. False if somebody else has mounted something there, whose it is to choose how.
fn mount_over_itself(data: &File, root: &Path) -> io::Result<bool> {
    if mounted_device(root).is_ok() {
        return Ok(rustix::fs::stat(root)?.st_dev == rustix::fs::fstat(data)?.st_dev);
    }
    let mount = Detached::bind(root)?;
    mount.keep_no_access_times()?;
    mount.attach(root).map(|()| true)
}

/// `None` if somebody else has mounted a disk there.
fn mount_image(config: &Config, root: &Path) -> Result<Option<(PathBuf, LoopDevice)>> {
    let image = config.data.join("pool.img");
    if let Ok(device) = mounted_device(root) {
        let failed = || EngineError::io("cannot open the pool's loop device");
        if !loopdev::is_loop(&device).map_err(failed())? {
            return Ok(None);
        }
        let device = LoopDevice::open(&device).map_err(failed())?;
        return Ok(Some((image, device)));
    }
    if !image.exists() {
        let free = free_at(&config.data).map_err(EngineError::io("cannot measure the disk"))?;
        let size = first_size(config.initial_size, free);
        make_image(&image, size, size <= free)?;
    }
    let device = LoopDevice::attach(&image)
        .map_err(EngineError::io("cannot attach the pool file to a loop device"))?;
    rustix::mount::mount(
        &device.path,
        root,
        c"btrfs",
        MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV,
        c"discard=async",
    )
    .map_err(|e| EngineError::io("cannot mount the pool")(e.into()))?;
    Ok(Some((image, device)))
}

/// Of a new pool file. Half of what is free stays for what is beside it, memory images foremost; the pool grows when it has to.
fn first_size(wanted: u64, free: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    wanted.min((free / 2).max(LEAST_SIZE)) / MIB * MIB
}

/// Makes the pool file under another name first: what is called `pool.img` holds a filesystem.
fn make_image(image: &Path, size: u64, has_room: bool) -> Result<()> {
    let failed = || EngineError::io("cannot make the pool file");
    let unfinished = image.with_extension("img.new");
    let file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(failed())?;
    file.set_len(size).map_err(failed())?;
    let made = std::process::Command::new("mkfs.btrfs")
        .args(["--quiet", "--metadata", "single", "--label", "dorm"])
        .arg(&unfinished)
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(EngineError::io("cannot run mkfs.btrfs (package btrfs-progs)"))?;
    if !made.status.success() {
        let text = String::from_utf8_lossy(&made.stderr).trim().to_owned();
        return Err(EngineError::io("mkfs.btrfs failed")(io::Error::other(text)));
    }
    if has_room {
        // Not every filesystem has such attributes.
        let _ = rustix::fs::fsetxattr(&file, HAS_ROOM, b"1", XattrFlags::empty());
    }
    file.sync_all()
        .and_then(|()| fs::rename(&unfinished, image))
        .map_err(failed())
}

/// The source of the btrfs mount at `root`, if there is one.
fn mounted_device(root: &Path) -> io::Result<PathBuf> {
    let root = fs::canonicalize(root)?;
    let mut found = btrfs_mounts()?.into_iter().filter(|(at, _)| *at == root);
    found
        .next()
        .map(|(_, source)| source)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The source of the btrfs mount that `directory` lies in.
fn device_below(directory: &Path) -> io::Result<PathBuf> {
    let directory = fs::canonicalize(directory)?;
    let around = btrfs_mounts()?
        .into_iter()
        .filter(|(at, _)| directory.starts_with(at));
    around
        .max_by_key(|(at, _)| at.components().count())
        .map(|(_, source)| source)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Where a btrfs is mounted, and from what.
fn btrfs_mounts() -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let mounts = dorm_sys::mount::mounted()?.into_iter();
    let btrfs = mounts.filter(|mount| mount.kind == "btrfs");
    Ok(btrfs.map(|mount| (mount.at, mount.source)).collect())
}

/// The disk that `device` is a partition of, or itself: the kernel limits whole disks alone.
fn whole_disk(devices: &Path, device: (u32, u32)) -> io::Result<(u32, u32)> {
    let at = devices.join(format!("{}:{}", device.0, device.1));
    if !at.join("partition").exists() {
        return Ok(device);
    }
    let disk = fs::read_to_string(fs::canonicalize(at)?.join("../dev"))?;
    let numbers = disk.trim().split_once(':');
    let numbers = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    numbers.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_pool_leaves_half_of_a_small_disk() {
        let size = |wanted_gib: u64, free_gib: u64| first_size(wanted_gib << 30, free_gib << 30);
        assert_eq!(size(8, 100), 8 << 30);
        assert_eq!(size(8, 6), 3 << 30);
        assert_eq!(size(8, 0), LEAST_SIZE);
        assert_eq!(
            first_size((256 << 20) + 1, 1 << 40),
            256 << 20,
            "whatever was asked for"
        );
    }

    #[test]
    fn a_pool_grows_into_nothing_that_is_kept_or_announced() {
        const GIB: u64 = 1 << 30;
        let file = Backing {
            size: 8 * GIB,
            used: 7 * GIB,
            host_free: 6 * GIB,
            had_room: true,
        };
        assert_eq!(file.room_to_grow(0, u64::MAX), 4 * GIB);
        assert_eq!(file.room_to_grow(3 * GIB, u64::MAX), GIB);
        assert_eq!(file.room_to_grow(9 * GIB, u64::MAX), 0);
        assert_eq!(file.room_to_grow(0, 10 * GIB), 2 * GIB);
    }

    #[test]
    fn the_disk_of_a_partition_is_the_one_that_holds_it() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/disk");
        fs::create_dir_all(disk.join("disk1")).unwrap();
        fs::write(disk.join("dev"), "8:0\n").unwrap();
        fs::write(disk.join("disk1/dev"), "8:1\n").unwrap();
        fs::write(disk.join("disk1/partition"), "1\n").unwrap();
        std::os::unix::fs::symlink("devices/disk", sys.path().join("8:0")).unwrap();
        std::os::unix::fs::symlink("devices/disk/disk1", sys.path().join("8:1")).unwrap();
        assert_eq!(whole_disk(sys.path(), (8, 1)).unwrap(), (8, 0));
        assert_eq!(whole_disk(sys.path(), (8, 0)).unwrap(), (8, 0));
    }
}
