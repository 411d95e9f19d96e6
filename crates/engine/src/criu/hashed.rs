//! Checksums of files, which are not computed twice.
//!
//! A wrong checksum tells that somebody wrote to a file, that another file is in its place, or that the disk gives back something
//! else than it was given. The first two change the inode, and the third needs a read from the disk. So the checksum that this
//! process has computed of a file holds for as long as the inode is the same, unchanged, and all of the contents are in memory. A wake
//! soon after a hibernation then leaves both cores to whoever needs the memory.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::Advice;

/// A piece of a file that stays in the processor's cache between being read and being hashed.
const PIECE: usize = 256 << 10;
/// Smaller files are hashed sooner than they are looked up.
const LARGE: u64 = 1 << 20;
/// Files that are remembered. When there are more, all are forgotten, which costs the next look at each of them some time.
const MANY: usize = 1 << 14;

/// An inode, and what changes when somebody writes to it. Before Linux 6.13 a second change within the same tick of the kernel's
/// clock did not tell; an image is dorm's alone for longer than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Version {
    fn of(file: &Metadata) -> Self {
        Self {
            device: file.dev(),
            inode: file.ino(),
            size: file.size(),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

static KNOWN: LazyLock<Mutex<HashMap<Version, blake3::Hash>>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, HashMap<Version, blake3::Hash>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn hash(path: &Path) -> io::Result<blake3::Hash> {
    let file = File::open(path)?;
    // Taken before the contents are read: what is written meanwhile makes it another version.
    let version = Version::of(&file.metadata()?);
    if let Some(hash) = remembered(&file, &version) {
        return Ok(hash);
    }
    let hash = hash_all(file)?;
    if version.size >= LARGE {
        let mut known = known();
        if known.len() >= MANY {
            known.clear();
        }
        known.insert(version, hash);
    }
    Ok(hash)
}

fn remembered(file: &File, version: &Version) -> Option<blake3::Hash> {
    let hash = *known().get(version)?;
    let in_memory = dorm_sys::cache::holds(file.as_fd(), version.size);
    in_memory.unwrap_or(false).then_some(hash)
}

/// Read and not mapped: what a disk cannot read is an error then, and not a signal.
fn hash_all(mut file: File) -> io::Result<blake3::Hash> {
    // Whoever else reads the file finds it in memory, too.
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::WillNeed);
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hasher.finalize()),
            length => hasher.update(&piece[..length]),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    /// A file that was hashed, on a disk.
    fn hashed() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("pages");
        fs::write(&path, vec![7; 3 * LARGE as usize + 1]).unwrap();
        hash(&path).unwrap();
        (folder, path)
    }

    fn is_remembered(path: &Path) -> bool {
        let file = File::open(path).unwrap();
        remembered(&file, &Version::of(&file.metadata().unwrap())).is_some()
    }

    #[test]
    fn a_file_that_is_left_alone_is_hashed_once() {
        let (folder, path) = hashed();
        assert!(is_remembered(&path));
        File::open(&path).unwrap().sync_all().unwrap();
        let renamed = folder.path().with_extension("renamed");
        fs::rename(folder.path(), &renamed).unwrap();
        assert!(is_remembered(&renamed.join("pages")));
        fs::rename(&renamed, folder.path()).unwrap();
        assert_eq!(
            hash(&path).unwrap(),
            hash_all(File::open(&path).unwrap()).unwrap()
        );
    }

    #[test]
    fn a_file_that_was_written_to_is_hashed_anew() {
        let (_folder, path) = hashed();
        let before = hash(&path).unwrap();
        let times = fs::metadata(&path).unwrap();
        let mut file = OpenOptions::new().write(true).open(&path).unwrap();
        file.seek(SeekFrom::Start(LARGE)).unwrap();
        file.write_all(b"8").unwrap();
        // Whoever sets the time of its contents back changes the inode by that.
        file.set_modified(times.modified().unwrap()).unwrap();
        assert!(!is_remembered(&path));
        assert_ne!(hash(&path).unwrap(), before);
    }

    #[test]
    fn a_file_in_the_place_of_another_is_hashed_anew() {
        let (folder, path) = hashed();
        let copy = folder.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        fs::rename(&copy, &path).unwrap();
        assert!(!is_remembered(&path));
    }

    #[test]
    fn what_comes_from_the_disk_is_hashed_anew() {
        let (_folder, path) = hashed();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert!(!is_remembered(&path));
    }
}
