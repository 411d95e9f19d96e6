//! Room that is kept for the moment in which the disk is full: whoever deletes something has to write a little first.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, fstatvfs, syncfs};
use rustix::io::Errno;

/// Records of many deletions.
const SIZE: u64 = 4 << 20;

/// A file that takes room and holds nothing.
#[derive(Debug, Clone)]
pub struct Reserve(PathBuf);

impl Reserve {
    /// In a data directory.
    pub fn of(data: &Path) -> Self {
        Self(data.join("dorm.reserve"))
    }

    /// Takes the room, unless it is taken already. As much is left to others, or it is as if there were none.
    pub fn take(&self) -> io::Result<()> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.0)?;
        if file.metadata()?.blocks() * 512 >= SIZE {
            return Ok(());
        }
        let room = fstatvfs(&file)?;
        let taken = match room.f_bavail * room.f_frsize < 2 * SIZE {
            true => Err(Errno::NOSPC),
            false => fallocate(&file, FallocateFlags::empty(), 0, SIZE),
        };
        if taken.is_err() {
            let _ = fs::remove_file(&self.0);
        }
        Ok(taken?)
    }

    /// Returns when the room can be used. False if there is none.
    pub fn give_up(&self) -> io::Result<bool> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed?,
        }
        let folder = File::open(self.0.parent().unwrap_or(Path::new("/")))?;
        // btrfs has it free once the transaction is on disk.
        syncfs(&folder)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_once_and_given_up_once() {
        let directory = tempfile::tempdir().unwrap();
        let reserve = Reserve::of(directory.path());
        assert!(!reserve.give_up().unwrap());
        for _ in 0..2 {
            reserve.take().unwrap();
            let taken = fs::metadata(&reserve.0).unwrap();
            assert!(taken.blocks() * 512 >= SIZE, "{taken:?}");
        }
        assert!(reserve.give_up().unwrap());
        assert!(!reserve.0.exists() && !reserve.give_up().unwrap());
    }
}
