//! CRIU outlives the daemon that started it: it finishes what it was told, and at its end lets the box be as it found it, frozen
//! or not. Whoever takes charge of the box earlier would be overruled.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use super::patience_with;

const PAUSE: Duration = Duration::from_millis(20);
/// Whoever has started this daemon waits for it, systemd ten minutes.
const LONGEST: Duration = Duration::from_secs(480);

/// Returns when no process of an earlier daemon has anything below `places` open any more. Processes of boxes are none: gVisor keeps
/// open what it has written itself, and a container may have paths of its own by the same names. They have as long as their daemon
/// gave them, up to a limit, by what `held` says of the memory of those whose names the files' folders have.
pub(crate) fn wait(places: &[PathBuf], held: impl Fn(&str) -> u64) {
    let began = Instant::now();
    let mut told = false;
    loop {
        let at_work = at_work(places);
        if at_work.is_empty() {
            return;
        }
        let limit = patience(&at_work, &held).min(LONGEST);
        let pids = || at_work.iter().map(|one| one.pid).collect::<Vec<_>>();
        if began.elapsed() > limit {
            tracing::warn!(pids = ?pids(), "an earlier daemon's work on memory images does not end");
            return;
        }
        if !std::mem::replace(&mut told, true) {
            tracing::info!(pids = ?pids(), ?limit, "waiting for an earlier daemon's work on memory images");
        }
        std::thread::sleep(PAUSE);
    }
}

/// A process, and whose images it has open.
struct AtWork {
    pid: i32,
    on: BTreeSet<String>,
}

/// They share the disk.
fn patience(at_work: &[AtWork], held: impl Fn(&str) -> u64) -> Duration {
    let all: BTreeSet<&String> = at_work.iter().flat_map(|one| &one.on).collect();
    patience_with(all.into_iter().map(|whose| held(whose)).sum())
}

fn at_work(places: &[PathBuf]) -> Vec<AtWork> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let others = numbers.filter(|pid| *pid != std::process::id().cast_signed() && !is_of_a_box(*pid));
    let looked = others.map(|pid| AtWork {
        pid,
        on: open_below(pid, places),
    });
    looked.filter(|one| !one.on.is_empty()).collect()
}

/// Every box has a user namespace, and what works on an image from outside has the daemon's.
fn is_of_a_box(pid: i32) -> bool {
    let users = |of: &str| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    users(&pid.to_string()).is_some_and(|its| Some(its) != users("self"))
}

/// The folders in `places`, or files, in which it has something open. A process may end meanwhile, and has nothing open then.
fn open_below(pid: i32, places: &[PathBuf]) -> BTreeSet<String> {
    let open = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"));
    let links = open
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let below = links.flat_map(|link| {
        let inside = places.iter().filter_map(|place| link.strip_prefix(place).ok());
        let first = inside.map(|path| match path.components().next() {
            Some(Component::Normal(name)) => name.to_string_lossy().into_owned(),
            _ => String::new(),
        });
        first.collect::<Vec<_>>()
    });
    below.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a process that has `file` open for `seconds`.
    fn reader(program: &[&str], file: &Path, seconds: &str) -> std::process::Child {
        let mut command = std::process::Command::new(program[0]);
        command
            .args(&program[1..])
            .args(["sleep", seconds])
            .stdin(fs::File::open(file).unwrap());
        command.spawn().unwrap()
    }

    #[test]
    fn a_process_that_has_an_image_open_is_waited_for_unless_it_is_of_a_box() {
        let root = tempfile::tempdir().unwrap();
        let place = fs::canonicalize(root.path()).unwrap();
        let pages = place.join("agent/pages");
        fs::create_dir(place.join("agent")).unwrap();
        fs::write(&pages, "").unwrap();
        let mut of_a_box = reader(&["unshare", "--user"], &pages, "60");
        let mut other = reader(&["env"], &pages, "1");
        while !is_of_a_box(of_a_box.id().cast_signed()) {
            std::thread::sleep(PAUSE);
        }
        let found = at_work(std::slice::from_ref(&place));
        assert_eq!(
            found.iter().map(|one| one.pid).collect::<Vec<_>>(),
            [other.id().cast_signed()]
        );
        let held = |whose: &str| if whose == "agent" { 7 << 30 } else { 0 };
        assert_eq!(patience(&found, held), patience_with(7 << 30));
        assert!(at_work(&[place.join("elsewhere")]).is_empty());
        wait(std::slice::from_ref(&place), held);
        assert!(at_work(&[place]).is_empty());
        other.wait().unwrap();
        of_a_box.kill().unwrap();
        of_a_box.wait().unwrap();
    }
}
