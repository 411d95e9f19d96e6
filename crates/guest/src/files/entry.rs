//! What is told about a file.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use buffa_types::google::protobuf::Timestamp;
use dorm_proto::filesystem::{EntryInfo, FileType};

use crate::users::Names;

/// Extended attributes under this prefix are a file's metadata.
pub(crate) const METADATA_PREFIX: &str = "user.e2b.";

/// Describes the file at `path`; of a link, the link, with the type and mode of what it leads to.
pub(crate) fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let own = fs::symlink_metadata(path)?;
    let is_symlink = own.file_type().is_symlink();
    let target = if is_symlink {
        fs::metadata(path).ok()
    } else {
        Some(own.clone())
    };
    let symlink_target = is_symlink.then(|| {
        fs::canonicalize(path)
            .or_else(|_| fs::read_link(path))
            .unwrap_or_else(|_| path.to_owned())
            .to_string_lossy()
            .into_owned()
    });
    Ok(EntryInfo {
        name: super::path::name(path),
        r#type: target.as_ref().map_or(FileType::FILE_TYPE_SYMLINK, kind).into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode: target.as_ref().map_or(0, |m| m.mode() & 0o7777),
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or(0),
            ..Default::default()
        }
        .into(),
        symlink_target,
        metadata: if is_symlink {
            Default::default()
        } else {
            metadata(path).into_iter().collect()
        },
        is_symlink,
        ..Default::default()
    })
}

fn kind(metadata: &Metadata) -> FileType {
    if metadata.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else if metadata.is_file() {
        FileType::FILE_TYPE_FILE
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// In the form that E2B's clients are used to: letters for what the file is, then the nine permissions.
fn permissions(metadata: &Metadata) -> String {
    let (kind, mode) = (metadata.file_type(), metadata.mode());
    let flags = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = flags.iter().filter(|(set, _)| *set).map(|(_, c)| *c).collect();
    if text.is_empty() {
        text.push('-');
    }
    text.extend((0..9).map(|i| {
        if mode & (0o400 >> i) != 0 {
            ['r', 'w', 'x'][i % 3]
        } else {
            '-'
        }
    }));
    text
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)
}

/// The file's metadata; none where the file system has no extended attributes.
fn metadata(path: &Path) -> HashMap<String, String> {
    let Ok(path) = c_path(path) else {
        return HashMap::new();
    };
    // SAFETY: both calls get a NUL-terminated path and a buffer with its true length; a size of 0 only asks.
    let list = sized(|buf, len| unsafe { libc::listxattr(path.as_ptr(), buf.cast(), len) });
    list.split(|b| *b == 0)
        .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(METADATA_PREFIX))
        .filter_map(|key| {
            let name = CString::new(format!("{METADATA_PREFIX}{key}")).ok()?;
            // SAFETY: as above.
            let value =
                sized(|buf, len| unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), buf.cast(), len) });
            Some((key.to_owned(), String::from_utf8_lossy(&value).into_owned()))
        })
        .collect()
}

/// Calls once for the size and once for the contents.
fn sized(call: impl Fn(*mut u8, usize) -> isize) -> Vec<u8> {
    let Ok(size @ 1..) = usize::try_from(call(std::ptr::null_mut(), 0)) else {
        return Vec::new();
    };
    let mut buf = vec![0; size];
    let n = usize::try_from(call(buf.as_mut_ptr(), buf.len())).unwrap_or(0);
    buf.truncate(n);
    buf
}

pub(crate) fn set_metadata(path: &Path, key: &str, value: &str) -> io::Result<()> {
    let (path, name) = (c_path(path)?, CString::new(format!("{METADATA_PREFIX}{key}"))?);
    // SAFETY: path and name are NUL-terminated, and the value has its true length.
    let r = unsafe {
        libc::setxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    crate::sys::check(r).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn files_folders_and_links_are_described() {
        let folder = tempfile::tempdir().unwrap();
        let names = Names::read();
        let file = folder.path().join("f");
        fs::write(&file, "12345").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let entry = describe(&file, &names).unwrap();
        assert_eq!((entry.name.as_str(), entry.size, entry.mode), ("f", 5, 0o640));
        assert_eq!(entry.permissions, "-rw-r-----");
        assert_eq!(entry.r#type, FileType::FILE_TYPE_FILE);

        let link = folder.path().join("l");
        symlink("f", &link).unwrap();
        let entry = describe(&link, &names).unwrap();
        assert!(entry.is_symlink && entry.r#type == FileType::FILE_TYPE_FILE);
        assert_eq!(
            entry.symlink_target.as_deref(),
            fs::canonicalize(&file).unwrap().to_str()
        );

        let broken = folder.path().join("b");
        symlink("nowhere", &broken).unwrap();
        let entry = describe(&broken, &names).unwrap();
        assert_eq!(entry.r#type, FileType::FILE_TYPE_SYMLINK);
        assert_eq!(entry.symlink_target.as_deref(), Some("nowhere"));

        let entry = describe(folder.path(), &names).unwrap();
        assert_eq!(entry.r#type, FileType::FILE_TYPE_DIRECTORY);
        assert!(entry.permissions.starts_with('d'));
    }
}
