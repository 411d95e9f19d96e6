//! Memory images: made of a frozen box, and turned into a running one.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::num::NonZero;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use dorm_sys::btrfs;
use dorm_sys::cgroup::{Group, GroupLimits};
use dorm_sys::process::Process;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::Signal;

use super::Container;
use super::spare::Spares;
use crate::criu::manifest::{Manifest, Pages, Unusable};
use crate::criu::{Criu, LENT, Talk};
use crate::engines::Kind as _;
use crate::home::Room;
use crate::host::image::{Still, Unfinished};
use crate::host::large_pages::LargePages;
use crate::host::{LiveBox, ended, netns_of, record_of};
use crate::launch::{self, Job};
use crate::network::Owned;
use crate::{BoxRecord, BoxSpec, Dumped, EngineError, Isolation, MemoryImage, Result};

/// How long a box goes on whose state of the moment cannot be saved: twice as long each time, up to the last.
const MOMENT: Duration = Duration::from_millis(50);
const LAST_MOMENT: Duration = Duration::from_millis(1600);
/// What is left to do when a box is back, until whoever waits for it knows.
const TOLD_WITHIN: Duration = Duration::from_millis(5);
/// How long a process that was killed may take to be gone.
const REAPED_WITHIN: Duration = Duration::from_secs(1);
/// Open files of a box that are looked at, which chooses how many it has. It takes a second or two, in which nothing of it runs.
const MOST_FILES: usize = 1 << 18;

/// Whether what keeps the memory from being saved will not be so a moment later: a connection that its other end gave up before
/// anybody accepted it, a process between two identities, or one that is starting another.
fn passes(reason: &str) -> bool {
    ["in-flight socket", "/ns/net: Permission denied", LENT]
        .iter()
        .any(|passing| reason.contains(passing))
}

impl Container {
    /// The reason why not, in words.
    pub(super) fn usable_criu(&self) -> Result<&Criu, String> {
        let criu = self.criu.as_ref().map_err(Clone::clone)?;
        criu.still_there().map(|()| criu)
    }

    fn criu_spares(&self) -> Result<&Arc<Spares>> {
        let none = || EngineError::CannotCheckpoint("there is no criu".to_owned());
        self.criu_spares.as_ref().ok_or_else(none)
    }

    fn criu(&self) -> Result<&Criu> {
        self.usable_criu().map_err(EngineError::CannotCheckpoint)
    }

    pub(super) async fn dump_box(&self, live: &LiveBox, image: &Path, room: &mut Room) -> Result<Dumped> {
        let criu = self.criu()?;
        let failed = || EngineError::io("cannot write the memory image");
        let home = self.host.pool.home_path(&live.id);
        // Of an image that was given up before the box went on. They would be in the way of the same ones.
        crate::criu::forget(&home, &live.take_names());
        let began = Instant::now();
        let (mut moment, mut talk) = (MOMENT, Talk::Errors);
        let (unfinished, names) = loop {
            let unfinished = Unfinished::make(image).map_err(failed())?;
            let (launcher, pid) = (&self.host.launcher, live.process.pid);
            let volumes: Vec<String> = live.volumes.iter().map(|volume| volume.path.clone()).collect();
            let dumped = criu.dump(
                launcher,
                pid,
                &live.group,
                &home,
                &volumes,
                &unfinished.0,
                talk,
                room.used_up(),
            );
            let error = match dumped.await {
                Ok(names) => break (unfinished, names),
                Err(error) => error,
            };
            let home = home.clone();
            let removed = tokio::task::spawn_blocking(move || {
                // A CRIU that was killed may have left names.
                crate::criu::release(&home, &unfinished.0);
            });
            let _ = removed.await;
            match error {
                EngineError::CannotCheckpoint(reason) if moment <= LAST_MOMENT && passes(&reason) => {
                    tracing::debug!(id = %live.id, reason, "the box goes on for a moment");
                    live.thaw()?;
                    tokio::time::sleep(moment).await;
                    moment *= 2;
                    live.freeze().await?;
                    // In which it may have grown.
                    room.keep(self.image_size(live)).await?;
                }
                // Once more, to hear which process it is.
                EngineError::CannotCheckpoint(_) if talk == Talk::Errors => talk = Talk::Steps,
                error => return Err(error),
            }
        };
        let mut unsealed = Unsealed {
            names: live.note_names(names),
            home,
            unfinished,
        };
        tracing::debug!(id = %live.id, took = ?began.elapsed(), "memory read");
        let (id, image, version) = (live.id.clone(), image.to_owned(), criu.version.clone());
        let (guest_hash, uid_base) = (live.guest_hash.clone(), live.uid_base);
        Ok(Dumped::new(async move {
            let began = Instant::now();
            let committed =
                tokio::task::spawn_blocking(move || unsealed.seal(&image, &guest_hash, uid_base, &version));
            let committed = committed
                .await
                .unwrap_or_else(|e| Err(io::Error::other(e)))
                .map_err(failed());
            tracing::debug!(%id, took = ?began.elapsed(), "memory image on disk");
            committed
        }))
    }

