//! From what a request names to what is there.
//!
//! Other boxes change a volume meanwhile. So no link is followed, nothing leads out of the volume, and what is found must be the inode
//! that the machine's kernel means: otherwise it hears that what it knows is stale, and looks again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dorm_proto::volume::{Attributes, File, Node, Place, Time};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::Server;

const WITHIN: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);
/// Longest path that is given to the kernel at once.
const LONGEST: usize = 4000;
/// How often a path is tried whose folders others move about.
const TRIES: usize = 64;

impl Server {
    pub(super) fn root(&self, volume: u8) -> Result<&OwnedFd, Errno> {
        self.roots.get(usize::from(volume)).ok_or(Errno::STALE)
    }

    /// A descriptor that names the node and opens nothing.
    pub(super) fn find(&self, node: &Node) -> Result<OwnedFd, Errno> {
        let found = self.follow(node.volume, &node.path)?;
        is_it(&found, node.inode)?;
        Ok(found)
    }

    pub(super) fn folder(&self, place: &Place) -> Result<OwnedFd, Errno> {
        check_name(&place.name)?;
        self.find(&place.folder)
    }

    /// Opens a file or folder. Of what else there is, pipes and devices, nothing is ever opened.
    pub(super) fn open_node(&self, node: &Node, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = match node.path.is_empty() {
            true => beneath(self.root(node.volume)?, b".", flags, Mode::empty())?,
            false => {
                let (folder, name) = self.parent(node)?;
                let seen = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(stale)?;
                is_the_one(&seen, node.inode)?;
                is_plain(&seen)?;
                beneath(&folder, name, flags, Mode::empty()).map_err(stale)?
            }
        };
        let seen = is_it(&opened, node.inode)?;
        is_plain(&seen)?;
        Ok(opened)
    }

    /// The folder that a node lies in, and its name there.
    pub(super) fn parent<'a>(&self, node: &'a Node) -> Result<(OwnedFd, &'a [u8]), Errno> {
        let cut = node.path.iter().rposition(|byte| *byte == b'/');
        let (folder, name) = match cut {
            Some(at) => (&node.path[..at], &node.path[at + 1..]),
            None => (&[][..], &node.path[..]),
        };
        check_name(name)?;
        Ok((self.follow(node.volume, folder)?, name))
    }

    /// What the machine has open under the handle of `file`, if that is known here.
    pub(super) fn open_already(&self, file: &File) -> Option<Arc<OwnedFd>> {
        self.held().files.get(&file.handle).cloned()
    }

    fn follow(&self, volume: u8, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = self.root(volume)?;
        if path.is_empty() {
            return beneath(root, b".", flags, Mode::empty());
        }
        path.split(|byte| *byte == b'/').try_for_each(check_name)?;
        let mut at: Option<OwnedFd> = None;
        let mut rest = path;
        while !rest.is_empty() {
            let part = match rest.len() <= LONGEST {
                true => rest,
                // Names are far shorter, so there is a cut.
                false => match rest[..LONGEST].iter().rposition(|byte| *byte == b'/') {
                    Some(cut) => &rest[..cut],
                    None => return Err(Errno::NAMETOOLONG),
                },
            };
            let from = at.as_ref().unwrap_or(root);
            at = Some(beneath(from, part, flags, Mode::empty()).map_err(stale)?);
            rest = rest.get(part.len() + 1..).unwrap_or_default();
        }
        at.ok_or(Errno::STALE)
    }
}

/// Opens what `path` names below `folder`, through no link.
pub(super) fn beneath(folder: impl AsFd, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let mut tries = 0;
    loop {
        tries += 1;
        match rustix::fs::openat2(&folder, path, flags, mode, WITHIN) {
            Err(Errno::AGAIN | Errno::INTR) if tries < TRIES => {}
            opened => return opened,
        }
    }
}

/// A name in a folder that leads nowhere else.
pub(super) fn check_name(name: &[u8]) -> Result<(), Errno> {
    match name {
        b"" | b"." | b".." => Err(Errno::INVAL),
        name if name.contains(&b'/') || name.contains(&0) => Err(Errno::INVAL),
        name if name.len() > 255 => Err(Errno::NAMETOOLONG),
        _ => Ok(()),
    }
}

/// What was on a path is not there any more, or is no folder now.
pub(super) fn stale(error: Errno) -> Errno {
    match error {
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::XDEV => Errno::STALE,
        other => other,
    }
}

fn is_it(found: &OwnedFd, inode: u64) -> Result<Stat, Errno> {
    let seen = rustix::fs::fstat(found)?;
    is_the_one(&seen, inode)?;
    Ok(seen)
}

/// Only a root is named without its inode.
fn is_the_one(seen: &Stat, inode: u64) -> Result<(), Errno> {
    match inode == 0 || seen.st_ino == inode {
        true => Ok(()),
        false => Err(Errno::STALE),
    }
}

fn is_plain(seen: &Stat) -> Result<(), Errno> {
    match kind(seen) {
        FileType::RegularFile | FileType::Directory => Ok(()),
        FileType::Symlink => Err(Errno::LOOP),
        _ => Err(Errno::OPNOTSUPP),
    }
}

pub(super) fn kind(seen: &Stat) -> FileType {
    FileType::from_raw_mode(seen.st_mode)
}

pub(super) fn attributes(seen: &Stat) -> Attributes {
    let time = |seconds: i64, nanoseconds: u64| Time {
        seconds,
        nanoseconds: nanoseconds as u32,
    };
    Attributes {
        inode: seen.st_ino,
        size: seen.st_size.cast_unsigned(),
        blocks: seen.st_blocks.cast_unsigned(),
        block_size: seen.st_blksize as u32,
        mode: seen.st_mode,
        links: seen.st_nlink as u32,
        user: seen.st_uid,
        group: seen.st_gid,
        device: seen.st_rdev as u32,
        accessed: time(seen.st_atime, seen.st_atime_nsec),
        modified: time(seen.st_mtime, seen.st_mtime_nsec),
        changed: time(seen.st_ctime, seen.st_ctime_nsec),
    }
}
