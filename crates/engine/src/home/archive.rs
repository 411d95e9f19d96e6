//! Templates as single files: a btrfs send stream, compressed with zstd.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};

use dorm_sys::btrfs;

use super::Filesystem;
use crate::{EngineError, Result};

const LEVEL: i32 = 3;

pub(super) async fn export(template: &Path, to: &Path) -> Result<()> {
    let (template, to) = (template.to_owned(), to.to_owned());
    blocking(move || {
        let mut send = btrfs_command("send")
            .arg("--quiet")
            .arg(&template)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stream = send.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut encoder = zstd::Encoder::new(File::create(&to)?, LEVEL)?;
        io::copy(&mut stream, &mut encoder)?;
        encoder.finish()?.sync_all()?;
        succeeded(send)
    })
    .await
    .map_err(EngineError::io("cannot export the template"))
}

/// Receives into the new directory `incoming`, and makes `target` of it when it is whole.
pub(super) async fn receive(from: &Path, incoming: &Path, target: &Path) -> Result<()> {
    let (from, incoming, target) = (from.to_owned(), incoming.to_owned(), target.to_owned());
    blocking(move || {
        fs::create_dir(&incoming)?;
        let mut receive = btrfs_command("receive")
            .arg("--quiet")
            .arg(&incoming)
            .stdin(Stdio::piped())
            .spawn()?;
        let mut stream = receive.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let copied = io::copy(&mut zstd::Decoder::new(File::open(&from)?)?, &mut stream);
        drop(stream);
        succeeded(receive)?;
        copied?;
        let received = fs::read_dir(&incoming)?
            .next()
            .ok_or(io::ErrorKind::UnexpectedEof)??;
        // Moved while writable, since a read-only subvolume stays in its directory.
        let subvolume = File::open(received.path())?;
        btrfs::set_read_only(subvolume.as_fd(), false)?;
        fs::rename(received.path(), &target)?;
        btrfs::set_read_only(subvolume.as_fd(), true)?;
        btrfs::sync(&subvolume)
    })
    .await
    .map_err(EngineError::io("cannot import the template"))
}

/// Removes what is left of a reception.
pub(super) fn discard(filesystem: &Filesystem, incoming: &Path) {
    debug_assert!(incoming.starts_with(&filesystem.root));
    let Ok(directory) = File::open(incoming) else {
        return;
    };
    for entry in fs::read_dir(incoming).into_iter().flatten().flatten() {
        let _ = btrfs::delete_subvolume(directory.as_fd(), OsStr::new(&entry.file_name()));
    }
    let _ = fs::remove_dir(incoming);
}

fn btrfs_command(verb: &str) -> Command {
    let mut command = Command::new("btrfs");
    command
        .arg(verb)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn succeeded(child: std::process::Child) -> io::Result<()> {
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(
        String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    ))
}

async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}
