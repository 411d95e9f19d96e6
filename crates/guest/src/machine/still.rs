//! Holding the machine's processes while it stands still, so that none of them runs again before the machine knows the time and
//! who it is: a fork would draw the random numbers of its source, and a process that woke would see an old time.
//!
//! All runs begin in a control group of their own. What else there is at the top of the tree, such as that of a container engine, is
//! held too; a process that somebody moves to the root of the tree is not.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::log::log;

const TREE: &str = "/sys/fs/cgroup";
const OF_RUNS: &str = "box";
/// How long to wait until everything is held: what waits for a disk may take its time.
const WITHIN: Duration = Duration::from_millis(500);
/// How long a hold lasts at most, for a stop or an order that may not come; longer than the daemon waits for either. The clock stands still
/// with the machine.
pub(super) const AT_MOST: Duration = Duration::from_secs(150);

/// Where a run joins its group, once there is one.
static JOIN: OnceLock<CString> = OnceLock::new();
/// Whether processes are held, or about to be.
static STANDS: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::Sender::new(false));
static HELD: Mutex<Held> = Mutex::new(Held {
    groups: Vec::new(),
    number: 0,
});

struct Held {
    groups: Vec<PathBuf>,
    /// Of the last hold, or its end, so that what comes late does not concern another one.
    number: u64,
}

fn held() -> MutexGuard<'static, Held> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn set_up() {
    let group = Path::new(TREE).join(OF_RUNS);
    match fs::create_dir(&group) {
        Ok(()) => {
            let join = group.join("cgroup.procs").into_os_string().into_encoded_bytes();
            let _ = CString::new(join).map(|join| JOIN.set(join));
        }
        Err(e) => log!("the machine's processes cannot be held: {e}"),
    }
}

/// Runs may have `pids` processes and threads from now on. Who is root in the machine can undo it.
pub(super) fn limit(pids: u32) {
    let limited = fs::write(Path::new(TREE).join("cgroup.subtree_control"), "+pids")
        .and_then(|()| fs::write(Path::new(TREE).join(OF_RUNS).join("pids.max"), pids.to_string()));
    if let Err(e) = limited {
        log!("the machine's processes are not limited in number: {e}");
    }
}

/// The file that takes a process into the group of runs. Nobody may start a process into a group that the box itself has frozen: he would
/// wait with it.
pub(crate) fn join_file() -> Option<&'static CStr> {
    let join = JOIN.get()?;
    let group = Path::new(TREE).join(OF_RUNS);
    runs_on(&group).then_some(join.as_c_str())
}

/// Returns when nothing is held. Processes are started on the runtime's one thread, where a hold is also [announced](announce), so that
/// nothing is held until the next `await`.
pub(crate) async fn until_released() {
    let _ = STANDS.subscribe().wait_for(|stands| !stands).await;
}

/// The number of a hold that is to come. If the machine is told to go on before that, it does not come.
pub(super) fn draw() -> u64 {
    let mut held = held();
    held.number += 1;
    held.number
}

/// From now on no process is started. False if the hold of this number is over already. Needs the runtime.
pub(super) fn announce(number: u64) -> bool {
    let held = held();
    if held.number != number {
        return false;
    }
    STANDS.send_replace(true);
    drop(held);
    tokio::spawn(async move {
        tokio::time::sleep(AT_MOST).await;
        if end(Some(number)) {
            log!("the machine was not told to go on, and goes on all the same");
        }
    });
    true
}

/// Returns when no process but this one runs, or after a while. False at once, if the hold of this number is over.
pub(super) fn hold(number: u64) -> bool {
    let mut held = held();
    if held.number != number {
        return false;
    }
    for group in groups() {
        if fs::write(group.join("cgroup.freeze"), "1").is_ok() {
            held.groups.push(group);
        }
    }
    let groups = held.groups.clone();
    drop(held);
    let until = Instant::now() + WITHIN;
    if let Some(group) = groups.iter().find(|group| !stands_by(group, until)) {
        log!("not all processes of {} stand still", group.display());
    }
    true
}

pub(super) fn is_on(number: u64) -> bool {
    held().number == number
}

/// The machine goes on, and knows all it has to.
pub(super) fn release() {
    end(None);
}

/// Ends the hold of this number, or whichever there is. Returns whether there was one.
pub(super) fn end(of: Option<u64>) -> bool {
    let mut held = held();
    if of.is_some_and(|number| number != held.number) {
        return false;
    }
    held.number += 1;
    for group in std::mem::take(&mut held.groups) {
        if let Err(e) = fs::write(group.join("cgroup.freeze"), "0") {
            log!("{} cannot go on: {e}", group.display());
        }
    }
    STANDS.send_replace(false)
}

fn runs_on(group: &Path) -> bool {
    let frozen = fs::read_to_string(group.join("cgroup.freeze"));
    frozen.is_ok_and(|frozen| frozen.trim() == "0")
}

/// Those at the top that nobody has frozen, without the one that this process is in.
fn groups() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own_group(&own).unwrap_or_default().to_owned();
    let found = fs::read_dir(TREE).into_iter().flatten().flatten();
    found
        .filter(|entry| entry.file_name() != *own)
        .map(|entry| entry.path())
        .filter(|group| runs_on(group))
        .collect()
}

/// The first name in the path of a process's group.
fn own_group(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    path.split('/').next()
}

/// The kernel tells when a group's events change.
fn stands_by(group: &Path, until: Instant) -> bool {
    let all_stand = || -> io::Result<bool> {
        let file = fs::File::open(group.join("cgroup.events"))?;
        loop {
            if is_frozen(&io::read_to_string(&file)?) {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            let Ok(left @ 1..) = libc::c_int::try_from(left.as_millis()) else {
                return Ok(false);
            };
            let mut change = libc::pollfd {
                fd: file.as_raw_fd(),
                events: libc::POLLPRI,
                revents: 0,
            };
            // SAFETY: the call reads and writes the one structure that it is given.
            match crate::sys::check(unsafe { libc::poll(&raw mut change, 1, left) }) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
            io::Seek::rewind(&mut &file)?;
        }
    };
    // A group that is gone holds nobody up.
    all_stand().unwrap_or(true)
}

fn is_frozen(events: &str) -> bool {
    events.lines().any(|line| line == "frozen 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_process_is_the_first_in_its_path() {
        assert_eq!(own_group("0::/\n"), Some(""));
        assert_eq!(own_group("1:name=systemd:/x\n0::/machine/a\n"), Some("machine"));
        assert_eq!(own_group(""), None);
    }

    #[tokio::test]
    async fn nothing_is_started_between_the_begin_of_a_hold_and_its_end() {
        until_released().await;
        let number = draw();
        assert!(announce(number));
        let mut waits = tokio::spawn(until_released());
        let early = tokio::time::timeout(Duration::from_millis(20), &mut waits).await;
        assert!(early.is_err(), "it did not wait");
        release();
        waits.await.unwrap();
        // What comes late concerns nobody.
        assert!(!hold(number) && !is_on(number));
        assert!(held().groups.is_empty());
        let next = draw();
        assert!(announce(next));
        assert!(!end(Some(number)), "another hold was ended");
        release();
        // Told to go on while the disk had most of its writes to come.
        let late = draw();
        release();
        assert!(!announce(late) && !hold(late));
        until_released().await;
    }

    #[test]
    fn a_group_stands_when_the_kernel_says_so() {
        assert!(is_frozen("populated 1\nfrozen 1\n"));
        assert!(!is_frozen("populated 1\nfrozen 0\n"));
    }
}
