//! Files and folders as byte streams: local files as request bodies, folders as tar, answers to disk.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bytes::{Bytes, BytesMut};
use futures_util::{Stream, TryStreamExt};
use hyper::body::Incoming;
use indicatif::ProgressBar;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::{ReaderStream, StreamReader, SyncIoBridge};

use crate::client::guest::chunks;
use crate::client::{Body, streamed};

const CHUNK: usize = 256 << 10;

fn counted(
    chunks: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    bar: ProgressBar,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    chunks.inspect_ok(move |chunk| bar.inc(chunk.len() as u64))
}

/// Whatever can be read, as a request body.
pub(crate) fn reader_body(reader: impl tokio::io::AsyncRead + Send + 'static, bar: ProgressBar) -> Body {
    streamed(counted(ReaderStream::with_capacity(reader, CHUNK), bar))
}

/// An answer's body, written to `to`.
pub(crate) async fn write_to(
    body: Incoming,
    to: &mut (impl tokio::io::AsyncWrite + Unpin),
    bar: &ProgressBar,
) -> io::Result<u64> {
    let mut reader = StreamReader::new(Box::pin(counted(chunks(body), bar.clone())));
    let copied = tokio::io::copy_buf(&mut reader, to).await?;
    tokio::io::AsyncWriteExt::flush(to).await?;
    Ok(copied)
}

/// The folder `directory` as a tar stream, packed while it is sent. Symlinks stay symlinks.
pub(crate) fn pack(directory: PathBuf, bar: ProgressBar) -> Body {
    let (sender, receiver) = mpsc::channel(8);
    tokio::task::spawn_blocking(move || {
        let failed = sender.clone();
        if let Err(e) = write_tar(
            &directory,
            Chunks {
                sender,
                buffer: BytesMut::with_capacity(CHUNK),
            },
        ) {
            // Nobody listens any more if the request failed; it reports that itself.
            let _ = failed.blocking_send(Err(e));
        }
    });
    streamed(counted(ReceiverStream::new(receiver), bar))
}

fn write_tar(directory: &Path, to: impl Write) -> io::Result<()> {
    let mut tar = tar::Builder::new(to);
    tar.follow_symlinks(false);
    tar.sparse(false);
    tar.append_dir_all(".", directory)?;
    tar.into_inner()?.flush()
}

/// Gathers writes into chunks for a request body.
struct Chunks {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: BytesMut,
}

