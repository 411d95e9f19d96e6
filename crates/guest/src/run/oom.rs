//! Tells whether the box has run out of memory, where the box can see its own cgroup or is a machine with a kernel of its own.

use std::sync::atomic::{AtomicU64, Ordering};

/// Where a box finds its count of processes killed for want of memory: cgroup v2, then v1.
const FILES: [&str; 2] = [
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
];

/// The kernel's own count, which is the box's where the kernel is.
const OF_A_MACHINE: &str = "/proc/vmstat";

pub(super) struct Watch {
    seen: AtomicU64,
}

fn kills() -> u64 {
    let files = match crate::machine::is_one() {
        true => &[OF_A_MACHINE][..],
        false => &FILES[..],
    };
    let text = files.iter().find_map(|f| std::fs::read_to_string(f).ok());
    text.as_deref().map_or(0, count)
}

fn count(text: &str) -> u64 {
    text.lines()
        .find_map(|l| l.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            seen: AtomicU64::new(kills()),
        }
    }

    /// Whether somebody was killed since the last time of asking.
    pub(super) fn happened(&self) -> bool {
        let now = kills();
        now > self.seen.swap(now, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_counted_wherever_they_are_written() {
        assert_eq!(
            count("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"),
            2
        );
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"), 7);
        assert_eq!(count("drop_slab 0\noom_kill 3\nnuma_pte_updates 0\n"), 3);
        assert_eq!(count(""), 0);
    }
}
