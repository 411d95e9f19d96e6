//! Loop devices by ioctl.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_MAJOR: u32 = 7;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// A loop device that lets go of its file when its last user (the mount) is gone.
#[derive(Debug)]
pub struct LoopDevice {
    device: File,
    pub path: PathBuf,
}

impl LoopDevice {
    /// The device that the file has, where somebody still uses one, as boxes do in mount namespaces of their own, or else a new one:
    /// a filesystem in use cannot be mounted from a second device. With several, the one that a btrfs is mounted from.
    pub fn attach(backing: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(backing)?;
        let held = devices_of(
            &file,
            &fs::canonicalize(backing)?,
            Path::new("/sys/block"),
            Path::new("/dev"),
        )?;
        if let Some(path) = choose(&held, Path::new("/sys/fs/btrfs"))? {
            return Self::open(path);
        }
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/loop-control")?;
        // Somebody else may take the free device between the two calls; then the next one is tried.
        for _ in 0..64 {
            // SAFETY: takes no argument and returns a number.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = OpenOptions::new().read(true).write(true).open(&path)?;
            match configure(
                device.as_raw_fd(),
                file.as_raw_fd(),
                LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
            ) {
                Ok(()) => return Ok(Self { device, path }),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                // A filesystem without direct I/O (a tmpfs, an overlay) serves as well, with a second cache.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    configure(device.as_raw_fd(), file.as_raw_fd(), LO_FLAGS_AUTOCLEAR)?;
                    return Ok(Self { device, path });
                }
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("no free loop device"))
    }

    /// Opens a device that is attached already.
    pub fn open(path: &Path) -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self {
            device,
            path: path.to_owned(),
        })
    }

    /// Takes on the present size of the backing file.
    pub fn update_size(&self) -> io::Result<()> {
        // SAFETY: the argument of LOOP_SET_CAPACITY is ignored.
        match unsafe { libc::ioctl(self.device.as_raw_fd(), LOOP_SET_CAPACITY, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Whether what is at `path` is a loop device, of whatever file.
pub fn is_loop(path: &Path) -> io::Result<bool> {
    let found = fs::metadata(path)?;
    Ok(found.file_type().is_block_device() && libc::major(found.rdev()) == LOOP_MAJOR)
}

/// A device is kept open until it was chosen or not: it keeps its file for as long.
type Held = (File, PathBuf);

/// The devices, as `sys` lists them, that have all of the file, to read and write.
fn devices_of(file: &File, backing: &Path, sys: &Path, dev: &Path) -> io::Result<Vec<Held>> {
    let wanted = file.metadata()?;
    let mut found = Vec::new();
    for entry in fs::read_dir(sys)? {
        let entry = entry?;
        let of = match fs::read(entry.path().join("loop/backing_file")) {
            Ok(text) => path_in(text),
            // No loop device, or it has no file, any more.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENODEV) => {
                continue;
            }
            Err(e) => return Err(unknown(&entry.path(), &e)),
        };
        let path = dev.join(entry.file_name());
        match File::open(&path).and_then(|device| Ok((status(&device)?, device))) {
            Ok((info, device)) if info.is_all_of(wanted.dev(), wanted.ino()) => found.push((device, path)),
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => {}
            // That it could not be looked at does not matter then.
            Err(_) if of != backing => {}
            Err(e) => return Err(unknown(&path, &e)),
        }
    }
    found.sort_by(|(_, a), (_, b)| a.cmp(b));
    Ok(found)
}

fn path_in(mut line: Vec<u8>) -> PathBuf {
    line.truncate(line.trim_ascii_end().len());
    OsString::from_vec(line).into()
}

fn unknown(device: &Path, error: &io::Error) -> io::Error {
    let text = format!("cannot tell what file {} has: {error}", device.display());
    io::Error::new(error.kind(), text)
}

/// Of several, the one that a filesystem in `btrfs` is mounted from.
fn choose<'a>(held: &'a [Held], btrfs: &Path) -> io::Result<Option<&'a Path>> {
    let paths = || held.iter().map(|(_, path)| path.as_path());
    if held.len() < 2 {
        return Ok(paths().next());
    }
    let mounted: Vec<PathBuf> = match fs::read_dir(btrfs) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.path().join("devices")))
            .collect::<io::Result<_>>()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(e),
    };
    let is_used = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        mounted.iter().any(|devices| devices.join(name).exists())
    };
    let mut used = paths().filter(|path| is_used(path));
    if let (Some(path), None) = (used.next(), used.next()) {
        return Ok(Some(path));
    }
    let names: Vec<_> = paths().map(|path| path.display().to_string()).collect();
    Err(io::Error::other(format!(
        "several devices have it, and which of them is used cannot be told: {}; detach the others (losetup --detach)",
        names.join(", ")
    )))
}

