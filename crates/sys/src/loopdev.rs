//! Loop devices by ioctl.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
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
    /// a filesystem in use cannot be mounted from a second device.
    pub fn attach(backing: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(backing)?;
        if let Some(device) = Self::of(&file)? {
            return Ok(device);
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

    fn of(file: &File) -> io::Result<Option<Self>> {
        let wanted = file.metadata()?;
        for entry in fs::read_dir("/sys/block")? {
            let entry = entry?;
            if !entry.path().join("loop/backing_file").exists() {
                continue;
            }
            let path = Path::new("/dev").join(entry.file_name());
            // It keeps its file from here on, if it has one still.
            let device = match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENXIO) => {
                    continue;
                }
                opened => opened?,
            };
            if status(&device).is_ok_and(|info| (info.device, info.inode) == (wanted.dev(), wanted.ino())) {
                return Self::open(&path).map(Some);
            }
        }
        Ok(None)
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
