//! The files of a volume, for who is outside of all boxes.
//!
//! A box may change a volume at any moment. So nothing here follows a link, and every path is resolved by the
//! kernel in one step that cannot lead out of the volume; what is done then is done to what that step found.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};

use crate::Id;

/// Directories within directories that are walked into.
const MAX_DEPTH: usize = 200;
const MAX_ENTRIES: usize = 50_000;
/// A box can make a step fail by renaming at that moment.
const TRIES: usize = 64;
/// Ids that a box has.
const MAX_ID: u32 = 65_535;
const UPLOAD: &str = ".dorm-upload-";

#[derive(Debug, Clone)]
pub struct Tree {
    root: Arc<OwnedFd>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    /// From the volume's root, which is `/`.
    pub path: String,
    pub kind: Kind,
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Milliseconds since 1970.
    pub atime: i64,
    pub mtime: i64,
    pub ctime: i64,
    /// Of a link.
    pub target: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Other,
}

/// Whose something is, and who may do what to it. What is absent stays, or is the default.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attributes {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mode: Option<u32>,
}

/// Who owns what is made without a word about it: the first ordinary user.
const FIRST_USER: u32 = 1000;

impl Attributes {
    fn or(self, mode: u32) -> Self {
        Self {
            uid: self.uid.or(Some(FIRST_USER)),
            gid: self.gid.or(Some(FIRST_USER)),
            mode: self.mode.or(Some(mode)),
        }
    }

    fn apply(self, to: BorrowedFd<'_>) -> io::Result<()> {
        if self.uid.max(self.gid).is_some_and(|id| id > MAX_ID) {
            return Err(invalid("ids are numbers up to 65535"));
        }
        if self.uid.is_some() || self.gid.is_some() {
            rustix::fs::fchown(to, self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw))?;
        }
        if let Some(mode) = self.mode {
            rustix::fs::fchmod(to, Mode::from_raw_mode(mode & 0o777))?;
        }
        Ok(())
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// The parts of a path, which leads nowhere but down.
fn parts(path: &str) -> io::Result<Vec<&OsStr>> {
    let mut parts = Vec::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(part) => parts.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(invalid("a path must not hold `..`")),
        }
    }
    if path.contains('\0') {
        return Err(invalid("a path must not hold a zero byte"));
    }
    Ok(parts)
}

fn relative(parts: &[&OsStr]) -> PathBuf {
    std::iter::once(OsStr::new("."))
        .chain(parts.iter().copied())
        .collect()
}

