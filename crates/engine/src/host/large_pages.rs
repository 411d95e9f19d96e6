//! Larger pages while memory comes back from disk.
//!
//! Most of what that takes is the kernel's, which makes 4 KiB after 4 KiB, each at a fault of its own. In pieces of 64 KiB it takes a third of
//! the time. Whether memory is made in such pieces is a setting of the whole machine, usually off, and CRIU cannot ask for them. So
//! they are on for as long as CRIU reads memory, which is a fraction of a second, and off again then.
//!
//! Who has them on holds a lock on a file that says what the setting was, so that several daemons do not undo each other's, and what one
//! leaves that is killed is put in order by the next.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;

/// Of all sizes. `never` there means that nobody is to have any, `always` that everybody has even larger ones.
const ALL: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
/// Kernels before 6.8 do not have it.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled";
const NOTE: &str = "/run/dorm.large-pages";
const ON: &str = "always";
/// Enough for some gigabytes that are in the page cache.
const LONGEST: Duration = Duration::from_secs(2);

/// Large pages, until this is dropped.
#[derive(Debug)]
pub(crate) struct LargePages {
    note: File,
    setting: PathBuf,
    /// For how long they may be on. Whoever joins others has no longer than these.
    pub(crate) left: Duration,
}

impl LargePages {
    /// `None` where there are none, or where whoever runs this machine has chosen.
    pub(crate) fn hold() -> Option<Self> {
        if chosen(Path::new(ALL)).ok()? != "madvise" {
            return None;
        }
        Self::hold_by(Path::new(SETTING), Path::new(NOTE)).ok()
    }

    fn hold_by(setting: &Path, note: &Path) -> io::Result<Self> {
        let mut held = Self {
            note: open(note)?,
            setting: setting.to_owned(),
            left: LONGEST,
        };
        rustix::fs::flock(&held.note, FlockOperation::LockShared)?;
        let before = chosen(setting)?;
        if before == ON {
            held.left = held.time_left()?;
            return Ok(held);
        }
        // At no moment is there no word of what it was.
        held.note.write_all(before.as_bytes())?;
        held.note.set_len(before.len() as u64)?;
        if let Err(error) = fs::write(setting, ON) {
            held.note.set_len(0)?;
            return Err(error);
        }
        Ok(held)
    }

    /// To whoever finds them on. An error if others have had them for long enough.
    fn time_left(&self) -> io::Result<Duration> {
        let note = self.note.metadata()?;
        if note.len() == 0 {
            // Whoever runs this machine has them on.
            return Ok(LONGEST);
        }
        let on_for = SystemTime::now()
            .duration_since(note.modified()?)
            .unwrap_or(LONGEST);
        let left = LONGEST.saturating_sub(on_for);
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(left),
        }
    }

    /// Puts in order what somebody left who was killed.
    pub(crate) fn recover() {
        let left = || {
            let note = File::options().read(true).write(true).open(NOTE)?;
            drop(Self {
                note,
                setting: SETTING.into(),
                left: Duration::ZERO,
            });
            io::Result::Ok(())
        };
        // Usually there is no note.
        let _ = left();
    }
}

impl Drop for LargePages {
    fn drop(&mut self) {
        // Somebody else who has them on is the one to end it.
        if rustix::fs::flock(&self.note, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        let mut before = String::new();
        let read = self
            .note
            .rewind()
            .and_then(|()| self.note.read_to_string(&mut before));
        if read.is_ok() && !before.is_empty() {
            let undone = fs::write(&self.setting, &before).and_then(|()| self.note.set_len(0));
            if let Err(error) = undone {
                tracing::warn!(%error, "large pages are left on");
            }
        }
    }
}

fn open(note: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true);
    options.mode(0o600).open(note)
}

/// What stands in brackets in `always inherit madvise [never]`.
fn chosen(setting: &Path) -> io::Result<String> {
    let text = fs::read_to_string(setting)?;
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    let chosen = inside.map_or(text.trim(), |(chosen, _)| chosen);
    Ok(chosen.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as the kernel shows it, but for the brackets, which go with the first word that is written.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(setting: &str) -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            fs::write(machine.setting(), setting).unwrap();
            machine
        }

        fn setting(&self) -> PathBuf {
            self.0.path().join("setting")
        }

        fn now(&self) -> String {
            chosen(&self.setting()).unwrap()
        }

        fn hold(&self) -> LargePages {
            LargePages::hold_by(&self.setting(), &self.0.path().join("note")).unwrap()
        }
    }

    #[test]
    fn the_last_who_lets_go_leaves_the_setting_as_it_was() {
        let machine = Machine::new("always inherit madvise [never]\n");
        let (one, other) = (machine.hold(), machine.hold());
        assert_eq!(machine.now(), "always");
        drop(one);
        assert_eq!(machine.now(), "always");
        drop(other);
        assert_eq!(machine.now(), "never");
        drop(machine.hold());
        assert_eq!(machine.now(), "never");
    }

    #[test]
    fn nobody_joins_those_who_have_had_them_for_long_enough() {
        let machine = Machine::new("always inherit madvise [never]\n");
        let one = machine.hold();
        one.note.set_modified(SystemTime::now() - LONGEST / 2).unwrap();
        assert!(machine.hold().left <= LONGEST / 2);
        one.note.set_modified(SystemTime::now() - LONGEST).unwrap();
        LargePages::hold_by(&machine.setting(), &machine.0.path().join("note")).unwrap_err();
        assert_eq!(machine.now(), "always");
        drop(one);
        assert_eq!(machine.now(), "never");
        assert_eq!(machine.hold().left, LONGEST);
    }

    #[test]
    fn what_was_on_stays_on() {
        let machine = Machine::new("[always] inherit madvise never\n");
        drop(machine.hold());
        assert_eq!(machine.now(), "always");
    }

    #[test]
    fn the_next_puts_in_order_what_one_left_who_was_killed() {
        let machine = Machine::new("always [inherit] madvise never\n");
        let killed = machine.hold();
        // As the kernel does for a process that is gone.
        rustix::fs::flock(&killed.note, FlockOperation::Unlock).unwrap();
        std::mem::forget(killed);
        assert_eq!(machine.now(), "always");
        drop(machine.hold());
        assert_eq!(machine.now(), "inherit");
    }
}
