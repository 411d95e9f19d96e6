//! The filesystem below a root, as an archive may touch it. A path of several components is only
//! ever resolved by `openat2` with `RESOLVE_IN_ROOT`; everything else takes a directory that was opened so, and
//! one name in it, which is never followed.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{
    self, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;

pub(super) struct Tree {
    root: Rc<Dir>,
    /// The directory of the entry before: archives come directory by directory. Forgotten whenever
    /// something is removed, since its path may then lead elsewhere.
    last: Option<(Vec<u8>, Rc<Dir>)>,
    /// Names that this layer made, as (inode of the directory, name): a whiteout hides only what
    /// the layers below brought, wherever in the archive it stands.
    made: HashSet<(u64, Box<[u8]>)>,
}

pub(super) struct Dir {
    fd: OwnedFd,
    ino: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    Directory,
    Other,
}

impl Tree {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::openat(CWD, root, flags, Mode::empty())?;
        Ok(Self {
            root: Rc::new(Dir::new(fd)?),
            last: None,
            made: HashSet::new(),
        })
    }

    /// The directory `path`; symbolic links on the way are followed within the root.
    pub(super) fn open_dir(&mut self, path: &[u8]) -> io::Result<Rc<Dir>> {
        if path.is_empty() {
            return Ok(self.root.clone());
        }
        if let Some((last, dir)) = &self.last
            && last == path
        {
            return Ok(dir.clone());
        }
        let dir = Rc::new(Dir::new(resolve(&self.root.fd, path, OFlags::PATH)?)?);
        self.last = Some((path.to_vec(), dir.clone()));
        Ok(dir)
    }

    /// The directory `path`, made with what is missing of it on the way.
    pub(super) fn make_dir(&mut self, path: &[u8]) -> io::Result<Rc<Dir>> {
        match self.open_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let (parent, name) = super::split(path).ok_or(io::ErrorKind::NotFound)?;
        let dir = self.make_dir(parent)?;
        dir.mkdir(name)?;
        self.open_dir(path)
    }

    pub(super) fn reopen_root(&self) -> io::Result<OwnedFd> {
        resolve(&self.root.fd, b".", OFlags::RDONLY)
    }

    pub(super) fn find(&self, dir: &Dir, name: &[u8]) -> io::Result<Found> {
        match fs::statat(&dir.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(Found::Directory),
            Ok(_) => Ok(Found::Other),
            Err(Errno::NOENT) => Ok(Found::Nothing),
            Err(e) => Err(e.into()),
        }
    }

    /// Notes that this layer brought `name`.
    pub(super) fn made(&mut self, dir: &Dir, name: &[u8]) {
        self.made.insert((dir.ino, name.into()));
    }

    /// Removes `name` with everything below it. What is not there need not be removed.
    pub(super) fn remove(&mut self, dir: &Dir, name: &[u8]) -> io::Result<()> {
        self.take_away(dir, name, false)
    }

    /// Removes `name` and what is below it, but for what this layer brought and the directories that
    /// lead to it.
    pub(super) fn hide(&mut self, dir: &Dir, name: &[u8]) -> io::Result<()> {
        self.take_away(dir, name, true)
    }

    fn take_away(&mut self, dir: &Dir, name: &[u8], spare_made: bool) -> io::Result<()> {
        let spared = spare_made && self.made.contains(&(dir.ino, name.into()));
        if !spared {
            match fs::unlinkat(&dir.fd, name, AtFlags::empty()) {
                Ok(()) => {
                    self.gone(dir, name);
                    return Ok(());
                }
                Err(Errno::NOENT) => return Ok(()),
                Err(Errno::ISDIR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let below = match dir.open_dir(name) {
            Ok(fd) => Dir::new(fd)?,
            // A spared file or link.
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NOTDIR | Errno::LOOP)) => return Ok(()),
            Err(e) => return Err(e),
        };
        for child in below.names()? {
            self.take_away(&below, child.to_bytes(), spare_made)?;
        }
        if spared {
            return Ok(());
        }
        match fs::unlinkat(&dir.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) => {
                self.gone(dir, name);
                Ok(())
            }
            Err(Errno::NOTEMPTY) if spare_made => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// The number of a directory that is gone may soon be another's, with which the names in it have nothing to do.
    fn gone(&mut self, dir: &Dir, name: &[u8]) {
        self.made.remove(&(dir.ino, name.into()));
        self.last = None;
    }
}

impl Dir {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        let ino = fs::fstat(&fd)?.st_ino;
        Ok(Self { fd, ino })
    }

    pub(super) fn ino(&self) -> u64 {
        self.ino
    }

    /// The directory `name`, open for reading. A symbolic link is refused.
    pub(super) fn open_dir(&self, name: &[u8]) -> io::Result<OwnedFd> {
        resolve(&self.fd, name, OFlags::RDONLY | OFlags::NOFOLLOW)
    }

    pub(super) fn names(&self) -> io::Result<Vec<CString>> {
        let fd = resolve(&self.fd, b".", OFlags::RDONLY)?;
        let mut names = Vec::new();
        for entry in fs::Dir::new(fd)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        Ok(names)
    }

    pub(super) fn create(&self, name: &[u8]) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    pub(super) fn mkdir(&self, name: &[u8]) -> io::Result<()> {
        Ok(fs::mkdirat(&self.fd, name, Mode::from_raw_mode(0o755))?)
    }

    pub(super) fn link(&self, name: &[u8], target_dir: &Dir, target: &[u8]) -> io::Result<()> {
        Ok(fs::linkat(
            &target_dir.fd,
            target,
            &self.fd,
            name,
            AtFlags::empty(),
        )?)
    }

    pub(super) fn symlink(&self, name: &[u8], target: &[u8]) -> io::Result<()> {
        Ok(fs::symlinkat(target, &self.fd, name)?)
    }

    pub(super) fn fifo(&self, name: &[u8]) -> io::Result<()> {
        Ok(fs::mknodat(
            &self.fd,
            name,
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )?)
    }

    pub(super) fn set_owner(&self, name: &[u8], uid: u32, gid: u32) -> io::Result<()> {
        let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
        Ok(fs::chownat(
            &self.fd,
            name,
            Some(uid),
            Some(gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Sets the mode of `name`, which must be a `kind` and not a link: chmod cannot be told not to follow.
    pub(super) fn set_mode(&self, name: &[u8], mode: u32, kind: FileType) -> io::Result<()> {
        let stat = fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if kind.is_symlink() || FileType::from_raw_mode(stat.st_mode) != kind {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(fs::chmodat(
            &self.fd,
            name,
            Mode::from_raw_mode(mode & 0o7777),
            AtFlags::empty(),
        )?)
    }

    pub(super) fn set_times(&self, name: &[u8], times: &Timestamps) -> io::Result<()> {
        Ok(fs::utimensat(&self.fd, name, times, AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

fn resolve(dir: &OwnedFd, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let scope = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    loop {
        match fs::openat2(dir, path, flags, Mode::empty(), scope) {
            Ok(fd) => return Ok(fd),
            // The kernel saw a rename or a mount while it resolved, and asks to be asked again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Owner before mode, because a change of owner takes the setuid bit away.
pub(super) fn set_owner_and_mode(fd: impl AsFd, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
    fs::fchown(&fd, Some(fs::Uid::from_raw(uid)), Some(fs::Gid::from_raw(gid)))?;
    Ok(fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o7777))?)
}

/// `false` if the filesystem does not take such an attribute.
pub(super) fn set_xattr(fd: impl AsFd, name: &[u8], value: &[u8]) -> io::Result<bool> {
    match fs::fsetxattr(fd, name, value, XattrFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOTSUP | Errno::PERM | Errno::INVAL | Errno::RANGE | Errno::TOOBIG) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

pub(super) fn times((seconds, nanos): (i64, u32)) -> Timestamps {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanos.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
