//! The guest that this build carries, kept in the data directory by its hash.
//!
//! A box goes on with the guest it was started with, whatever the daemon is upgraded to, so binaries are never
//! replaced, only added.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{EngineError, Result};

static EMBEDDED: &[u8] = include_bytes!(env!("DORM_GUEST_BINARY"));

#[derive(Debug, Clone)]
pub struct GuestBinary {
    pub hash: String,
    pub path: PathBuf,
}

/// Puts the embedded guest into `data/guests`, whole or not at all.
pub fn install(data: &Path) -> Result<GuestBinary> {
    let failed = || EngineError::io("cannot install the guest");
    let hash = blake3::hash(EMBEDDED).to_hex().to_string();
    let directory = data.join("guests");
    let path = directory.join(&hash);
    // Checked by content, not by name alone: a torn write or a flipped bit must not become process 1 of every box.
    if fs::read(&path).is_ok_and(|found| found == EMBEDDED) {
        return Ok(GuestBinary { hash, path });
    }
    fs::create_dir_all(&directory).map_err(failed())?;
    let unfinished = directory.join(format!("{hash}.new"));
    let mut file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o755)
        .open(&unfinished)
        .map_err(failed())?;
    file.write_all(EMBEDDED)
        .and_then(|()| file.sync_all())
        .map_err(failed())?;
    drop(file);
    fs::rename(&unfinished, &path).map_err(failed())?;
    Ok(GuestBinary { hash, path })
}
