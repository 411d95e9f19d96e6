//! Everything on the root disk as one tar stream, for a home that is to hold the files themselves.
//!
//! Nothing of the box runs meanwhile. What the stream cannot hold is left out: sockets, whose programs are gone.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use dorm_proto::streams::Stream;
use tar::{Builder, EntryType, Header, HeaderMode};
use tokio::io::AsyncWriteExt;

use super::early::mount;
use crate::chunks::ChunkWriter;

/// Where the disk is seen without what is mounted over it.
const DISK: &str = "/run/dorm/disk";
/// Longest target of a link that fits into a header.
const LINK: usize = 100;
/// What ext4 puts on every disk.
const LOST_AND_FOUND: &str = "lost+found";

pub(super) async fn send(stream: &mut Stream) -> io::Result<()> {
    let (mut out, mut chunks) = ChunkWriter::new();
    let packing = tokio::task::spawn_blocking(move || {
        let packed = see_disk().and_then(|()| pack(Path::new(DISK), &mut out));
        if let Err(e) = packed.and_then(|()| out.flush()) {
            out.fail(e);
        }
    });
    let mut failed = None;
    while let Some(chunk) = chunks.recv().await {
        match chunk {
            Ok(chunk) => {
                let length = u32::try_from(chunk.len()).map_err(io::Error::other)?;
                stream.write_u32(length).await?;
                stream.write_all(&chunk).await?;
            }
            Err(e) => failed = Some(e),
        }
    }
    stream.write_u32(0).await?;
    packing.await.map_err(io::Error::other)?;
    failed.map_or(Ok(()), Err)
}

fn see_disk() -> io::Result<()> {
    match fs::create_dir(DISK) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
        Ok(()) => mount("/", DISK, "", libc::MS_BIND, ""),
    }
}

fn pack(root: &Path, out: impl Write) -> io::Result<()> {
    let mut builder = Builder::new(out);
    builder.mode(HeaderMode::Complete);
    builder.follow_symlinks(false);
    let mut packing = Packing {
        builder,
        linked: HashMap::new(),
    };
    packing.entry(root, Path::new(""))?;
    // Not by recursion: how deep folders lie within each other is for the box to say.
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<_> = fs::read_dir(root.join(&folder))?.collect::<Result<_, _>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = folder.join(entry.file_name());
            if name == Path::new(LOST_AND_FOUND) && is_empty_folder(&entry.path()) {
                continue;
            }
            let with_path = |e: io::Error| io::Error::new(e.kind(), format!("/{}: {e}", name.display()));
            if packing.entry(&entry.path(), &name).map_err(with_path)? {
                folders.push(name);
            }
        }
    }
    packing.builder.finish()
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

struct Packing<W: Write> {
    builder: Builder<W>,
    /// The first name of each file that has several.
    linked: HashMap<u64, PathBuf>,
}

impl<W: Write> Packing<W> {
    /// Whether it is a folder, whose entries are still to come.
    fn entry(&mut self, source: &Path, name: &Path) -> io::Result<bool> {
        let found = fs::symlink_metadata(source)?;
        let kind = found.file_type();
        if kind.is_socket() {
            return Ok(false);
        }
        let mut header = Header::new_gnu();
        header.set_metadata(&found);
        header.set_size(0);
        if !kind.is_dir() && found.nlink() > 1 {
            if let Some(first) = self.linked.get(&found.ino()) {
                header.set_entry_type(EntryType::Link);
                self.builder.append_link(&mut header, name, first)?;
                return Ok(false);
            }
            self.linked.insert(found.ino(), name.to_owned());
        }
        let mut records = vec![("mtime".to_owned(), time(&found).into_bytes())];
        for (name, value) in attributes(source)? {
            records.push((format!("SCHILY.xattr.{name}"), value));
        }
        if kind.is_symlink() {
            let target = fs::read_link(source)?;
            let target = target.as_os_str().as_bytes();
            if target.len() > LINK {
                records.push(("linkpath".to_owned(), target.to_vec()));
            } else {
                header.set_link_name_literal(target)?;
            }
        }
        // The root has no name that a header could hold.
        let name = match name.as_os_str().is_empty() {
            true => {
                records.push(("path".to_owned(), b"./".to_vec()));
                Path::new("root")
            }
            false => name,
        };
        let records = records
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_slice()));
        self.builder.append_pax_extensions(records)?;
        if kind.is_file() {
            // With its holes.
            self.builder.append_file(name, &mut File::open(source)?)?;
        } else {
            self.builder.append_data(&mut header, name, io::empty())?;
        }
        Ok(kind.is_dir())
    }
}