impl LoopInfo64 {
    fn is_all_of(&self, device: u64, inode: u64) -> bool {
        (self.device, self.inode) == (device, inode)
            && (self.offset, self.sizelimit) == (0, 0)
            && self.flags & LO_FLAGS_READ_ONLY == 0
    }
}

fn status(device: &File) -> io::Result<LoopInfo64> {
    // SAFETY: all-zero is a valid value of this plain C structure.
    let mut info: LoopInfo64 = unsafe { std::mem::zeroed() };
    // SAFETY: LOOP_GET_STATUS64 fills in one loop_info64, whose layout LoopInfo64 has, and keeps no pointer to it.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) } {
        0 => Ok(info),
        _ => Err(io::Error::last_os_error()),
    }
}

fn configure(device: RawFd, file: RawFd, flags: u32) -> io::Result<()> {
    // SAFETY: all-zero is a valid value of these plain C structures.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = file as u32;
    config.block_size = 4096;
    config.info.flags = flags;
    // SAFETY: LOOP_CONFIGURE reads one loop_config, whose layout LoopConfig has, and keeps no pointer to it.
    match unsafe { libc::ioctl(device, LOOP_CONFIGURE, &raw const config) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory as `/sys/block` or `/sys/fs/btrfs` is, gone at the end.
    struct Sys(PathBuf);

    impl Sys {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("dorm-loopdev-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn add(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn info(offset: u64, sizelimit: u64, flags: u32) -> LoopInfo64 {
        // SAFETY: all-zero is a valid value of this plain C structure.
        let zero: LoopInfo64 = unsafe { std::mem::zeroed() };
        LoopInfo64 {
            device: 1,
            inode: 2,
            offset,
            sizelimit,
            flags,
            ..zero
        }
    }

    #[test]
    fn a_device_is_reused_only_if_it_has_all_of_the_very_file_to_write() {
        assert!(info(0, 0, LO_FLAGS_AUTOCLEAR).is_all_of(1, 2));
        assert!(!info(0, 0, 0).is_all_of(1, 3) && !info(0, 0, 0).is_all_of(2, 2));
        assert!(!info(512, 0, 0).is_all_of(1, 2));
        assert!(!info(0, 4096, 0).is_all_of(1, 2));
        assert!(!info(0, 0, LO_FLAGS_READ_ONLY).is_all_of(1, 2));
    }

    #[test]
    fn a_device_that_cannot_be_looked_at_matters_only_if_it_may_have_the_file() {
        let sys = Sys::new("look");
        sys.add("pool.img", "");
        let backing = fs::canonicalize(sys.0.join("pool.img")).unwrap();
        let file = File::open(&backing).unwrap();
        // A disk, and a device without a node whose file is another.
        sys.add("block/sda/size", "1");
        sys.add("block/loop7/loop/backing_file", "/srv/of somebody else\n");
        let look = || devices_of(&file, &backing, &sys.0.join("block"), &sys.0.join("dev"));
        assert!(look().unwrap().is_empty());
        let text = format!("{}\n", backing.display());
        sys.add("block/loop8/loop/backing_file", &text);
        assert!(look().unwrap_err().to_string().contains("dev/loop8"));
        // And what is at its place is no loop device.
        sys.add("dev/loop8", "");
        assert!(look().unwrap_err().to_string().contains("dev/loop8"));
    }

    #[test]
    fn what_is_no_block_device_of_that_kind_is_no_loop_device() {
        let sys = Sys::new("kind");
        sys.add("loop0", "");
        assert!(!is_loop(&sys.0.join("loop0")).unwrap());
        assert!(!is_loop(Path::new("/dev/null")).unwrap());
        is_loop(&sys.0.join("loop1")).unwrap_err();
    }

    #[test]
    fn of_several_devices_the_mounted_one_is_taken_and_otherwise_none() {
        let sys = Sys::new("choose");
        let held = |names: &[&str]| -> Vec<Held> {
            let open = |name: &&str| (File::open("/dev/null").unwrap(), Path::new("/dev").join(name));
            names.iter().map(open).collect()
        };
        let btrfs = sys.0.join("btrfs");
        assert_eq!(choose(&held(&[]), &btrfs).unwrap(), None);
        let one = held(&["loop1"]);
        assert_eq!(choose(&one, &btrfs).unwrap(), Some(Path::new("/dev/loop1")));
        let two = held(&["loop1", "loop2"]);
        let refused = choose(&two, &btrfs).unwrap_err().to_string();
        assert!(refused.contains("/dev/loop1, /dev/loop2"), "{refused}");
        sys.add("btrfs/features/raid56", "1");
        sys.add("btrfs/b1e5/devices/loop2", "");
        assert_eq!(choose(&two, &btrfs).unwrap(), Some(Path::new("/dev/loop2")));
        sys.add("btrfs/c0de/devices/loop1", "");
        choose(&two, &btrfs).unwrap_err();
    }
}
