//! Names in folders: made, moved, removed.
//!
//! A request may be said `again`, after a server ended without having answered. Then it may be done already, and what would be an
//! error otherwise is a success, as far as it can be told.

use std::os::fd::OwnedFd;

use dorm_proto::volume::{Attributes, Node, Owner, Place, REMOVED};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::Server;
use super::owner::as_owner;
use super::walk::{attributes, beneath, check_name, kind, stale};

impl Server {
    pub(super) fn create(
        &self,
        place: &Place,
        mode: u32,
        flags: u32,
        owner: Owner,
        handle: u64,
        again: bool,
    ) -> Result<Attributes, Errno> {
        let folder = self.folder(place)?;
        let asked = OFlags::from_bits_retain(flags);
        let access = asked & OFlags::ACCMODE;
        let usual = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let made = as_owner(owner, || {
            let flags = access | OFlags::CREATE | OFlags::EXCL | usual;
            beneath(&folder, &place.name, flags, Mode::from_raw_mode(mode & 0o7777))
        });
        let made = match made {
            Err(Errno::EXIST) => {
                let seen = seen(&folder, &place.name)?;
                let own =
                    kind(&seen) == FileType::RegularFile && seen.st_size == 0 && seen.st_uid == owner.user;
                match again && own {
                    true => beneath(&folder, &place.name, access | usual, Mode::empty())?,
                    false if asked.contains(OFlags::EXCL) => return Err(Errno::EXIST),
                    // Somebody else made it meanwhile: whether it may be opened is for the machine's kernel to look at.
                    false => return Err(Errno::STALE),
                }
            }
            made => made?,
        };
        let seen = rustix::fs::fstat(&made)?;
        self.held().insert(handle, made);
        Ok(attributes(&seen))
    }

