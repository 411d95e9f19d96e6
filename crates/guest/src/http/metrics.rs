//! `GET /metrics`: what the box uses, as envd tells it. From the box's cgroup where it can be seen, else from /proc.

use std::ffi::CStr;
use std::fs;
use std::sync::Mutex;
use std::time::Instant;

use http::{Response, StatusCode};
use serde::Serialize;

use super::body::{self, Body, Failure};
use super::processes;

#[derive(Default)]
pub(super) struct Sampler {
    last: Mutex<Option<(Instant, f64)>>,
}

#[derive(Serialize)]
struct Metrics {
    ts: i64,
    cpu_count: usize,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    disk_used: u64,
    disk_total: u64,
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Seconds of processor time that the box has used.
fn cpu_seconds() -> f64 {
    let v2 = fs::read_to_string("/sys/fs/cgroup/cpu.stat")
        .ok()
        .and_then(|stat| {
            stat.lines().find_map(|l| {
                l.strip_prefix("usage_usec ")?
                    .trim()
                    .parse::<f64>()
                    .ok()
                    .map(|us| us / 1e6)
            })
        });
    v2.or_else(|| number("/sys/fs/cgroup/cpuacct/cpuacct.usage").map(|ns| ns as f64 / 1e9))
        .unwrap_or_else(|| {
            processes::list()
                .map(|all| all.iter().map(|p| p.cpu_seconds).sum())
                .unwrap_or(0.0)
        })
}

/// Bytes used and available.
fn memory() -> (u64, u64) {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = info.lines().find_map(|l| {
        l.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
            .map(|kb| kb * 1024)
    });
    let machine = machine.unwrap_or(0);
    let limit =
        number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    let used = number("/sys/fs/cgroup/memory.current")
        .or_else(|| number("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
        .unwrap_or_else(|| {
            processes::list()
                .map(|all| all.iter().map(|p| p.rss).sum())
                .unwrap_or(0)
        });
    (used, limit.map_or(machine, |l| l.min(machine)))
}

fn disk(path: &CStr) -> (u64, u64) {
    // SAFETY: an all-zero statvfs is valid, the path is NUL-terminated, and the call fills the live structure.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &mut stat) < 0 {
            return (0, 0);
        }
        stat
    };
    let total = stat.f_blocks * stat.f_frsize;
    (total.saturating_sub(stat.f_bfree * stat.f_frsize), total)
}

impl Sampler {
    pub(super) fn answer(&self) -> Result<Response<Body>, Failure> {
        let cpu_count = std::thread::available_parallelism().map_or(1, usize::from);
        let (now, used) = (Instant::now(), cpu_seconds());
        let last = self.last.lock().expect("no holder panics").replace((now, used));
        let share = last.map_or(0.0, |(then, before)| {
            let elapsed = now.duration_since(then).as_secs_f64();
            if elapsed > 0.0 {
                (used - before).max(0.0) / elapsed
            } else {
                0.0
            }
        });
        let (mem_used, mem_total) = memory();
        let (disk_used, disk_total) = disk(c"/");
        let metrics = Metrics {
            ts: crate::sys::now_ms() / 1000,
            cpu_count,
            cpu_used_pct: (share / cpu_count as f64 * 10_000.0).round() / 100.0,
            mem_total,
            mem_used,
            disk_used,
            disk_total,
        };
        Ok(body::json(StatusCode::OK, &metrics))
    }
}