    pub(super) async fn restore_box(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        let criu = self.criu()?;
        let (manifest, pages) = {
            let image = image.to_owned();
            let opened = tokio::task::spawn_blocking(move || Manifest::open(&image)).await;
            opened
                .unwrap_or_else(|e| Err(e.into()))
                .map_err(Unusable::into_error)?
        };
        let guest = self.host.guest_in(&manifest, spec)?;
        let attempt = async |pages: Pages, in_large_pages: bool| {
            if Still::is_marked(image) {
                let (home, image) = (self.host.pool.home_path(&spec.id), image.to_owned());
                let laid = tokio::task::spawn_blocking(move || crate::criu::lay_ghosts(&home, &image));
                let _ = laid.await;
            }
            Still::mark(image).map_err(EngineError::io("cannot mark the memory image as untouched"))?;
            let work = tempfile::Builder::new()
                .prefix("restore-")
                .tempdir_in(&self.host.work);
            let work = work.map_err(EngineError::io("cannot make a directory for criu"))?;
            let (check, hash) = (Check::begin(pages), &manifest.guest_hash);
            let come = self.bring_back(
                criu,
                spec,
                hash,
                guest.clone(),
                image,
                work.path(),
                check,
                in_large_pages,
            );
            self.host.occupy(spec, come).await
        };
        let has_room = manifest.size() <= spec.limits.memory / 2;
        let restored = match attempt(pages.clone(), has_room).await {
            Err(EngineError::Io { source, .. })
                if has_room && source.kind() == ErrorKind::OutOfMemory && Still::is_marked(image) =>
            {
                attempt(pages, false).await
            }
            restored => restored,
        };
        // A launcher that starts takes a core, and who waits for a wake is in a hurry.
        self.all_spares().for_each(|spares| spares.refill_in(TOLD_WITHIN));
        restored
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "they have one thing in common, this call"
    )]
    async fn bring_back(
        &self,
        criu: &Criu,
        spec: &BoxSpec,
        guest_hash: &str,
        guest: PathBuf,
        image: &Path,
        work: &Path,
        mut check: Check,
        in_large_pages: bool,
    ) -> Result<(LiveBox, BoxRecord)> {
        let began = Instant::now();
        let (limits, volumes) = (
            self.host.group_limits(&spec.limits)?,
            self.host.volumes(&spec.volumes)?,
        );
        let (mut waiting, hand) = tokio::try_join!(self.criu_spares()?.take(), self.spares.take())?;
        let (group, join) = waiting.claim(&self.host.cgroups, &spec.id, &with_room(&limits))?;
        let waiting = waiting.launcher;
        let launch = launch::Spec {
            home: self.host.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes,
            job: Job::Stage {
                criu: waiting.pid(),
                guest,
                join,
            },
        };
        let network = &self.host.network;
        let staged = hand.launcher.stage(&launch).await;
        tokio::spawn(hand.end());
        let mut first = None;
        let restored = async {
            staged.map_err(EngineError::io("cannot start criu"))?;
            let started = began.elapsed();
            let restoring = criu.restore(&waiting.socket, &launch.volumes, image, work).await?;
            let policy = network.apply(&spec.id, spec.slot, &spec.network);
            let (pid, ()) = tokio::try_join!(restoring.namespaces(), policy)?;
            first = Process::open(pid).ok();
            let namespaces = began.elapsed();
            let netns = dorm_sys::namespace::open(pid, "net")
                .map_err(EngineError::io("cannot open the box's network"))?;
            let netns = Arc::new(netns);
            network.connect(&spec.id, spec.slot, &netns, Owned::Every).await?;
            let connected = began.elapsed();
            match in_large_pages {
                true => within_moment(restoring.memory()).await?,
                false => restoring.memory().await?,
            }
            let memory = began.elapsed();
            // Nothing of the box has run yet.
            if let Err(why) = check.verdict().await {
                restoring.give_up().await;
                return Err(why.into_error());
            }
            if in_large_pages && fills(&group, &limits) {
                restoring.give_up().await;
                return Err(too_large());
            }
            let checked = began.elapsed();
            network.inside().disown_others(netns).await?;
            renew(pid, &spec.hostname).map_err(EngineError::io("cannot give the box its identity"))?;
            // All of its processes are there. What they may take of memory has to wait until CRIU's is gone.
            let limited = group
                .limit_processes(limits.pids)
                .and_then(|()| group.limit_processors(limits.cpu_millis));
            limited.map_err(EngineError::io("cannot give the box its limits"))?;
            // The last step before it runs: a daemon that dies earlier takes CRIU, and with it the box, along.
            Still::unmark(image).map_err(EngineError::io("cannot mark the memory image as used"))?;
            let restored = restoring.finish().await;
            tracing::debug!(id = %spec.id, ?started, ?namespaces, ?connected, ?memory, ?checked, done = ?began.elapsed(), "restored");
            restored
        }
        .await;
        // It is a member of the box's group.
        waiting.end().await;
        let restored = match restored {
            Ok(restored) => restored,
            Err(error) => {
                // It is a child of the daemon's, and CRIU has ended it.
                if let Some(first) = first {
                    let _ = tokio::time::timeout(REAPED_WITHIN, ended(&first)).await;
                }
                if in_large_pages && group.stats().is_ok_and(|stats| stats.oom_kills > 0) {
                    return Err(too_large());
                }
                // Memory that is damaged, or could not be read, explains whatever else went wrong.
                return Err(check.verdict().await.err().map_or(error, Unusable::into_error));
            }
        };
        limit_again(&group, &limits).await;
        let process = Process::open(restored).map_err(EngineError::io("cannot find the restored box"))?;
        let found = netns_of(&process)
            .and_then(|netns| Ok((netns, record_of(Isolation::Container, &process, guest_hash)?)))
            .map_err(EngineError::io("cannot find the restored box"));
        match found {
            Ok((netns, record)) => Ok((LiveBox::new(process, netns, group, spec, &record), record)),
            Err(error) => {
                let _ = process.signal(Signal::KILL);
                ended(&process).await;
                Err(error)
            }
        }
    }
}

