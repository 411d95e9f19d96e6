//! A disk with an ext4 file system of everything in a home, made by a process that has nothing but that home and that disk.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use dorm_sys::mount::{Detached, NODEV, NOEXEC, NOSUID, RDONLY};
use serde::{Deserialize, Serialize};

use super::launcher::unexpected;
use super::machine::{DEVICES, DISK, FILES, make_root, shared, shared_mounts};
use super::{Failure, Job, Report, Spec, Step, Volume, bind, errand, report};

const PROGRAM: &str = "/usr/sbin/mke2fs";
/// What a file system has beside the files, at the least.
const ROOM: u64 = 256 << 20;
const BYTES_PER_INODE: u64 = 16 << 10;
/// How long a disk may take to be made: others that start for the first time wait for it.
const MADE_WITHIN: Duration = Duration::from_secs(900);

/// What mke2fs says where there is no room.
const FULL: [&str; 2] = ["No space left", "Disk quota exceeded"];

/// What a disk is made with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MakeDisk {
    program: PathBuf,
}

impl MakeDisk {
    /// What the process sees of the host, in the order in which it is mounted, beside the home. Nothing of it can be written.
    pub(super) fn bind_mounts(&self) -> io::Result<Vec<Detached>> {
        let mut mounts = vec![bind(&self.program, RDONLY | NOSUID | NODEV, NOEXEC)?];
        mounts.extend(shared_mounts()?);
        Ok(mounts)
    }

    /// The confined process: `mounts` are the files, those above, and the disk.
    pub(super) fn make(&self, mounts: Vec<Detached>) -> Result<(), Failure> {
        let places = [FILES, PROGRAM]
            .into_iter()
            .chain(DEVICES)
            .chain(shared())
            .chain([DISK]);
        make_root(places.zip(mounts))?;
        let weight = weigh(Path::new(FILES)).step("measure the files")?;
        let bytes = weight.bytes + weight.bytes / 4 + ROOM;
        let megabytes = bytes.div_ceil(1 << 20);
        // As many as usual, of which a larger disk has more later; and enough for what is there.
        let inodes = (bytes / BYTES_PER_INODE).max(weight.entries + weight.entries / 3 + 16_384);
        let made = Command::new(PROGRAM)
            .args([
                "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-J", "size=16", "-N",
            ])
            .arg(inodes.to_string())
            .args(["-d", FILES, DISK])
            .arg(format!("{megabytes}M"))
            .env_clear()
            .stdin(Stdio::null())
            .output()
            .step("start mke2fs")?;
        report(&match made.status.success() {
            true => Report::DiskMade,
            false => {
                let text = String::from_utf8_lossy(&made.stderr);
                let last = text.trim().lines().last().unwrap_or("it failed");
                match FULL.iter().any(|words| text.contains(words)) {
                    true => Report::Full,
                    false => Report::Failed(format!("mke2fs: {last}")),
                }
            }
        });
        Ok(())
    }
}

/// The daemon's side: makes `disk`, an empty file, a disk of everything in `files`, where nothing runs. It is on disk when this
/// returns. The guest makes it larger.
pub(crate) async fn make_disk(launcher: &Path, files: &Path, uid_base: u32, disk: &Path) -> io::Result<()> {
    let spec = Spec {
        home: files.to_owned(),
        uid_base,
        volumes: vec![Volume {
            source: disk.to_owned(),
            at: DISK.to_owned(),
        }],
        job: Job::MakeDisk(MakeDisk { program: find()? }),
    };
    match errand::run(launcher, &spec, Stdio::null(), Some(MADE_WITHIN)).await? {
        Report::DiskMade => {}
        Report::Full => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        other => return Err(unexpected(&other)),
    }
    let disk = fs::File::open(disk)?;
    let synced = tokio::task::spawn_blocking(move || disk.sync_all()).await;
    synced.map_err(io::Error::other)?
}

fn find() -> io::Result<PathBuf> {
    let places = [
        PROGRAM,
        "/sbin/mke2fs",
        "/usr/bin/mke2fs",
        "/usr/local/sbin/mke2fs",
    ];
    let found = places
        .into_iter()
        .map(PathBuf::from)
        .find(|place| place.is_file());
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no mke2fs (package e2fsprogs)"))
}

struct Weight {
    bytes: u64,
    entries: u64,
}

/// What the files below `folder` take as blocks; of one with holes, what it has beside them. No link is followed.
fn weigh(folder: &Path) -> io::Result<Weight> {
    let mut folders = vec![folder.to_owned()];
    let mut weight = Weight { bytes: 0, entries: 0 };
    let mut linked = HashSet::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let found = entry.metadata()?;
            // For its name, and its inode.
            weight.bytes += 512;
            if found.is_dir() {
                weight.bytes += 4096;
                folders.push(entry.path());
            } else if found.nlink() > 1 && !linked.insert((found.dev(), found.ino())) {
                continue;
            }
            weight.bytes += (found.blocks() * 512).next_multiple_of(4096);
            weight.entries += 1;
        }
    }
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn holes_and_other_names_of_a_file_weigh_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let holes = File::create(folder.path().join("holes")).unwrap();
        holes.set_len(1 << 40).unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        let file = folder.path().join("below/file");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        File::open(&file).unwrap().sync_all().unwrap();
        for name in 0..100 {
            fs::hard_link(&file, folder.path().join(name.to_string())).unwrap();
        }
        let weight = weigh(folder.path()).unwrap();
        assert!((1 << 20..3 << 20).contains(&weight.bytes), "{}", weight.bytes);
        assert_eq!(weight.entries, 3);
    }
}