    pub(super) fn make(
        &self,
        place: &Place,
        mode: u32,
        device: u32,
        owner: Owner,
        again: bool,
    ) -> Result<Attributes, Errno> {
        let folder = self.folder(place)?;
        let (what, mode) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode & 0o7777));
        let made = as_owner(owner, || match what {
            FileType::Directory => rustix::fs::mkdirat(&folder, &place.name[..], mode),
            what => rustix::fs::mknodat(&folder, &place.name[..], what, mode, device.into()),
        });
        let found = seen(&folder, &place.name);
        match (made, found) {
            (Ok(()), found) => Ok(attributes(&found?)),
            (Err(Errno::EXIST), Ok(found)) if again && kind(&found) == what && found.st_uid == owner.user => {
                Ok(attributes(&found))
            }
            (Err(error), _) => Err(error),
        }
    }

    pub(super) fn symlink(
        &self,
        place: &Place,
        target: &[u8],
        owner: Owner,
        again: bool,
    ) -> Result<Attributes, Errno> {
        let folder = self.folder(place)?;
        let made = as_owner(owner, || rustix::fs::symlinkat(target, &folder, &place.name[..]));
        match made {
            Err(Errno::EXIST) if again => {
                let found = rustix::fs::readlinkat(&folder, &place.name[..], Vec::new());
                if found.ok().is_none_or(|found| found.as_bytes() != target) {
                    return Err(Errno::EXIST);
                }
            }
            made => made?,
        }
        Ok(attributes(&seen(&folder, &place.name)?))
    }

    pub(super) fn link(&self, node: &Node, place: &Place, again: bool) -> Result<Attributes, Errno> {
        let (from, name) = self.parent(node)?;
        let folder = self.folder(place)?;
        if seen(&from, name).map_err(stale)?.st_ino != node.inode {
            return Err(Errno::STALE);
        }
        let made = rustix::fs::linkat(&from, name, &folder, &place.name[..], AtFlags::empty());
        let found = seen(&folder, &place.name);
        match (made, found) {
            (Ok(()), Ok(found)) if found.st_ino == node.inode => Ok(attributes(&found)),
            (Ok(()), Ok(_)) => {
                // Somebody put another file in its place, just before.
                rustix::fs::unlinkat(&folder, &place.name[..], AtFlags::empty())?;
                Err(Errno::STALE)
            }
            (Err(Errno::EXIST), Ok(found)) if again && found.st_ino == node.inode => Ok(attributes(&found)),
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        }
    }

    pub(super) fn remove(&self, place: &Place, hide: Option<&str>, again: bool) -> Result<(), Errno> {
        let folder = self.folder(place)?;
        if let Some(name) = hide {
            match seen(&folder, &place.name) {
                Ok(found) if kind(&found) == FileType::Directory => return Err(Errno::ISDIR),
                Ok(_) if self.hide(place.folder.volume, &folder, &place.name, name).is_ok() => return Ok(()),
                // Whoever has it open has it for as long as this server lives.
                _ => {}
            }
        }
        match rustix::fs::unlinkat(&folder, &place.name[..], AtFlags::empty()) {
            Err(Errno::NOENT) if again => Ok(()),
            removed => removed,
        }
    }

    pub(super) fn remove_folder(&self, place: &Place, again: bool) -> Result<(), Errno> {
        let folder = self.folder(place)?;
        match rustix::fs::unlinkat(&folder, &place.name[..], AtFlags::REMOVEDIR) {
            Err(Errno::NOENT) if again => Ok(()),
            removed => removed,
        }
    }

    pub(super) fn rename(
        &self,
        from: &Place,
        to: &Place,
        inode: u64,
        flags: u32,
        hide: Option<&str>,
        again: bool,
    ) -> Result<(), Errno> {
        let (source, target) = (self.folder(from)?, self.folder(to)?);
        let flags = RenameFlags::from_bits(flags)
            .filter(|flags| (RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(*flags))
            .ok_or(Errno::INVAL)?;
        let there = |folder: &OwnedFd, name: &[u8]| seen(folder, name).map(|found| found.st_ino);
        let now = there(&source, &from.name);
        if again && now != Ok(inode) && there(&target, &to.name) == Ok(inode) {
            // Done, but perhaps for what was in its way.
            return match (now, hide) {
                (Ok(_), Some(hide)) => self.put_away(from, &source, hide),
                _ => Ok(()),
            };
        }
        match now {
            Ok(now) if now != inode => return Err(Errno::STALE),
            now => now?,
        };
        match hide {
            Some(hide) if flags.is_empty() && there(&target, &to.name).is_ok() => {
                // In one step, as a rename is: what is in the way has the old name for a moment.
                rustix::fs::renameat_with(
                    &source,
                    &from.name[..],
                    &target,
                    &to.name[..],
                    RenameFlags::EXCHANGE,
                )?;
                self.put_away(from, &source, hide)
            }
            _ => rustix::fs::renameat_with(&source, &from.name[..], &target, &to.name[..], flags),
        }
    }

    fn put_away(&self, place: &Place, folder: &OwnedFd, hide: &str) -> Result<(), Errno> {
        match self.hide(place.folder.volume, folder, &place.name, hide) {
            Ok(()) => Ok(()),
            Err(_) => rustix::fs::unlinkat(folder, &place.name[..], AtFlags::empty()),
        }
    }

    /// Moves a file to where those are that were removed while somebody had them open.
    fn hide(&self, volume: u8, folder: &OwnedFd, name: &[u8], hidden: &str) -> Result<(), Errno> {
        check_name(hidden.as_bytes())?;
        let root = self.root(volume)?;
        match rustix::fs::mkdirat(root, REMOVED, Mode::RWXU) {
            Err(error) if error != Errno::EXIST => return Err(error),
            _ => {}
        }
        let removed = self.removed(volume)?;
        rustix::fs::renameat_with(folder, name, &removed, hidden, RenameFlags::NOREPLACE)
    }

    fn removed(&self, volume: u8) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        beneath(self.root(volume)?, REMOVED, flags, Mode::empty())
    }

    pub(super) fn forget(&self, volume: u8, hidden: &str) -> Result<(), Errno> {
        check_name(hidden.as_bytes())?;
        match self.removed(volume) {
            Ok(removed) => match rustix::fs::unlinkat(&removed, hidden, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            },
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
        self.remove_if_empty(volume)
    }

    pub(super) fn tidy(&self, volume: u8, prefix: &str) -> Result<(), Errno> {
        check_name(prefix.as_bytes())?;
        let removed = match self.removed(volume) {
            Err(Errno::NOENT) => return Ok(()),
            removed => removed?,
        };
        for entry in Dir::new(self.removed(volume)?)? {
            let entry = entry?;
            if entry.file_name().to_bytes().starts_with(prefix.as_bytes()) {
                let _ = rustix::fs::unlinkat(&removed, entry.file_name(), AtFlags::empty());
            }
        }
        self.remove_if_empty(volume)
    }

    fn remove_if_empty(&self, volume: u8) -> Result<(), Errno> {
        // Whatever is in it is somebody's.
        let _ = rustix::fs::unlinkat(self.root(volume)?, REMOVED, AtFlags::REMOVEDIR);
        Ok(())
    }
}

fn seen(folder: &OwnedFd, name: &[u8]) -> Result<Stat, Errno> {
    rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
}
