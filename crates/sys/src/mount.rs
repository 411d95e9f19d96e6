//! The mount calls that work on descriptors, with id mapping.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

/// Attributes of one mount, as mount_setattr(2) knows them.
pub const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
pub const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

const UNCHANGED: libc::mount_attr = libc::mount_attr {
    attr_set: 0,
    attr_clr: 0,
    propagation: 0,
    userns_fd: 0,
};

/// Every way of keeping times of access, of which a mount has one.
const TIMES: u64 = libc::MOUNT_ATTR__ATIME;
const NO_TIMES: u64 = libc::MOUNT_ATTR_NOATIME;

/// A mount that is attached nowhere yet.
#[derive(Debug)]
pub struct Detached(OwnedFd);

impl Detached {
    /// A new mount of what `path` names, without the mounts below it. It is private: what is mounted there or here later is
    /// not passed on, though systemd has all mounts of a host pass it on, and a new mount would be like the one it is made of.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mount = Self(rustix::mount::open_tree(CWD, path, flags)?);
        let private = libc::mount_attr {
            propagation: libc::MS_PRIVATE,
            ..UNCHANGED
        };
        mount.set_attributes(&private)?;
        Ok(mount)
    }

    /// Adds and removes attributes.
    pub fn set(&self, set: u64, clear: u64) -> io::Result<()> {
        self.set_attributes(&libc::mount_attr {
            attr_set: set,
            attr_clr: clear,
            ..UNCHANGED
        })
    }

    /// Lets reading change nothing on the disk.
    pub fn keep_no_access_times(&self) -> io::Result<()> {
        self.set(NO_TIMES, TIMES)
    }

    /// Makes ids on disk appear in this mount as the ids that `userns` maps them to.
    pub fn map_ids(&self, userns: BorrowedFd<'_>) -> io::Result<()> {
        self.set_attributes(&libc::mount_attr {
            attr_set: libc::MOUNT_ATTR_IDMAP,
            userns_fd: userns.as_raw_fd() as u64,
            ..UNCHANGED
        })
    }

    /// Attaches the mount at `target`.
    pub fn attach(self, target: impl AsRef<Path>) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        Ok(rustix::mount::move_mount(
            self.0.as_fd(),
            c"",
            CWD,
            target.as_ref(),
            flags,
        )?)
    }

    /// Takes a mount that another process made and handed over.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn set_attributes(&self, attr: &libc::mount_attr) -> io::Result<()> {
        // SAFETY: the path is a valid C string and `attr` a valid mount_attr of the size given; both outlive the call, and
        // the kernel only reads them.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                std::ptr::from_ref(attr),
                size_of::<libc::mount_attr>(),
            )
        };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl AsFd for Detached {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mount that the calling process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    pub at: PathBuf,
    /// The type of its filesystem.
    pub kind: String,
    pub source: PathBuf,
}

/// Every mount that the calling process sees, those below others after them.
pub fn mounted() -> io::Result<Vec<Mounted>> {
    let lines = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(lines.lines().map(read_mount).collect())
}

fn read_mount(line: &str) -> Mounted {
    let mut fields = line.split(' ');
    let at = fields.by_ref().nth(4).unwrap_or_default();
    let mut rest = fields.skip_while(|field| *field != "-").skip(1);
    let (kind, source) = (rest.next().unwrap_or_default(), rest.next().unwrap_or_default());
    Mounted {
        at: unescape(at).into(),
        kind: kind.to_owned(),
        source: unescape(source).into(),
    }
}

/// Blanks and the like are written as three octal digits.
fn unescape(field: &str) -> String {
    ["040", "011", "012", "134"]
        .iter()
        .fold(field.to_owned(), |text, code| {
            let byte = u8::from_str_radix(code, 8).unwrap_or(b'?') as char;
            text.replace(&format!("\\{code}"), &byte.to_string())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_read_with_optional_fields_and_blanks() {
        let line = r"29 1 0:26 / /with\040blank rw shared:1 master:2 - btrfs /dev/loop\0117 rw,x";
        let read = read_mount(line);
        assert_eq!(read.at, Path::new("/with blank"));
        assert_eq!(
            (read.kind.as_str(), read.source.as_path()),
            ("btrfs", Path::new("/dev/loop\t7"))
        );
    }
}
