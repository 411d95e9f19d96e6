//! CRIU outlives the daemon that started it: it finishes what it was told, and at its end lets the box be as it found it, frozen
//! or not. Whoever takes charge of the box earlier would be overruled.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Writing the memory of a large box to a slow disk takes a while.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// Returns when no process of an earlier daemon has anything below `places` open any more. Those that `are_boxes` tells are none: a
/// box may keep open what it has written itself.
pub(crate) fn wait(places: &[PathBuf], are_boxes: impl Fn() -> HashSet<i32>) {
    let until = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        let mut at_work = at_work(places);
        if !at_work.is_empty() {
            let boxes = are_boxes();
            at_work.retain(|pid| !boxes.contains(pid));
        }
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
    others.filter(|pid| has_open(*pid, places)).collect()
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

    #[test]
    fn a_process_that_has_an_image_open_is_waited_for_unless_it_is_a_box() {
        let root = tempfile::tempdir().unwrap();
        let place = fs::canonicalize(root.path()).unwrap();
        fs::write(place.join("pages"), "").unwrap();
        let mut other = std::process::Command::new("sleep")
            .arg("1")
            .stdin(fs::File::open(place.join("pages")).unwrap())
            .spawn()
            .unwrap();
        let pid = other.id().cast_signed();
        assert_eq!(at_work(std::slice::from_ref(&place)), [pid]);
        assert!(at_work(&[place.join("elsewhere")]).is_empty());
        wait(std::slice::from_ref(&place), || HashSet::from([pid]));
        assert_eq!(at_work(std::slice::from_ref(&place)), [pid]);
        wait(std::slice::from_ref(&place), HashSet::new);
        assert!(at_work(&[place]).is_empty());
        other.wait().unwrap();
    }
}
