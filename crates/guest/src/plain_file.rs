//! Files of the box that the guest reads and writes for itself. Root in the box may have put anything in their place, so
//! nothing here waits for anybody, and nothing is read without end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// More than any of these files has in earnest.
const MOST: u64 = 4 << 20;

/// A pipe in its place is neither waited for nor used.
pub(crate) fn open(path: &Path, options: &mut OpenOptions, flags: i32) -> io::Result<File> {
    let file = options
        .custom_flags(flags | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no plain file")),
    }
}

pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = open(path, OpenOptions::new().read(true), 0)?;
    match file.take(MOST + 1).read_to_end(&mut content)? as u64 > MOST {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(content),
    }
}

/// Nothing if it cannot be read.
pub(crate) fn text(path: impl AsRef<Path>) -> String {
    String::from_utf8_lossy(&read(path.as_ref()).unwrap_or_default()).into_owned()
}

/// Writes a file in place. A link is replaced by a file: it may lead to where a service that the box does not have
/// would have put one. So is a pipe, or whatever else is no file.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        fs::remove_file(path)?;
    }
    if read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    open(path, &mut options, libc::O_NOFOLLOW)?.write_all(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linked_file_is_replaced_and_its_target_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "theirs").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"ours").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"theirs");
        assert_eq!(fs::read(&link).unwrap(), b"ours");
        assert!(!fs::symlink_metadata(&link).unwrap().file_type().is_symlink());
    }

    #[test]
    fn a_pipe_is_not_waited_for_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        assert!(read(&pipe).is_err());
        let written = open(&pipe, OpenOptions::new().append(true), 0);
        assert!(written.is_err(), "{written:?}");
        replace(&pipe, b"ours").unwrap();
        assert_eq!(text(&pipe), "ours");
    }

    #[test]
    fn a_file_without_an_end_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let endless = folder.path().join("endless");
        File::create(&endless).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&endless).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
