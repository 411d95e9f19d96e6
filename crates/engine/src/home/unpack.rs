//! Applies one layer, a tar archive, over a root filesystem.
//!
//! The layer is somebody else's: no name, link or order of entries in it may reach outside of the
//! root. Every directory is therefore opened by the kernel's own scoped resolution (`openat2` with
//! `RESOLVE_IN_ROOT`), and every last component is created, replaced or removed by name in
//! that directory, without being followed. In the product this runs inside a sandbox that has
//! nothing but the home; it is safe without one as well.
//!
//! - [`reader`] turns the stream into entries: gzip, zstd or plain; ustar, GNU and PAX; sparse files.
//! - [`tree`] is the filesystem below the root.
//! - This file says what each entry does to the tree, OCI whiteouts included.

use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{FileType, Timestamps};
use serde::{Deserialize, Serialize};

pub(crate) use reader::Compression;
use reader::{Entry, Kind, TarReader};
use tree::{Dir, Found, Tree};

mod reader;
#[cfg(test)]
mod tests;
mod tree;

const BUFFER: usize = 256 * 1024;
/// Ids from here on do not exist in a box.
const IDS: u64 = 65_536;
const NOBODY: u32 = 65_534;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Bookkeeping of aufs, which old image builders left in their layers.
const AUFS: &[u8] = b".wh..wh.";

/// Not wrong in a lower layer, or in an image of one static program; but then nobody can be named.
pub const NO_PASSWD: &str = "there is no /etc/passwd: only root can run commands";

/// What a layer did, and what of it was left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    pub entries: u64,
    /// Bytes of file content written.
    pub bytes: u64,
    pub whiteouts: u64,
    pub devices_skipped: u64,
    pub unknown_skipped: u64,
    pub xattrs_skipped: u64,
    /// Entries whose place is on another filesystem than the root.
    pub mounts_skipped: u64,
    pub ids_clamped: u64,
    pub lacks_passwd: bool,
}

