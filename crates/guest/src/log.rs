//! The guest's own log, a file in the box. A guest that cannot write it goes on without.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::plain_file;

const MAX_BYTES: u64 = 1 << 20;

static LOG: Mutex<Option<Log>> = Mutex::new(None);

struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
}

fn open(path: &Path) -> std::io::Result<Log> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o640);
    let file = plain_file::open(path, &mut options, libc::O_NOFOLLOW)?;
    let bytes = file.metadata()?.len();
    Ok(Log {
        path: path.to_owned(),
        file,
        bytes,
    })
}

/// Opens the log in `folder`, making the folder if needed.
pub(crate) fn set_up(folder: &Path) {
    let _ = std::fs::create_dir_all(folder);
    *LOG.lock().expect("no writer panics") = open(&folder.join("guest.log")).ok();
}

pub(crate) fn write(message: fmt::Arguments<'_>) {
    let mut guard = LOG.lock().expect("no writer panics");
    let Some(log) = guard.as_mut() else { return };
    let ms = crate::sys::now_ms();
    let line = format!("{}.{:03} {message}\n", ms / 1000, ms % 1000);
    if log.bytes + line.len() as u64 > MAX_BYTES {
        let _ = std::fs::rename(&log.path, log.path.with_extension("log.1"));
        match open(&log.path) {
            Ok(new) => *log = new,
            Err(_) => {
                *guard = None;
                return;
            }
        }
    }
    if log.file.write_all(line.as_bytes()).is_ok() {
        log.bytes += line.len() as u64;
    }
}

macro_rules! log {
    ($($arg:tt)*) => { $crate::log::write(format_args!($($arg)*)) };
}
pub(crate) use log;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_rotated_when_it_is_full() {
        let folder = tempfile::tempdir().unwrap();
        set_up(folder.path());
        let line = "x".repeat(1000);
        for _ in 0..1100 {
            log!("{line}");
        }
        assert!(folder.path().join("guest.log.1").exists());
        assert!(std::fs::metadata(folder.path().join("guest.log")).unwrap().len() <= MAX_BYTES);
    }
}
