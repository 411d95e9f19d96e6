//! CRIU outlives the daemon that started it: it finishes what it was told, and at its end lets the box be as it found it, frozen
//! or not. Whoever takes charge of the box earlier would be overruled.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Writing the memory of a large box to a slow disk takes a while.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// Returns when no process of an earlier daemon has anything below `places` open any more. Processes of boxes are none: gVisor keeps
/// open what it has written itself, and a container may have paths of its own by the same names.
pub(crate) fn wait(places: &[PathBuf]) {
    let until = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        let at_work = at_work(places);
        if at_work.is_empty() {
            return;
        }
        if Instant::now() > until {
            tracing::warn!(pids = ?at_work, "an earlier daemon's work on memory images does not end");
            return;
        }
        if !std::mem::replace(&mut told, true) {
            tracing::info!(pids = ?at_work, "waiting for an earlier daemon's work on memory images");
        }
        std::thread::sleep(PAUSE);
    }
}

fn at_work(places: &[PathBuf]) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let others = numbers.filter(|pid| *pid != std::process::id().cast_signed());
    others
        .filter(|pid| !is_of_a_box(*pid) && has_open(*pid, places))
        .collect()
}

/// Every box has a user namespace, and what works on an image from outside has the daemon's.
fn is_of_a_box(pid: i32) -> bool {
    let users = |of: &str| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    users(&pid.to_string()).is_some_and(|its| Some(its) != users("self"))
}

/// A process may end meanwhile, and has nothing open then.
fn has_open(pid: i32, places: &[PathBuf]) -> bool {
    let open = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"));
    let links = open
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    links
        .into_iter()
        .any(|link| places.iter().any(|place| link.starts_with(place)))
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
        let pages = place.join("pages");
        fs::write(&pages, "").unwrap();
        let mut of_a_box = reader(&["unshare", "--user"], &pages, "60");
        let mut other = reader(&["env"], &pages, "1");
        while !is_of_a_box(of_a_box.id().cast_signed()) {
            std::thread::sleep(PAUSE);
        }
        assert_eq!(at_work(std::slice::from_ref(&place)), [other.id().cast_signed()]);
        assert!(at_work(&[place.join("elsewhere")]).is_empty());
        wait(std::slice::from_ref(&place));
        assert!(at_work(&[place]).is_empty());
        other.wait().unwrap();
        of_a_box.kill().unwrap();
        of_a_box.wait().unwrap();
    }
}