/// An image that takes its names along if it is never sealed.
struct Unsealed {
    /// None any more if the box has gone on: the same ones may be another image's by then.
    names: Weak<Vec<PathBuf>>,
    home: PathBuf,
    unfinished: Unfinished,
}

impl Unsealed {
    fn seal(&mut self, image: &Path, guest_hash: &str, uid_base: u32, criu: &str) -> io::Result<MemoryImage> {
        let directory = &self.unfinished.0;
        let _ = fs::remove_file(directory.join("criu.log"));
        let sealed = Manifest::commit(directory, image, guest_hash, uid_base, criu)?;
        self.names = Weak::new();
        Ok(sealed)
    }
}

impl Drop for Unsealed {
    fn drop(&mut self) {
        if let Some(names) = self.names.upgrade() {
            crate::criu::forget(&self.home, &names);
        }
    }
}

/// Bytes on disk of files that the group has open and that have no name any more: CRIU copies them into the image. What is beyond
/// [`MOST_FILES`] is left to whoever looks at the room while it does.
pub(super) fn files_without_names(group: &Group) -> io::Result<u64> {
    let members = group.processes()?.into_iter();
    // One that has ended has none.
    let open = members.filter_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok());
    let mut sizes = BTreeMap::new();
    for link in open.flatten().flatten().take(MOST_FILES) {
        // It leads to the file itself, whatever the box has put in the place of its name.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(link.path(), flags, Mode::empty()) else {
            continue;
        };
        let found = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        // What is in memory alone counts as that.
        if is_file && found.st_nlink == 0 && btrfs::is_btrfs(file.as_fd())? {
            sizes.insert((found.st_dev, found.st_ino), found.st_blocks as u64 * 512);
        }
    }
    Ok(sizes.into_values().sum())
}

/// Has large pages while memory is read; not while a disk is slow, as they are everybody's.
async fn within_moment<T>(reading: impl Future<Output = T>) -> T {
    let mut reading = std::pin::pin!(reading);
    if let Some(large) = LargePages::hold()
        && let Ok(read) = tokio::time::timeout(large.left, &mut reading).await
    {
        return read;
    }
    reading.await
}

/// In large pages, memory takes more of it than it did.
fn too_large() -> EngineError {
    EngineError::io("the box has too little memory for large pages")(ErrorKind::OutOfMemory.into())
}

