//! `GET /dorm/processes`: what runs in the box, as /proc has it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use http::{Response, StatusCode};
use serde::Serialize;

use super::body::{self, Body, Failure};
use crate::users::Names;

#[derive(Debug, Serialize)]
pub(super) struct Process {
    pub(super) pid: i32,
    ppid: i32,
    user: String,
    state: String,
    /// Bytes.
    pub(super) rss: u64,
    pub(super) cpu_seconds: f64,
    /// Milliseconds since the epoch.
    started_ms: i64,
    /// The command line, or the name in brackets where there is none.
    args: Vec<String>,
}

fn sysconf(name: libc::c_int, fallback: u64) -> u64 {
    // SAFETY: sysconf takes an integer and gives one.
    u64::try_from(unsafe { libc::sysconf(name) })
        .ok()
        .filter(|v| *v > 0)
        .unwrap_or(fallback)
}

pub(super) fn list() -> io::Result<Vec<Process>> {
    let names = Names::read();
    let boot = boot_time();
    let mut processes: Vec<_> = fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        // A process may end while it is looked at.
        .filter_map(|pid| read(pid, &names, boot))
        .collect();
    processes.sort_by_key(|p| p.pid);
    Ok(processes)
}

/// Seconds since the epoch at which the clock of process start times began.
fn boot_time() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    stat.lines()
        .find_map(|l| l.strip_prefix("btime ")?.trim().parse().ok())
        .unwrap_or(0)
}

fn read(pid: i32, names: &Names, boot: u64) -> Option<Process> {
    let folder = format!("/proc/{pid}");
    let uid = fs::metadata(&folder).ok()?.uid();
    let stat = fs::read(format!("{folder}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name may hold anything, spaces and brackets too.
    let (before, after) = stat.rsplit_once(')')?;
    let name = before.split_once('(')?.1;
    let fields: Vec<&str> = after.split_whitespace().collect();
    let number = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let ticks = sysconf(libc::_SC_CLK_TCK, 100);
    let cmdline = fs::read(format!("{folder}/cmdline")).unwrap_or_default();
    let mut args: Vec<String> = cmdline
        .strip_suffix(b"\0")
        .unwrap_or(&cmdline)
        .split(|b| *b == 0)
        .map(|a| String::from_utf8_lossy(a).into_owned())
        .collect();
    if cmdline.is_empty() {
        args = vec![format!("[{name}]")];
    }
    Some(Process {
        pid,
        ppid: fields.get(1)?.parse().ok()?,
        user: names.user(uid),
        state: (*fields.first()?).to_owned(),
        rss: number(21) * sysconf(libc::_SC_PAGESIZE, 4096),
        cpu_seconds: (number(11) + number(12)) as f64 / ticks as f64,
        started_ms: i64::try_from(boot * 1000 + number(19) * 1000 / ticks).unwrap_or(0),
        args,
    })
}

pub(super) async fn answer() -> Result<Response<Body>, Failure> {
    let listed = tokio::task::spawn_blocking(list)
        .await
        .unwrap_or_else(|e| Err(io::Error::other(e)));
    let listed = listed.map_err(|e| Failure::file("/proc", &e))?;
    Ok(body::json(StatusCode::OK, &listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_listed_with_what_it_uses() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let processes = list().unwrap();
        let own = processes.iter().find(|p| p.pid == pid).unwrap();
        assert!(own.rss > 0 && own.ppid > 0);
        assert!(!own.args[0].is_empty());
        assert!((crate::sys::now_ms() - own.started_ms).abs() < 24 * 3600 * 1000);
    }
}
