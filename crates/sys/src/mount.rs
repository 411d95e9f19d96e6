//! The mount calls that work on descriptors, with id mapping.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

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