/// Whether a box that came back in large pages is close to its limit, which it was not when its memory was saved.
fn fills(group: &Group, limits: &GroupLimits) -> bool {
    let taken = group.memory_in_no_file();
    taken.is_ok_and(|taken| limits.memory > 0 && taken > limits.memory / 4 * 3)
}

/// What a box that was at its limits and CRIU, which brings it back within its group, take together. Nothing of the box runs meanwhile.
fn with_room(limits: &GroupLimits) -> GroupLimits {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let all = u32::try_from(processors).unwrap_or(u32::MAX).saturating_mul(1000);
    GroupLimits {
        // Whoever waits for a wake waits for CRIU, whose work is not the box's.
        cpu_millis: limits.cpu_millis.max(all),
        // Processes that have ended but lead a session come back for a moment.
        pids: limits.pids.saturating_mul(2).saturating_add(64),
        memory: limits
            .memory
            .saturating_add(limits.memory / 4)
            .saturating_add(64 << 20),
        ..limits.clone()
    }
}

/// Of a box that is back, and alone in its group.
pub(super) async fn limit_again(group: &Group, limits: &GroupLimits) {
    let (to_limit, limits) = (group.clone(), limits.clone());
    // It waits for memory that is given back.
    let limited = tokio::task::spawn_blocking(move || to_limit.lower(&limits)).await;
    if let Err(error) = limited.unwrap_or_else(|e| Err(io::Error::other(e))) {
        tracing::warn!(%error, ?group, "a box that came back may take more than its limits");
    }
}

/// The comparison of an image's memory with its checksums, while CRIU reads it.
struct Check(Option<tokio::task::JoinHandle<Result<(), Unusable>>>);

impl Check {
    fn begin(pages: Pages) -> Self {
        Self(Some(tokio::task::spawn_blocking(move || pages.verify())))
    }

    /// An error is told once.
    async fn verdict(&mut self) -> Result<(), Unusable> {
        match self.0.take() {
            Some(running) => running.await?,
            None => Ok(()),
        }
    }
}

/// What must not be as it was when the image was made, which several boxes may come from. Nothing runs yet.
fn renew(pid: i32, hostname: &str) -> io::Result<()> {
    let uts = dorm_sys::namespace::open(pid, "uts")?;
    dorm_sys::namespace::set_hostname(uts.as_fd(), hostname)?;
    if let Err(error) = dorm_sys::random::reseed() {
        tracing::warn!(%error, "the random generator cannot be seeded anew");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Saved {
        names: Arc<Vec<PathBuf>>,
        unsealed: Unsealed,
        directory: tempfile::TempDir,
    }

    impl Saved {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let home = directory.path().join("home");
            fs::create_dir(&home).unwrap();
            fs::write(home.join("link_remap.1"), "").unwrap();
            let names = Arc::new(vec![PathBuf::from("link_remap.1")]);
            let unsealed = Unsealed {
                names: Arc::downgrade(&names),
                home,
                unfinished: Unfinished::make(&directory.path().join("image")).unwrap(),
            };
            Self {
                names,
                unsealed,
                directory,
            }
        }

        /// Which there are of the names and the image, once that is sealed or not.
        fn end(self, seal: impl FnOnce(&mut Unsealed, &Path)) -> [bool; 2] {
            let mut unsealed = self.unsealed;
            seal(&mut unsealed, &self.directory.path().join("image"));
            drop(unsealed);
            ["home/link_remap.1", "image"].map(|path| self.directory.path().join(path).exists())
        }
    }

    #[test]
    fn an_image_that_is_not_sealed_leaves_no_names() {
        let seal = |unsealed: &mut Unsealed, image: &Path| unsealed.seal(image, "guest", 0, "criu");
        assert_eq!(Saved::new().end(|_, _| {}), [false, false]);
        let fails = |unsealed: &mut Unsealed, image: &Path| {
            fs::create_dir_all(image.with_file_name("image.new/manifest.json")).unwrap();
            seal(unsealed, image).unwrap_err();
        };
        assert_eq!(Saved::new().end(fails), [false, false]);
        let seals = |unsealed: &mut Unsealed, image: &Path| {
            seal(unsealed, image).unwrap();
        };
        assert_eq!(Saved::new().end(seals), [true, true]);
    }

    #[test]
    fn names_are_another_images_once_the_box_has_gone_on() {
        let mut saved = Saved::new();
        saved.names = Arc::default();
        assert_eq!(saved.end(|_, _| {}), [true, false]);
    }
}
