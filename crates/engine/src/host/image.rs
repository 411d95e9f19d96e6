//! Memory images in the making, and in use.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// An image that has not got its name yet, and is removed if it never does.
pub(crate) struct Unfinished(pub(crate) PathBuf);

impl Unfinished {
    pub(crate) fn make(image: &Path) -> std::io::Result<Self> {
        let mut name = image.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let directory = image.with_file_name(name);
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        // Restored processes look for files here after they have become an ordinary user. The folder of all images
        // lets nobody in.
        fs::DirBuilder::new()
            .mode(0o755)
            .recursive(true)
            .create(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Tells of a restore that was broken off before anything of the box ran: what it has changed in the home, as files that have
/// lost their names get passing ones, is undone by the next. The mark is good for one boot of the host, so that it need not reach
/// the disk: after a crash of the host nobody knows what ran.
pub(crate) struct Still;

impl Still {
    const NAME: &str = "still";

    pub(crate) fn mark(image: &Path) -> std::io::Result<()> {
        let boot = dorm_sys::process::host_boot_id()?;
        fs::write(image.join(Self::NAME), boot)
    }

    pub(crate) fn unmark(image: &Path) -> std::io::Result<()> {
        match fs::remove_file(image.join(Self::NAME)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_marked(image: &Path) -> bool {
        let marked = fs::read_to_string(image.join(Self::NAME)).ok();
        marked.is_some() && marked == dorm_sys::process::host_boot_id().ok()
    }
}
