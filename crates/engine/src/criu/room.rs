//! Whether who writes a memory image failed for want of room on the disk. CRIU says so in its log, which lies on the same disk.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use crate::EngineError;

/// More than a log needs, and less than memory does.
const SOME: usize = 1 << 20;

/// Bytes that are free where `directory` is, if there being so few is the reason.
pub(crate) fn is_lacking(directory: &Path, reason: &str) -> Option<u64> {
    let told = ["no space left on device", "disk quota exceeded"];
    let reason = reason.to_lowercase();
    let lacking = told.iter().any(|words| reason.contains(words)) || is_full(directory);
    let free = || rustix::fs::statvfs(directory).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    lacking.then(free)
}

/// Why no memory image could be made in `directory`, for which `reason` was given.
pub(crate) fn unsaved(directory: &Path, reason: String) -> EngineError {
    match is_lacking(directory, &reason) {
        Some(free) => EngineError::NoSpace { free },
        None => EngineError::CannotCheckpoint(reason),
    }
}

fn is_full(directory: &Path) -> bool {
    let probe = directory.join("probe");
    let written = fs::File::create(&probe).and_then(|mut file| {
        file.write_all(&vec![1; SOME])?;
        file.sync_data()
    });
    let _ = fs::remove_file(&probe);
    written.is_err_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_the_disk_is_believed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        for full in [
            "pages: Can't write: No space left on device; Dumping FAILED.",
            "checkpoint failed: statefile error: no space left on device",
        ] {
            assert!(is_lacking(directory.path(), full).is_some());
        }
        assert!(is_lacking(directory.path(), "Can't dump file 7 of process 12 (io_uring)").is_none());
        assert!(!directory.path().join("probe").exists());
    }
}
