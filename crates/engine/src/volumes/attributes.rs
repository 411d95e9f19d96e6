//! What is known of a file beside its content, and changes of it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dorm_proto::volume::{Attributes, Change, File, NewTime, Node, Place, Space};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags};
use rustix::io::Errno;

use super::Server;
use super::owner::{group, user};
use super::walk::{attributes, kind};

/// The attributes that programs may choose. Others are for kernels, and a machine's kernel is none that the host believes.
const OF_USERS: &str = "user.";
const LONGEST_VALUE: usize = 64 << 10;

impl Server {
    pub(super) fn look_up(&self, place: &Place) -> Result<Attributes, Errno> {
        let folder = self.folder(place)?;
        let seen = rustix::fs::statat(&folder, &place.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(attributes(&seen))
    }

    pub(super) fn attributes(&self, file: &File) -> Result<Attributes, Errno> {
        let found = self.either(file)?;
        Ok(attributes(&rustix::fs::fstat(&*found)?))
    }

    pub(super) fn change(&self, file: &File, change: &Change) -> Result<Attributes, Errno> {
        let found = self.either(file)?;
        if change.user.is_some() || change.group.is_some() {
            let (user, group) = (
                change.user.map(user).transpose()?,
                change.group.map(group).transpose()?,
            );
            rustix::fs::chownat(&*found, "", user, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = change.mode {
            self.set_mode(file, &found, Mode::from_raw_mode(mode & 0o7777))?;
        }
        if let Some(size) = change.size {
            let writable = |flags: u32| OFlags::from_bits_retain(flags) & OFlags::ACCMODE != OFlags::RDONLY;
            match self.open_already(file).filter(|_| writable(file.flags)) {
                Some(held) => rustix::fs::ftruncate(&*held, size)?,
                None => rustix::fs::ftruncate(self.open_node(&file.node, OFlags::WRONLY)?, size)?,
            }
        }
        if change.accessed.is_some() || change.modified.is_some() {
            let times = Timestamps {
                last_access: time(change.accessed),
                last_modification: time(change.modified),
            };
            rustix::fs::utimensat(&*found, "", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(attributes(&rustix::fs::fstat(&*found)?))
    }

    fn set_mode(&self, file: &File, found: &OwnedFd, mode: Mode) -> Result<(), Errno> {
        if let Some(held) = self.open_already(file) {
            return rustix::fs::fchmod(&*held, mode);
        }
        match kind(&rustix::fs::fstat(found)?) {
            FileType::RegularFile | FileType::Directory => {
                rustix::fs::fchmod(self.open_node(&file.node, OFlags::RDONLY)?, mode)
            }
            FileType::Symlink => Err(Errno::OPNOTSUPP),
            // To open these would be to use them.
            _ => dorm_sys::mode::set(found.as_fd(), mode.as_raw_mode()),
        }
    }

    pub(super) fn read_link(&self, node: &Node) -> Result<Vec<u8>, Errno> {
        let link = self.find(node)?;
        let target = rustix::fs::readlinkat(&link, "", Vec::new()).map_err(|error| match error {
            Errno::NOENT => Errno::INVAL,
            other => other,
        })?;
        Ok(target.into_bytes())
    }

    pub(super) fn space(&self, volume: u8) -> Result<Space, Errno> {
        let space = rustix::fs::fstatvfs(self.root(volume)?)?;
        Ok(Space {
            block_size: space.f_bsize,
            blocks: space.f_blocks,
            free: space.f_bfree,
            available: space.f_bavail,
            files: space.f_files,
            files_free: space.f_ffree,
            longest_name: space.f_namemax,
        })
    }

    pub(super) fn get_attribute(&self, file: &File, name: &str) -> Result<Vec<u8>, Errno> {
        let name = of_users(name)?;
        let mut value = vec![0; LONGEST_VALUE];
        let length = rustix::fs::fgetxattr(&*self.opened(file)?, name, &mut value[..])?;
        value.truncate(length);
        Ok(value)
    }

    pub(super) fn set_attribute(
        &self,
        file: &File,
        name: &str,
        value: &[u8],
        flags: u32,
    ) -> Result<(), Errno> {
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        rustix::fs::fsetxattr(&*self.opened(file)?, of_users(name)?, value, flags)
    }

    /// Their names, with a zero byte behind each.
    pub(super) fn list_attributes(&self, file: &File) -> Result<Vec<u8>, Errno> {
        let opened = match self.opened(file) {
            // What is no file or folder has none of them.
            Err(Errno::LOOP | Errno::OPNOTSUPP) => return Ok(Vec::new()),
            opened => opened?,
        };
        let mut names = vec![0; LONGEST_VALUE];
        let length = rustix::fs::flistxattr(&*opened, &mut names[..])?;
        names.truncate(length);
        let of_users = names
            .split_inclusive(|byte| *byte == 0)
            .filter(|name| name.starts_with(OF_USERS.as_bytes()));
        Ok(of_users.flatten().copied().collect())
    }

    pub(super) fn remove_attribute(&self, file: &File, name: &str) -> Result<(), Errno> {
        rustix::fs::fremovexattr(&*self.opened(file)?, of_users(name)?)
    }

    /// As it is open already, or else named without being opened.
    fn either(&self, file: &File) -> Result<Arc<OwnedFd>, Errno> {
        match self.open_already(file) {
            Some(held) => Ok(held),
            None => self.find(&file.node).map(Arc::new),
        }
    }

    /// As it is open already, or else opened for this once.
    fn opened(&self, file: &File) -> Result<Arc<OwnedFd>, Errno> {
        match self.open_already(file) {
            Some(held) => Ok(held),
            None => self.open_node(&file.node, OFlags::RDONLY).map(Arc::new),
        }
    }
}

fn time(new: Option<NewTime>) -> Timespec {
    let (tv_sec, tv_nsec) = match new {
        None => (0, UTIME_OMIT),
        Some(NewTime::Now) => (0, UTIME_NOW),
        Some(NewTime::At(time)) => (time.seconds, time.nanoseconds.min(999_999_999).into()),
    };
    Timespec { tv_sec, tv_nsec }
}

fn of_users(name: &str) -> Result<&str, Errno> {
    match name.starts_with(OF_USERS) {
        true => Ok(name),
        false => Err(Errno::OPNOTSUPP),
    }
}
