//! inotify(7) for one watched folder, with the folders below it if asked for.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dorm_proto::filesystem::EventType;
use tokio::io::unix::AsyncFd;

use crate::identity;
use crate::sys::{self, check};
use crate::users::User;

const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_ONLYDIR
    | libc::IN_EXCL_UNLINK;

/// Something that happened, with the path relative to the watched folder.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Change {
    pub(super) name: PathBuf,
    pub(super) kind: EventType,
}

pub(super) struct Inotify {
    fd: AsyncFd<OwnedFd>,
    root: PathBuf,
    recursive: bool,
    user: User,
    /// Watched folders, relative to the root.
    folders: HashMap<i32, PathBuf>,
}

impl Inotify {
    /// Blocks; for a thread with the user's rights.
    pub(super) fn prepare(root: PathBuf, recursive: bool) -> io::Result<Prepared> {
        // SAFETY: the call takes flags and gives a descriptor that nobody else owns.
        let fd = unsafe {
            OwnedFd::from_raw_fd(check(libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK))?)
        };
        let mut prepared = Prepared {
            fd,
            root,
            recursive,
            folders: HashMap::new(),
        };
        add(&prepared.fd, &prepared.root, Path::new(""), &mut prepared.folders)?;
        if recursive {
            add_below(
                &prepared.fd,
                &prepared.root,
                Path::new(""),
                &mut prepared.folders,
                &mut Vec::new(),
            );
        }
        Ok(prepared)
    }

    /// Waits for changes.
    pub(super) async fn next(&mut self) -> io::Result<Vec<Change>> {
        loop {
            let mut buf = vec![0u8; 16 * 1024];
            let n = {
                let mut ready = self.fd.readable().await?;
                match ready.try_io(|fd| sys::read(fd.get_ref().as_fd(), &mut buf)) {
                    Ok(n) => n?,
                    Err(_would_block) => continue,
                }
            };
            let changes = self.parse(&buf[..n]);
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    fn parse(&mut self, mut buf: &[u8]) -> Vec<Change> {
        const HEADER: usize = size_of::<libc::inotify_event>();
        let mut changes = Vec::new();
        while buf.len() >= HEADER {
            let word = |i: usize| u32::from_ne_bytes(buf[i..i + 4].try_into().expect("four bytes"));
            let (watch, mask, len) = (word(0).cast_signed(), word(4), word(12) as usize);
            let name = &buf[HEADER..HEADER + len];
            let name = OsStr::from_bytes(name.split(|b| *b == 0).next().unwrap_or_default());
            self.event(watch, mask, name, &mut changes);
            buf = &buf[HEADER + len..];
        }
        changes
    }

    fn event(&mut self, watch: i32, mask: u32, name: &OsStr, changes: &mut Vec<Change>) {
        if mask & libc::IN_IGNORED != 0 {
            self.folders.remove(&watch);
            return;
        }
        let Some(folder) = self.folders.get(&watch) else {
            return;
        };
        let name = folder.join(name);
        let kind = match mask {
            m if m & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 => EventType::EVENT_TYPE_CREATE,
            m if m & libc::IN_MODIFY != 0 => EventType::EVENT_TYPE_WRITE,
            m if m & libc::IN_DELETE != 0 => EventType::EVENT_TYPE_REMOVE,
            m if m & libc::IN_MOVED_FROM != 0 => EventType::EVENT_TYPE_RENAME,
            m if m & libc::IN_ATTRIB != 0 => EventType::EVENT_TYPE_CHMOD,
            _ => return,
        };
        if name.as_os_str().is_empty() {
            return;
        }
        changes.push(Change {
            name: name.clone(),
            kind,
        });
        if self.recursive && mask & libc::IN_ISDIR != 0 && kind == EventType::EVENT_TYPE_CREATE {
            self.follow(&name, changes);
        }
    }

    /// Watches a folder that has just come, and tells of what came before the watch did.
    fn follow(&mut self, folder: &Path, changes: &mut Vec<Change>) {
        let mut found = Vec::new();
        let (fd, root, folders) = (self.fd.get_ref(), &self.root, &mut self.folders);
        let _ = identity::with(&self.user, || {
            add(fd, root, folder, folders)?;
            add_below(fd, root, folder, folders, &mut found);
            Ok(())
        });
        changes.extend(found.into_iter().map(|name| Change {
            name,
            kind: EventType::EVENT_TYPE_CREATE,
        }));
    }
}

/// What a blocking thread has set up and the runtime goes on with.
pub(super) struct Prepared {
    fd: OwnedFd,
    root: PathBuf,
    recursive: bool,
    folders: HashMap<i32, PathBuf>,
}

impl Prepared {
    pub(super) fn watch(self, user: User) -> io::Result<Inotify> {
        Ok(Inotify {
            user,
            fd: sys::watched(self.fd)?,
            root: self.root,
            recursive: self.recursive,
            folders: self.folders,
        })
    }
}

fn add(fd: &OwnedFd, root: &Path, folder: &Path, folders: &mut HashMap<i32, PathBuf>) -> io::Result<()> {
    let path = CString::new(root.join(folder).as_os_str().as_bytes())?;
    // Links below the root are not followed; the root itself may be one.
    let no_follow = if folder.as_os_str().is_empty() {
        0
    } else {
        libc::IN_DONT_FOLLOW
    };
    // SAFETY: the path is NUL-terminated.
    let watch = check(unsafe { libc::inotify_add_watch(fd.as_raw_fd(), path.as_ptr(), MASK | no_follow) })?;
    folders.insert(watch, folder.to_owned());
    Ok(())
}

/// Watches all folders below `folder`, as far as they may be read, and collects every name found.
fn add_below(
    fd: &OwnedFd,
    root: &Path,
    folder: &Path,
    folders: &mut HashMap<i32, PathBuf>,
    found: &mut Vec<PathBuf>,
) {
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
        return;
    };
    for entry in entries.flatten() {
        let name = folder.join(entry.file_name());
        found.push(name.clone());
        if entry.file_type().is_ok_and(|t| t.is_dir()) && add(fd, root, &name, folders).is_ok() {
            add_below(fd, root, &name, folders, found);
        }
    }
}