impl Write for Chunks {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(data);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = self.buffer.split().freeze();
        self.sender
            .blocking_send(Ok(chunk))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Unpacks the tar stream of an answer in `target`, which is made if it is not there.
pub(crate) async fn unpack(body: Incoming, target: PathBuf, bar: &ProgressBar) -> Result<()> {
    let reader = StreamReader::new(Box::pin(counted(chunks(body), bar.clone())));
    let mut reader = SyncIoBridge::new(reader);
    tokio::task::spawn_blocking(move || {
        read_tar(&mut reader, &target)?;
        // The end of the stream tells whether the sender got to its own end.
        io::copy(&mut reader, &mut io::sink()).context("the folder arrived in part only")?;
        Ok(())
    })
    .await?
}

/// Files from a box are not trusted: nothing is written outside of `target`, no device is made, and no
/// file gets the right to act as its owner.
fn read_tar(reader: impl io::Read, target: &Path) -> Result<()> {
    std::fs::create_dir_all(target).with_context(|| format!("cannot make {}", target.display()))?;
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_mask(0o7000);
    // A folder's own mode and time come last, so that files can still be put into it.
    let mut folders = Vec::new();
    for entry in archive.entries().context("the folder arrived in part only")? {
        let mut entry = entry.context("the folder arrived in part only")?;
        let kind = entry.header().entry_type();
        if kind.is_dir() {
            folders.push(entry);
        } else if kind.is_file()
            || kind.is_symlink()
            || kind.is_hard_link()
            || kind.is_gnu_sparse()
            || kind.is_contiguous()
        {
            place(&mut entry, target)?;
        } else {
            eprintln!(
                "skipped {}: neither file, folder nor link",
                String::from_utf8_lossy(&entry.path_bytes())
            );
        }
    }
    folders.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    folders.iter_mut().try_for_each(|folder| place(folder, target))
}

fn place(entry: &mut tar::Entry<'_, impl io::Read>, target: &Path) -> Result<()> {
    let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    if !entry
        .unpack_in(target)
        .with_context(|| format!("cannot write {path}"))?
    {
        bail!("refused {path}: it leads out of {}", target.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn archive(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        build(&mut builder);
        builder.into_inner().unwrap()
    }

    /// A header as a hostile box would write it: the crate itself refuses to make such names.
    fn raw(
        builder: &mut tar::Builder<Vec<u8>>,
        name: &str,
        kind: tar::EntryType,
        link: &str,
        mode: u32,
        data: &[u8],
    ) {
        let mut header = tar::Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(data.len() as u64);
        header.set_mode(mode);
        header.set_cksum();
        builder.append(&header, data).unwrap();
    }

    #[test]
    fn a_folder_comes_back_as_it_went() {
        let from = tempfile::tempdir().unwrap();
        let to = tempfile::tempdir().unwrap();
        std::fs::create_dir(from.path().join("sub")).unwrap();
        std::fs::write(from.path().join("sub/tool"), "#!/bin/sh").unwrap();
        std::fs::set_permissions(from.path().join("sub/tool"), PermissionsExt::from_mode(0o750)).unwrap();
        std::fs::set_permissions(from.path().join("sub"), PermissionsExt::from_mode(0o555)).unwrap();
        symlink("nowhere/at all", from.path().join("link")).unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        std::fs::File::open(from.path().join("sub/tool"))
            .unwrap()
            .set_modified(old)
            .unwrap();

        let mut bytes = Vec::new();
        write_tar(from.path(), &mut bytes).unwrap();
        let target = to.path().join("made");
        read_tar(bytes.as_slice(), &target).unwrap();

        let tool = std::fs::metadata(target.join("sub/tool")).unwrap();
        assert_eq!(
            (tool.permissions().mode() & 0o7777, tool.modified().unwrap()),
            (0o750, old)
        );
        assert_eq!(
            std::fs::metadata(target.join("sub"))
                .unwrap()
                .permissions()
                .mode()
                & 0o7777,
            0o555
        );
        assert_eq!(
            std::fs::read_link(target.join("link")).unwrap(),
            Path::new("nowhere/at all")
        );
    }

    #[test]
    fn an_archive_cannot_write_outside_its_target() {
        use tar::EntryType as T;
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("victim");
        let absolute = outside.path().to_str().unwrap();
        for (what, bytes) in [
            (
                "a climbing name",
                archive(|b| raw(b, "../victim", T::Regular, "", 0o644, b"x")),
            ),
            (
                "a name below a symlink",
                archive(|b| {
                    raw(b, "out", T::Symlink, absolute, 0o777, b"");
                    raw(b, "out/victim", T::Regular, "", 0o644, b"x");
                }),
            ),
            (
                "a folder below a symlink",
                archive(|b| {
                    raw(b, "out", T::Symlink, absolute, 0o777, b"");
                    raw(b, "out/victim/", T::Directory, "", 0o755, b"");
                }),
            ),
        ] {
            let target = outside.path().join("target");
            std::fs::create_dir(&target).unwrap();
            assert!(read_tar(bytes.as_slice(), &target).is_err(), "{what} was taken");
            assert!(!victim.exists(), "{what} got out");
            std::fs::remove_dir_all(&target).unwrap();
        }
    }

    #[test]
    fn an_absolute_name_stays_inside() {
        let target = tempfile::tempdir().unwrap();
        let bytes = archive(|b| raw(b, "/etc/inside", tar::EntryType::Regular, "", 0o644, b"x"));
        read_tar(bytes.as_slice(), target.path()).unwrap();
        assert!(target.path().join("etc/inside").exists());
    }

    #[test]
    fn setuid_does_not_leave_a_box() {
        let target = tempfile::tempdir().unwrap();
        let bytes = archive(|b| raw(b, "su", tar::EntryType::Regular, "", 0o4755, b"x"));
        read_tar(bytes.as_slice(), target.path()).unwrap();
        let mode = std::fs::metadata(target.path().join("su"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755);
    }
}
