//! The file operations. All of them block, and run with the rights of the user they are for.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use dorm_proto::filesystem::EntryInfo;

use super::entry::describe;
use crate::users::Names;

/// A listing may hold at most this many entries, which is far beyond use and bounds the guest's memory.
const MAX_ENTRIES: usize = 100_000;

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.into())
}

pub(crate) fn stat(path: &Path) -> io::Result<EntryInfo> {
    describe(path, &Names::read())
}

/// Makes the folders that lead to `path`, and `path` itself.
pub(crate) fn make_folders(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

pub(crate) fn make_dir(path: &Path) -> io::Result<EntryInfo> {
    match fs::metadata(path) {
        Ok(m) if m.is_dir() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the folder already exists",
            ));
        }
        Ok(_) => return Err(invalid("exists and is not a folder")),
        Err(_) => make_folders(path)?,
    }
    stat(path)
}

/// The entries below a folder, `depth` levels deep. Links are listed, not followed.
pub(crate) fn list(path: &Path, depth: u32) -> io::Result<Vec<EntryInfo>> {
    if !fs::metadata(path)?.is_dir() {
        return Err(invalid("is not a folder"));
    }
    let names = Names::read();
    let mut entries = Vec::new();
    list_into(path, depth.max(1), &names, &mut entries)?;
    Ok(entries)
}

fn list_into(folder: &Path, depth: u32, names: &Names, entries: &mut Vec<EntryInfo>) -> io::Result<()> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|e| e.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        // An entry may have gone since the folder was read.
        let Ok(entry) = describe(&path, names) else {
            continue;
        };
        if entries.len() == MAX_ENTRIES {
            return Err(invalid(format!(
                "holds more than {MAX_ENTRIES} entries: list with less depth"
            )));
        }
        let deeper = depth > 1 && !entry.is_symlink && entry.permissions.starts_with('d');
        entries.push(entry);
        if deeper {
            match list_into(&path, depth - 1, names, entries) {
                // A folder that may not be read is listed as such.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound
                    ) => {}
                other => other?,
            }
        }
    }
    Ok(())
}

/// Removes a file, or a folder with all that is in it. What is not there needs no removing.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    if path == Path::new("/") {
        return Err(invalid("the root folder cannot be removed"));
    }
    let removed = match fs::symlink_metadata(path) {
        Ok(m) if m.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Moves as `mv -T` does, across file systems too.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<EntryInfo> {
    fs::symlink_metadata(from)?;
    if let Some(parent) = to.parent() {
        make_folders(parent)?;
    }
    match fs::rename(from, to) {
        Err(e) if e.kind() == io::ErrorKind::CrossesDevices => {
            copy(from, to)?;
            remove(from)?;
        }
        other => other?,
    }
    stat(to)
}

/// Copies with modes, times and, where the user may, owners.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    if metadata.is_dir() {
        match fs::create_dir(to) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && fs::symlink_metadata(to)?.is_dir() => {
                if fs::read_dir(to)?.next().is_some() {
                    return Err(io::Error::from_raw_os_error(libc::ENOTEMPTY));
                }
            }
            other => other?,
        }
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else if metadata.is_symlink() {
        let _ = fs::remove_file(to);
        symlink(fs::read_link(from)?, to)?;
        return Ok(());
    } else if metadata.is_file() {
        fs::copy(from, to)?;
    } else {
        return Err(invalid(format!(
            "{} is neither a file, a folder nor a link",
            from.display()
        )));
    }
    let _ = std::os::unix::fs::lchown(to, Some(metadata.uid()), Some(metadata.gid()));
    fs::set_permissions(to, metadata.permissions())?;
    let times = fs::FileTimes::new()
        .set_accessed(metadata.accessed()?)
        .set_modified(metadata.modified()?);
    fs::File::open(to)?.set_times(times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_listing_goes_as_deep_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b/c")).unwrap();
        fs::write(folder.path().join("a/f"), "").unwrap();
        let names = |depth| {
            list(folder.path(), depth)
                .unwrap()
                .into_iter()
                .map(|e| e.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["a"]);
        assert_eq!(names(1), ["a"]);
        assert_eq!(names(2), ["a", "b", "f"]);
        assert_eq!(names(3), ["a", "b", "c", "f"]);
        assert!(list(&folder.path().join("a/f"), 1).is_err());
    }

    #[test]
    fn a_copy_has_the_modes_times_and_links_of_the_original() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("f"), "text").unwrap();
        fs::set_permissions(from.join("f"), fs::Permissions::from_mode(0o750)).unwrap();
        symlink("f", from.join("l")).unwrap();
        copy(&from, &to).unwrap();
        let (old, new) = (
            fs::metadata(from.join("f")).unwrap(),
            fs::metadata(to.join("f")).unwrap(),
        );
        assert_eq!(new.mode(), old.mode());
        assert_eq!(new.modified().unwrap(), old.modified().unwrap());
        assert_eq!(fs::read_link(to.join("l")).unwrap(), Path::new("f"));
        assert!(
            copy(&from, &to).is_err(),
            "a folder that holds something is not overwritten"
        );
    }

    #[test]
    fn removing_what_is_not_there_is_no_error_but_the_root_stays() {
        let folder = tempfile::tempdir().unwrap();
        remove(&folder.path().join("nothing")).unwrap();
        assert!(remove(Path::new("/")).is_err());
    }
}