impl Applied {
    /// What was left out or altered, one line for each kind.
    pub fn warnings(&self) -> Vec<String> {
        [
            (self.devices_skipped, "device nodes or sockets were left out"),
            (self.unknown_skipped, "entries of an unknown type were left out"),
            (self.xattrs_skipped, "extended attributes were left out"),
            (self.mounts_skipped, "entries below a mount point were left out"),
            (
                self.ids_clamped,
                "entries belong to ids above 65535 and were given to nobody",
            ),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .chain(self.lacks_passwd.then(|| NO_PASSWD.to_owned()))
        .collect()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("the layer cannot be read")]
    Read(#[source] io::Error),
    #[error("the layer is not a sound tar archive: {0}")]
    Malformed(String),
    #[error("the layer has an entry that leads outside: {0}")]
    Outside(String),
    #[error("cannot {doing} /{path}")]
    Apply {
        doing: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
}

impl UnpackError {
    /// Whether the root, not the layer, is the trouble: it has no space left.
    pub fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Self::Apply { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

pub type Result<T, E = UnpackError> = std::result::Result<T, E>;

/// Attributes that are kept beside those of users. A mode says what a group may do only together with the list of who else may.
const KEPT_ATTRIBUTES: [&[u8]; 3] = [
    b"security.capability",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
];

/// What the names in an archive mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Names {
    /// Some hide what the layers below have.
    OfLayer,
    /// Each is that of a file.
    OfFiles,
}

/// Applies `layer` to the tree below `root`.
pub fn apply_layer_at(root: &Path, layer: impl Read) -> Result<Applied> {
    apply_at(root, layer, Names::OfLayer)
}

/// Applies `archive` to the tree below `root`.
pub fn apply_at(root: &Path, archive: impl Read, names: Names) -> Result<Applied> {
    let tree = Tree::open(root).map_err(|e| applying("open", b"", e))?;
    let mut reader = TarReader::new(archive)?;
    let mut apply = Apply {
        tree,
        names,
        directory_times: Vec::new(),
        buffer: vec![0; BUFFER].into_boxed_slice(),
        applied: Applied::default(),
    };
    while let Some(entry) = reader.next_entry()? {
        apply.entry(&entry, &mut reader)?;
    }
    apply.restore_directory_times();
    let passwd = apply
        .tree
        .open_dir(b"etc")
        .and_then(|etc| apply.tree.find(&etc, b"passwd"));
    apply.applied.lacks_passwd = !matches!(passwd, Ok(Found::Other));
    Ok(apply.applied)
}

struct Apply {
    tree: Tree,
    names: Names,
    /// Set at the very end, because every entry made in a directory changes its time.
    directory_times: Vec<(Vec<u8>, Timestamps)>,
    buffer: Box<[u8]>,
    applied: Applied,
}

impl Apply {
    fn entry<R: Read>(&mut self, entry: &Entry, reader: &mut TarReader<R>) -> Result<()> {
        let path = relative(&entry.path)?;
        self.applied.entries += 1;
        let done = match split(&path) {
            None if entry.kind == Kind::Directory => self.directory_metadata(&path, entry, None),
            None => Err(UnpackError::Malformed("its root is not a directory".into())),
            Some((parent, name)) => self.named(parent, name, &path, entry, reader),
        };
        match done {
            Err(UnpackError::Apply { source, .. })
                if source.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error()) =>
            {
                self.applied.mounts_skipped += 1;
                Ok(())
            }
            other => other,
        }
    }

    fn named<R: Read>(
        &mut self,
        parent: &[u8],
        name: &[u8],
        path: &[u8],
        entry: &Entry,
        reader: &mut TarReader<R>,
    ) -> Result<()> {
        if self.names == Names::OfLayer {
            if name == OPAQUE {
                return self.opaque(parent);
            }
            if path
                .split(|b| *b == b'/')
                .any(|component| component.starts_with(AUFS))
            {
                return Ok(());
            }
            if let Some(hidden) = name.strip_prefix(WHITEOUT) {
                return self.whiteout(parent, hidden, path);
            }
        }
        match entry.kind {
            Kind::Device => {
                self.applied.devices_skipped += 1;
                return Ok(());
            }
            Kind::Unknown => {
                self.applied.unknown_skipped += 1;
                return Ok(());
            }
            Kind::Directory | Kind::File | Kind::HardLink | Kind::Symlink | Kind::Fifo => {}
        }
        let dir = self
            .tree
            .make_dir(parent)
            .map_err(|e| applying("make the directory of", path, e))?;
        match entry.kind {
            Kind::Directory => self.directory(&dir, name, path, entry)?,
            Kind::HardLink => self.hard_link(&dir, name, path, entry)?,
            _ => {
                self.tree
                    .remove(&dir, name)
                    .map_err(|e| applying("replace", path, e))?;
                match entry.kind {
                    Kind::File => self.file(&dir, name, path, entry, reader)?,
                    Kind::Symlink => self.symlink(&dir, name, path, entry)?,
                    _ => self.fifo(&dir, name, path, entry)?,
                }
            }
        }
        self.tree.made(&dir, name);
        Ok(())
    }

    fn directory(&mut self, dir: &Rc<Dir>, name: &[u8], path: &[u8], entry: &Entry) -> Result<()> {
        let failed = |e| applying("make the directory", path, e);
        match self.tree.find(dir, name).map_err(failed)? {
            Found::Directory => {}
            Found::Nothing => dir.mkdir(name).map_err(failed)?,
            Found::Other => {
                self.tree.remove(dir, name).map_err(failed)?;
                dir.mkdir(name).map_err(failed)?;
            }
        }
        self.directory_metadata(path, entry, Some((dir, name)))
    }

    fn directory_metadata(
        &mut self,
        path: &[u8],
        entry: &Entry,
        at: Option<(&Rc<Dir>, &[u8])>,
    ) -> Result<()> {
        let failed = |e| applying("set up the directory", path, e);
        let fd = match at {
            Some((dir, name)) => dir.open_dir(name),
            None => self.tree.reopen_root(),
        }
        .map_err(failed)?;
        let (uid, gid) = self.ids(entry);
        tree::set_owner_and_mode(&fd, uid, gid, entry.mode).map_err(failed)?;
        for (name, value) in &entry.xattrs {
            self.xattr(&fd, name, value).map_err(failed)?;
        }
        self.directory_times
            .push((path.to_vec(), tree::times(entry.mtime)));
        Ok(())
    }

    fn file<R: Read>(
        &mut self,
        dir: &Dir,
        name: &[u8],
        path: &[u8],
        entry: &Entry,
        reader: &mut TarReader<R>,
    ) -> Result<()> {
        let failed = |e| applying("write", path, e);
        let file = dir.create(name).map_err(failed)?;
        let mut end = 0;
        for &(offset, len) in &entry.segments {
            let mut at = offset;
            let mut left = len;
            while left > 0 {
                let want = left.min(self.buffer.len() as u64) as usize;
                let got = reader.read_data(&mut self.buffer[..want])?;
                file.write_all_at(&self.buffer[..got], at).map_err(failed)?;
                at += got as u64;
                left -= got as u64;
                end = at;
            }
            self.applied.bytes += len;
        }
        if end < entry.size {
            file.set_len(entry.size).map_err(failed)?;
        }
        let (uid, gid) = self.ids(entry);
        tree::set_owner_and_mode(&file, uid, gid, entry.mode).map_err(failed)?;
        for (name, value) in &entry.xattrs {
            self.xattr(&file, name, value).map_err(failed)?;
        }
        rustix::fs::futimens(&file, &tree::times(entry.mtime)).map_err(|e| failed(e.into()))
    }

    fn hard_link(&mut self, dir: &Rc<Dir>, name: &[u8], path: &[u8], entry: &Entry) -> Result<()> {
        let target = relative(&entry.link)?;
        let failed = |e| applying("make the hard link", path, e);
        let Some((target_parent, target_name)) = split(&target) else {
            return Err(UnpackError::Malformed(format!(
                "{} is a link to the root",
                lossy(path)
            )));
        };
        let target_dir = self.tree.open_dir(target_parent).map_err(failed)?;
        if target_dir.ino() == dir.ino() && target_name == name {
            return Ok(());
        }
        self.tree.remove(dir, name).map_err(failed)?;
        dir.link(name, &target_dir, target_name).map_err(failed)
    }

    fn symlink(&mut self, dir: &Dir, name: &[u8], path: &[u8], entry: &Entry) -> Result<()> {
        let failed = |e| applying("make the symbolic link", path, e);
        dir.symlink(name, &entry.link).map_err(failed)?;
        self.applied.xattrs_skipped += entry.xattrs.len() as u64;
        let (uid, gid) = self.ids(entry);
        dir.set_owner(name, uid, gid).map_err(failed)?;
        dir.set_times(name, &tree::times(entry.mtime)).map_err(failed)
    }

    fn fifo(&mut self, dir: &Dir, name: &[u8], path: &[u8], entry: &Entry) -> Result<()> {
        let failed = |e| applying("make the pipe", path, e);
        self.applied.xattrs_skipped += entry.xattrs.len() as u64;
        let (uid, gid) = self.ids(entry);
        dir.fifo(name).map_err(failed)?;
        dir.set_owner(name, uid, gid).map_err(failed)?;
        dir.set_mode(name, entry.mode, FileType::Fifo).map_err(failed)?;
        dir.set_times(name, &tree::times(entry.mtime)).map_err(failed)
    }

    fn whiteout(&mut self, parent: &[u8], hidden: &[u8], path: &[u8]) -> Result<()> {
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(UnpackError::Outside(lossy(path)));
        }
        self.applied.whiteouts += 1;
        let failed = |e| applying("apply the whiteout", path, e);
        let dir = match self.tree.open_dir(parent) {
            Ok(dir) => dir,
            Err(e) if absent(&e) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        self.tree.hide(&dir, hidden).map_err(failed)
    }

    fn opaque(&mut self, path: &[u8]) -> Result<()> {
        self.applied.whiteouts += 1;
        let failed = |e| applying("empty the directory", path, e);
        let dir = match self.tree.open_dir(path) {
            Ok(dir) => dir,
            Err(e) if absent(&e) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        for name in dir.names().map_err(failed)? {
            self.tree.hide(&dir, name.to_bytes()).map_err(failed)?;
        }
        Ok(())
    }

    fn xattr(&mut self, fd: impl std::os::fd::AsFd, name: &[u8], value: &[u8]) -> io::Result<()> {
        let supported = name.starts_with(b"user.") || KEPT_ATTRIBUTES.contains(&name);
        if supported && tree::set_xattr(fd, name, value)? {
            return Ok(());
        }
        self.applied.xattrs_skipped += 1;
        Ok(())
    }

    fn ids(&mut self, entry: &Entry) -> (u32, u32) {
        let clamp = |id: u64| if id < IDS { id as u32 } else { NOBODY };
        if entry.uid >= IDS || entry.gid >= IDS {
            self.applied.ids_clamped += 1;
        }
        (clamp(entry.uid), clamp(entry.gid))
    }

    /// Best effort: a later entry may have replaced the directory by something else.
    fn restore_directory_times(&mut self) {
        for (path, times) in std::mem::take(&mut self.directory_times).iter().rev() {
            let fd = match split(path) {
                None => self.tree.reopen_root(),
                Some((parent, name)) => self.tree.open_dir(parent).and_then(|dir| dir.open_dir(name)),
            };
            if let Ok(fd) = fd {
                let _ = rustix::fs::futimens(fd, times);
            }
        }
    }
}

/// The path below the root: no leading slash, no `.`, and never a `..`.
fn relative(path: &[u8]) -> Result<Vec<u8>> {
    let mut clean = Vec::with_capacity(path.len());
    for component in path.split(|b| *b == b'/') {
        match component {
            b"" | b"." => continue,
            b".." => return Err(UnpackError::Outside(lossy(path))),
            _ if component.contains(&0) => {
                return Err(UnpackError::Malformed(format!(
                    "{} has a zero byte in its name",
                    lossy(path)
                )));
            }
            _ => {
                if !clean.is_empty() {
                    clean.push(b'/');
                }
                clean.extend_from_slice(component);
            }
        }
    }
    Ok(clean)
}

/// Directory and last component; `None` for the root itself.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    Some(match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    })
}

fn absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn applying(doing: &'static str, path: &[u8], source: io::Error) -> UnpackError {
    UnpackError::Apply {
        doing,
        path: lossy(path),
        source,
    }
}

/// For messages, in which a name need not be whole.
fn lossy(path: &[u8]) -> String {
    const LONGEST: usize = 512;
    String::from_utf8_lossy(&path[..path.len().min(LONGEST)]).into_owned()
}
