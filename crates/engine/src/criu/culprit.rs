//! Which process it was that CRIU could not save.

use std::fs;

/// What CRIU logs before it looks at a process, and when it is done with all of them.
const AT: &str = "Dumping task (pid: ";
const PAST: [&str; 2] = ["mnt: Dumping mountpoints", "Dumping pstree"];

/// The process that CRIU was at when the first error came, by a log that tells enough.
pub(super) fn in_log(log: &str) -> Option<i32> {
    let before = log.lines().take_while(|line| !line.contains("Error ("));
    let at = |found: Option<i32>, line: &str| match line.split_once(AT) {
        Some((_, rest)) => rest.split_once(' ')?.0.parse().ok(),
        None if PAST.iter().any(|past| line.contains(past)) => None,
        None => found,
    };
    before.fold(None, at)
}

/// As people in the box know it: by its own number there, and by name.
pub(super) fn called(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let inside = field("NSpid:").and_then(|pids| pids.split_whitespace().next_back());
    match (inside, field("Name:")) {
        (Some(inside), Some(name)) => format!("process {inside} ({})", name.trim()),
        _ => format!("process {pid} of the host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "(00.1) ========\n(00.1) Dumping task (pid: 7 comm: guest)\n(00.2) Dumping task (pid: 12 comm: python3)\n";

    #[test]
    fn the_process_before_the_first_error_is_the_one() {
        let failed =
            format!("{LOG}(00.3) Error (criu/files.c:2): no\n(00.4) Dumping task (pid: 13 comm: x)\n");
        assert_eq!(in_log(&failed), Some(12));
        let later = format!("{LOG}(00.3) mnt: Dumping mountpoints\n(00.4) Error (criu/mount.c:2): no\n");
        assert_eq!(in_log(&later), None, "it was past the processes");
        assert_eq!(in_log("(00.1) Error (criu/cr.c:2): no\n"), None);
    }

    #[test]
    fn a_process_is_called_by_its_number_and_name() {
        let own = std::process::id();
        let called = called(own.cast_signed());
        assert!(called.starts_with(&format!("process {own} (")), "{called}");
    }
}