fn time(found: &Metadata) -> String {
    format!("{}.{:09}", found.mtime(), found.mtime_nsec())
}

/// The extended attributes of a file, links not followed.
fn attributes(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends in a zero byte, and the kernel writes no more than the buffer holds.
    let names =
        sized(|buffer| unsafe { libc::llistxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) })?;
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let (Ok(text), Ok(name)) = (str::from_utf8(name), CString::new(name)) else {
            continue;
        };
        let read = sized(|buffer| {
            // SAFETY: both strings end in a zero byte, and the kernel writes no more than the buffer holds.
            unsafe {
                libc::lgetxattr(
                    path.as_ptr(),
                    name.as_ptr(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                )
            }
        });
        found.push((text.to_owned(), read?));
    }
    Ok(found)
}

/// What a call gives that tells the size of its answer when it is given no room.
fn sized(call: impl Fn(&mut [u8]) -> libc::ssize_t) -> io::Result<Vec<u8>> {
    let length = |answer: libc::ssize_t| usize::try_from(answer).map_err(|_| io::Error::last_os_error());
    let size = match length(call(&mut [])) {
        Err(e) if e.raw_os_error() == Some(libc::ENOTSUP) => 0,
        size => size?,
    };
    let mut buffer = vec![0; size];
    if size > 0 {
        let written = length(call(&mut buffer))?;
        buffer.truncate(written);
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn an_archive_has_links_holes_times_and_modes() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("lost+found")).unwrap();
        fs::create_dir_all(at("a/.wh.b")).unwrap();
        fs::write(at("a/file"), "text").unwrap();
        fs::set_permissions(at("a/file"), fs::Permissions::from_mode(0o4751)).unwrap();
        fs::hard_link(at("a/file"), at("a/other")).unwrap();
        symlink(".//a/../strange", at("link")).unwrap();
        symlink("x".repeat(300), at("long")).unwrap();
        File::create(at("holes")).unwrap().set_len(1 << 40).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();

        let mut bytes = Vec::new();
        pack(root.path(), &mut bytes).unwrap();
        assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut seen = HashMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let header = entry.header().clone();
            let target = entry
                .link_name_bytes()
                .map(|target| String::from_utf8_lossy(&target).into_owned());
            let mut text = Vec::new();
            (&mut entry).take(10).read_to_end(&mut text).unwrap();
            seen.insert(
                name,
                (
                    header.entry_type(),
                    header.mode().unwrap(),
                    entry.size(),
                    target,
                    text,
                ),
            );
        }
        let mut names: Vec<_> = seen.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["./", "a", "a/.wh.b", "a/file", "a/other", "holes", "link", "long"]
        );
        let (kind, mode, size, _, text) = &seen["a/file"];
        assert_eq!(
            (*kind, mode & 0o7777, *size, &text[..]),
            (EntryType::Regular, 0o4751, 4, &b"text"[..])
        );
        assert_eq!(
            (seen["a/other"].0, seen["a/other"].3.as_deref()),
            (EntryType::Link, Some("a/file"))
        );
        assert_eq!(seen["link"].3.as_deref(), Some(".//a/../strange"));
        assert_eq!(seen["long"].3.as_deref(), Some(&*"x".repeat(300)));
        assert_eq!(
            (seen["holes"].0, seen["holes"].2),
            (EntryType::GNUSparse, 1 << 40)
        );
    }
}