impl Tree {
    /// The tree of a directory that no box can exchange.
    pub fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        Ok(Self { root: Arc::new(root) })
    }

    fn resolve(&self, parts: &[&OsStr], flags: OFlags) -> io::Result<OwnedFd> {
        let beneath = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let path = relative(parts);
        for _ in 0..TRIES {
            let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat2(&*self.root, &path, flags, Mode::empty(), beneath) {
                Err(rustix::io::Errno::AGAIN) => {}
                Err(rustix::io::Errno::LOOP | rustix::io::Errno::XDEV) => {
                    return Err(invalid("the path leads through a link"));
                }
                opened => return Ok(opened?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    fn directory(&self, parts: &[&OsStr]) -> io::Result<OwnedFd> {
        self.resolve(parts, OFlags::PATH | OFlags::DIRECTORY)
    }

    pub fn stat(&self, path: &str) -> io::Result<Entry> {
        let parts = parts(path)?;
        let found = self.resolve(&parts, OFlags::PATH)?;
        entry(found.as_fd(), &absolute(&parts))
    }

    /// What is in a directory, and so many levels below it.
    pub fn list(&self, path: &str, depth: usize) -> io::Result<Vec<Entry>> {
        let parts = parts(path)?;
        let directory = self.resolve(&parts, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut found = Vec::new();
        let depth = depth.clamp(1, MAX_DEPTH);
        collect(directory.as_fd(), &absolute(&parts), depth, &mut found)?;
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// With `parents`, those that are missing are made, too, and one that is there is no error.
    pub fn make_dir(&self, path: &str, attributes: Attributes, parents: bool) -> io::Result<Entry> {
        let parts = parts(path)?;
        let (name, above) = parts
            .split_last()
            .ok_or_else(|| io::Error::from(io::ErrorKind::AlreadyExists))?;
        if parents {
            self.make_parents(above, attributes)?;
        }
        match self.make_one(above, name, attributes) {
            Err(error) if parents && error.kind() == io::ErrorKind::AlreadyExists => {
                self.directory(&parts).map(drop)?;
            }
            made => made?,
        }
        self.stat(path)
    }

    fn make_parents(&self, parts: &[&OsStr], attributes: Attributes) -> io::Result<()> {
        for depth in 1..=parts.len() {
            match self.make_one(
                &parts[..depth - 1],
                parts[depth - 1],
                Attributes {
                    mode: None,
                    ..attributes
                },
            ) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn make_one(&self, above: &[&OsStr], name: &OsStr, attributes: Attributes) -> io::Result<()> {
        let above = self.directory(above)?;
        rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o700))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&above, name, flags, Mode::empty())?;
        attributes.or(0o755).apply(made.as_fd())
    }

    pub fn remove(&self, path: &str) -> io::Result<()> {
        let parts = parts(path)?;
        let (name, above) = parts
            .split_last()
            .ok_or_else(|| invalid("the volume itself is no path in it"))?;
        remove(self.directory(above)?.as_fd(), name, MAX_DEPTH)
    }

    pub fn change(&self, path: &str, attributes: Attributes) -> io::Result<Entry> {
        let found = self.resolve(&parts(path)?, OFlags::RDONLY | OFlags::NONBLOCK)?;
        attributes.apply(found.as_fd())?;
        self.stat(path)
    }

    pub fn read(&self, path: &str) -> io::Result<File> {
        let file = self.resolve(&parts(path)?, OFlags::RDONLY | OFlags::NONBLOCK)?;
        match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
            FileType::RegularFile => Ok(File::from(file)),
            FileType::Directory => Err(io::ErrorKind::IsADirectory.into()),
            _ => Err(invalid("it is no ordinary file")),
        }
    }

    /// A file that takes its place once all of it is there.
    pub fn write(&self, path: &str, attributes: Attributes, parents: bool) -> io::Result<Upload> {
        let parts = parts(path)?;
        let (name, above) = parts
            .split_last()
            .ok_or_else(|| io::Error::from(io::ErrorKind::IsADirectory))?;
        if parents {
            self.make_parents(above, attributes)?;
        }
        let above = self.directory(above)?;
        let unfinished = OsString::from(format!("{UPLOAD}{}", Id::random()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&above, &unfinished, flags, Mode::from_raw_mode(0o600))?;
        Ok(Upload {
            file: File::from(file),
            above,
            unfinished: Some(unfinished),
            name: (*name).to_owned(),
            attributes,
            tree: self.clone(),
            path: path.to_owned(),
        })
    }
}

/// A file that is being written.
#[derive(Debug)]
pub struct Upload {
    pub file: File,
    above: OwnedFd,
    unfinished: Option<OsString>,
    name: OsString,
    attributes: Attributes,
    tree: Tree,
    path: String,
}

impl Upload {
    /// Gives the file its name. One that is there is replaced.
    pub fn finish(mut self) -> io::Result<Entry> {
        self.attributes.or(0o644).apply(self.file.as_fd())?;
        if let Some(unfinished) = &self.unfinished {
            rustix::fs::renameat(&self.above, unfinished, &self.above, &self.name)?;
        }
        self.unfinished = None;
        self.tree.stat(&self.path)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            let _ = rustix::fs::unlinkat(&self.above, unfinished, AtFlags::empty());
        }
    }
}

fn absolute(parts: &[&OsStr]) -> String {
    let parts: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
    format!("/{}", parts.join("/"))
}

fn entry(found: BorrowedFd<'_>, path: &str) -> io::Result<Entry> {
    let stat = rustix::fs::fstat(found)?;
    let target = match kind(&stat) {
        Kind::Symlink => rustix::fs::readlinkat(found, "", Vec::new())
            .ok()
            .map(|target| target.to_string_lossy().into_owned()),
        _ => None,
    };
    let millis = |seconds: i64, nanos: u64| seconds * 1000 + (nanos / 1_000_000) as i64;
    Ok(Entry {
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        path: path.to_owned(),
        kind: kind(&stat),
        size: stat.st_size.unsigned_abs(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: millis(stat.st_atime, stat.st_atime_nsec),
        mtime: millis(stat.st_mtime, stat.st_mtime_nsec),
        ctime: millis(stat.st_ctime, stat.st_ctime_nsec),
        target,
    })
}

fn kind(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Other,
    }
}

/// Names in a directory, but for those that are being uploaded.
fn names(directory: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for found in Dir::read_from(directory)? {
        let name = OsStr::from_bytes(found?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
        if names.len() > MAX_ENTRIES {
            return Err(io::Error::other("the directory holds too much to be listed"));
        }
    }
    Ok(names)
}

fn collect(directory: BorrowedFd<'_>, path: &str, depth: usize, into: &mut Vec<Entry>) -> io::Result<()> {
    for name in names(directory)? {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // What is gone by now is not listed.
        let Ok(found) = rustix::fs::openat(directory, &name, flags, Mode::empty()) else {
            continue;
        };
        if name.as_bytes().starts_with(UPLOAD.as_bytes()) {
            continue;
        }
        let path = format!("{}/{}", path.trim_end_matches('/'), name.to_string_lossy());
        let one = entry(found.as_fd(), &path)?;
        let is_directory = one.kind == Kind::Directory;
        into.push(one);
        if into.len() > MAX_ENTRIES {
            return Err(io::Error::other("the directory holds too much to be listed"));
        }
        if is_directory && depth > 1 {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(below) = rustix::fs::openat(directory, &name, flags, Mode::empty()) {
                collect(below.as_fd(), &path, depth - 1, into)?;
            }
        }
    }
    Ok(())
}

fn remove(above: BorrowedFd<'_>, name: &OsStr, depth: usize) -> io::Result<()> {
    match rustix::fs::unlinkat(above, name, AtFlags::empty()) {
        Err(rustix::io::Errno::ISDIR | rustix::io::Errno::PERM) => {}
        done => return Ok(done?),
    }
    if depth == 0 {
        return Err(io::Error::other("directories are too deep to be removed"));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(above, name, flags, Mode::empty())?;
    for below in names(directory.as_fd())? {
        match remove(directory.as_fd(), &below, depth - 1) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(rustix::fs::unlinkat(above, name, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (Tree, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("volume")).unwrap();
        (Tree::open(&dir.path().join("volume")).unwrap(), dir)
    }

    const OWN: Attributes = Attributes {
        uid: Some(0),
        gid: Some(0),
        mode: None,
    };

    fn put(tree: &Tree, path: &str, text: &str) -> io::Result<Entry> {
        let mut upload = tree.write(path, OWN, true)?;
        upload.file.write_all(text.as_bytes())?;
        upload.finish()
    }

    #[test]
    fn files_are_written_read_listed_and_removed() {
        let (tree, _dir) = tree();
        let written = put(&tree, "/a/b.txt", "hello").unwrap();
        assert_eq!(
            (written.path.as_str(), written.size, written.mode),
            ("/a/b.txt", 5, 0o644)
        );
        let mut text = String::new();
        tree.read("a/b.txt").unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        let paths = |depth| -> Vec<String> {
            tree.list("/", depth)
                .unwrap()
                .into_iter()
                .map(|e| e.path)
                .collect()
        };
        assert_eq!(paths(1), ["/a"]);
        assert_eq!(paths(2), ["/a", "/a/b.txt"]);
        tree.remove("/a").unwrap();
        assert_eq!(tree.stat("/a").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(tree.list("/", 9).unwrap().is_empty());
    }

    #[test]
    fn a_broken_off_upload_leaves_nothing() {
        let (tree, dir) = tree();
        put(&tree, "/kept", "old").unwrap();
        drop(tree.write("/kept", OWN, false).unwrap());
        assert_eq!(std::fs::read_dir(dir.path().join("volume")).unwrap().count(), 1);
        assert_eq!(
            std::fs::read_to_string(dir.path().join("volume/kept")).unwrap(),
            "old"
        );
    }

    #[test]
    fn no_link_and_no_dots_lead_out_of_the_volume() {
        let (tree, dir) = tree();
        std::fs::write(dir.path().join("secret"), "secret").unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        let inside = dir.path().join("volume");
        symlink("../secret", inside.join("file")).unwrap();
        symlink("../outside", inside.join("folder")).unwrap();
        symlink("/", inside.join("root")).unwrap();
        for path in [
            "file",
            "folder/x",
            "root/etc/passwd",
            "../secret",
            "a/../../secret",
        ] {
            assert!(tree.read(path).is_err(), "{path} was read");
            assert!(
                put(&tree, path, "x").is_err() || path == "file",
                "{path} was written"
            );
            assert!(tree.list(path, 3).is_err(), "{path} was listed");
            assert!(
                tree.change(
                    path,
                    Attributes {
                        mode: Some(0o777),
                        ..OWN
                    }
                )
                .is_err()
                    || path == "file"
            );
        }
        // Writing replaces a link; it does not write through it.
        assert_eq!(
            std::fs::read_to_string(dir.path().join("secret")).unwrap(),
            "secret"
        );
        assert_eq!(tree.stat("folder").unwrap().target.as_deref(), Some("../outside"));
        tree.remove("folder").unwrap();
        assert!(
            dir.path().join("outside").exists(),
            "the link went, not what it names"
        );
        assert!(tree.make_dir("root/tmp/x", OWN, true).is_err());
    }

    #[test]
    fn what_is_no_ordinary_file_is_not_read() {
        let (tree, dir) = tree();
        let pipe = dir.path().join("volume/pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            FileType::Fifo,
            Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
        assert!(tree.read("pipe").is_err());
        assert_eq!(tree.read("/").unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }
}
