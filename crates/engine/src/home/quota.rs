//! What an agent may hold on disk.
//!
//! btrfs' simple quotas charge what is written to the subvolume that wrote it, for as long as anything holds it. A rollback
//! gives an agent a new subvolume, while snapshots keep what the old one wrote: so all the homes that an agent
//! ever had are counted in one group, which has the limit. On kernels without simple quotas a group would need a scan of
//! the whole pool for every agent, and the limit is on what the home alone holds.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

use dorm_sys::btrfs::{self, Counted};

use super::machine;
use super::{Filesystem, Pool};
use crate::{EngineError, HomeUsage, Id, Result};

/// Set in the numbers of groups that dorm makes. The pool's filesystem may have others, which are numbered from 0.
const OURS: u64 = 1 << 47;

/// The group of an agent. The number need only be unlike that of others.
fn group(id: &Id) -> u64 {
    let hash = blake3::hash(id.as_str().as_bytes());
    let first = hash.as_bytes().first_chunk::<8>().copied().unwrap_or_default();
    u64::from_le_bytes(first) >> 16 | OURS
}

impl Pool {
    pub(super) fn limit(&self, home: &File, id: &Id, disk: u64) -> io::Result<()> {
        let pool = self.filesystem.directory.as_fd();
        let subvolume = btrfs::subvolume_id(home.as_fd())?;
        let disk = machine::limit_of(home, disk)?;
        if !self.filesystem.counts_simply() {
            return btrfs::limit(pool, Counted::Subvolume(subvolume), disk);
        }
        self.join(subvolume, id)?;
        btrfs::limit(pool, Counted::Group(group(id)), disk)
    }

    /// For a home that is to take the place of one that has a limit: it counts as well, and together they may hold what that
    /// one may. Where homes are counted one by one, it may hold `disk` bytes.
    pub(super) fn limit_beside(&self, home: &File, id: &Id, disk: u64) -> io::Result<()> {
        let subvolume = btrfs::subvolume_id(home.as_fd())?;
        match self.filesystem.counts_simply() {
            true => self.join(subvolume, id),
            false => btrfs::limit(
                self.filesystem.directory.as_fd(),
                Counted::Subvolume(subvolume),
                disk,
            ),
        }
    }

    fn join(&self, subvolume: u64, id: &Id) -> io::Result<()> {
        let pool = self.filesystem.directory.as_fd();
        // Another daemon on the same filesystem may just sweep the group that nobody has joined yet.
        btrfs::join_group(pool, subvolume, group(id))
            .or_else(|_| btrfs::join_group(pool, subvolume, group(id)))
    }

    pub(super) fn measure(&self, id: &Id) -> Result<HomeUsage> {
        // A template shares what it holds with the homes made from it, and may share it with another template.
        let places = [
            (self.home_path(id), "exclusive"),
            (self.template_path(id), "referenced"),
            (self.volume_path(id), "exclusive"),
        ];
        let mut found = None;
        for (path, measure) in places {
            match File::open(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                opened => {
                    found = Some((opened.map_err(EngineError::io("cannot open the home"))?, measure));
                    break;
                }
            }
        }
        let (home, measure) = found.ok_or_else(|| EngineError::NoHome(id.clone()))?;
        let failed = || EngineError::io("cannot measure the home");
        let subvolume = Counted::Subvolume(btrfs::subvolume_id(home.as_fd()).map_err(failed())?);
        let in_group = Counted::Group(group(id));
        let counted = match self.filesystem.count(in_group, "max_exclusive") {
            Ok(_) if measure == "exclusive" => in_group,
            _ => subvolume,
        };
        let read = |name: &str| self.filesystem.count(counted, name).map_err(failed());
        // What a machine can hold is the size of its disk.
        let limit = match machine::disk_size(&home).map_err(failed())? {
            Some(size) => size,
            None => read("max_exclusive")?,
        };
        Ok(HomeUsage {
            used: read(measure)?,
            limit,
        })
    }

    /// Removes groups that count nothing any more.
    pub(super) fn sweep_groups(&self) {
        for entry in fs::read_dir(self.filesystem.counts())
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let number = name
                .to_str()
                .and_then(|name| name.strip_prefix("1_")?.parse().ok());
            if let Some(number) = number {
                // One with members stays, and is somebody's.
                let _ = btrfs::remove_group(self.filesystem.directory.as_fd(), number);
            }
        }
    }
}

impl Filesystem {
    fn counts(&self) -> String {
        format!("/sys/fs/btrfs/{}/qgroups", self.uuid)
    }

    fn counts_simply(&self) -> bool {
        fs::read_to_string(format!("{}/mode", self.counts())).is_ok_and(|mode| mode.trim() == "squota")
    }

    fn count(&self, of: Counted, name: &str) -> io::Result<u64> {
        let text = fs::read_to_string(format!("{}/{}/{name}", self.counts(), of.directory()))?;
        text.trim().parse().map_err(io::Error::other)
    }
}
