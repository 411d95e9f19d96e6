//! Standby boxes are a cache: they may hold so much memory, and give it back when the host is short of it.
//! The longest asleep goes first, and who is held or to be kept awake only when nobody else is left. Between the mark at which this begins and the one at which it ends
//! lies some room, so that not every box that comes to standby drives another out.

use dorm_engine::Id;
use tokio::time::Instant;

/// How much memory boxes in standby may hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    Bytes(u64),
    /// Of the host's memory.
    Percent(f64),
}

/// The memory of the host, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gauge {
    pub total: u64,
    pub available: u64,
}

/// Reads [`Gauge`].
pub type ReadGauge = std::sync::Arc<dyn Fn() -> Option<Gauge> + Send + Sync>;

/// As the kernel has it.
pub fn of_host() -> Option<Gauge> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(text: &str) -> Option<Gauge> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line
            .trim_start_matches(':')
            .trim()
            .strip_suffix(" kB")?
            .parse()
            .ok()?;
        Some(kib * 1024)
    };
    Some(Gauge {
        total: field("MemTotal")?,
        available: field("MemAvailable")?,
    })
}

/// A box in standby.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frozen {
    pub id: Id,
    pub since: Instant,
    pub memory: u64,
    pub leave: Leave,
}

/// Whether a box may go to disk, the first to go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leave {
    Gladly,
    /// It is held, or to be kept awake.
    IfNeedBe,
    /// Its memory cannot be saved. What it holds counts all the same.
    Never,
}

/// Parts of the host's memory: below the first something must go, until the second is reached.
const SHORT: f64 = 0.05;
const ENOUGH: f64 = 0.10;
/// Part of the budget that is left filled.
const FILLED: f64 = 0.9;

/// Who has to go to disk, in this order.
pub fn evict(mut boxes: Vec<Frozen>, budget: Budget, gauge: Gauge) -> Vec<Id> {
    let total = gauge.total as f64;
    let budget = match budget {
        Budget::Bytes(bytes) => bytes as f64,
        Budget::Percent(percent) => total * percent / 100.0,
    };
    let mut held: f64 = boxes.iter().map(|one| one.memory as f64).sum();
    let mut available = gauge.available as f64;
    let mut goal = (f64::INFINITY, 0.0);
    if held > budget {
        goal.0 = budget * FILLED;
    }
    if available < total * SHORT {
        goal.1 = total * ENOUGH;
    }
    boxes.retain(|one| one.leave != Leave::Never);
    boxes.sort_by_key(|one| (one.leave, one.since));
    let mut out = Vec::new();
    for one in boxes {
        if held <= goal.0 && available >= goal.1 {
            break;
        }
        held -= one.memory as f64;
        available += one.memory as f64;
        out.push(one.id);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn boxes(memory: &[u64]) -> Vec<Frozen> {
        let now = Instant::now();
        let one = |(index, memory): (usize, &u64)| Frozen {
            id: Id::random(),
            since: now - Duration::from_secs(index as u64),
            memory: *memory,
            leave: Leave::Gladly,
        };
        memory.iter().enumerate().map(one).collect()
    }

    fn gauge(available: u64) -> Gauge {
        Gauge {
            total: 100 * GIB,
            available: available * GIB,
        }
    }

    #[test]
    fn nobody_goes_while_there_is_room() {
        assert!(evict(boxes(&[10 * GIB; 5]), Budget::Percent(50.0), gauge(5)).is_empty());
        assert!(evict(Vec::new(), Budget::Bytes(0), gauge(0)).is_empty());
    }

    #[test]
    fn beyond_the_budget_the_longest_asleep_go_until_there_is_some_room() {
        let boxes = boxes(&[10 * GIB; 6]);
        let (longest, next) = (boxes[5].id.clone(), boxes[4].id.clone());
        assert_eq!(
            evict(boxes.clone(), Budget::Percent(50.0), gauge(30)),
            [longest.clone(), next.clone()]
        );
        assert_eq!(evict(boxes, Budget::Bytes(59 * GIB), gauge(30)), [longest]);
    }

    #[test]
    fn when_the_host_is_short_of_memory_some_go_until_it_has_enough() {
        let boxes = boxes(&[3 * GIB; 6]);
        let expected: Vec<_> = [5, 4].map(|index: usize| boxes[index].id.clone()).into();
        assert_eq!(evict(boxes, Budget::Percent(50.0), gauge(4)), expected);
    }

    #[test]
    fn who_is_held_goes_last_and_who_cannot_be_saved_stays_but_counts() {
        let mut boxes = boxes(&[10 * GIB; 6]);
        (boxes[5].leave, boxes[4].leave) = (Leave::Never, Leave::IfNeedBe);
        let ids: Vec<Id> = boxes.iter().map(|one| one.id.clone()).collect();
        let out = |budget| evict(boxes.clone(), Budget::Bytes(budget * GIB), gauge(30));
        assert_eq!(
            out(50),
            [ids[3].clone(), ids[2].clone()],
            "beyond 50 with all six"
        );
        assert_eq!(out(0), [3, 2, 1, 0, 4].map(|index: usize| ids[index].clone()));
    }

    #[test]
    fn the_kernel_s_table_is_read() {
        let text = "MemTotal:       24576 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n";
        let gauge = Gauge {
            total: 24 << 20,
            available: 1 << 20,
        };
        assert_eq!(parse(text), Some(gauge));
        assert_eq!(parse("MemTotal: x kB"), None);
    }
}
