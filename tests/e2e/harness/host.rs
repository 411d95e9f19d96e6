//! Processes and mounts of the host.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};

use super::wait::eventually;

pub(super) fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::KILL);
    }
}

pub(super) fn all_processes() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .collect()
}

pub(super) fn words(pid: i32) -> String {
    let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&raw).replace('\0', " ").trim().to_owned()
}

/// What the kernel tells of a process from its third field on, the letter of its state.
fn stat(pid: i32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

pub(super) fn parent_of(pid: i32) -> Option<i32> {
    stat(pid)?.get(1)?.parse().ok()
}

fn group_of(pid: i32) -> Option<i32> {
    stat(pid)?.get(2)?.parse().ok()
}

/// In ticks since the machine was started.
fn started(pid: i32) -> Option<u64> {
    stat(pid)?.get(19)?.parse().ok()
}

/// Children of a process, each with the letter of its state.
fn children_of(parent: i32) -> impl Iterator<Item = (i32, char)> {
    all_processes().into_iter().filter_map(move |pid| {
        let stat = stat(pid)?;
        let is_its = stat.get(1)? == &parent.to_string();
        is_its.then_some((pid, stat.first()?.chars().next()?))
    })
}

/// Whether it does a daemon's work on boxes: a launcher, or what has become CRIU.
pub(super) fn is_tool(pid: i32) -> bool {
    let words = words(pid);
    words.ends_with(" __launch") || words.ends_with(" swrk 0")
}

/// Launchers and CRIUs of this run that nobody waits for any more: they are in the process group of whoever started them, and that is
/// not their parent's. Where other runs go on, those of a daemon that was killed there end soon.
pub(crate) fn orphans() -> Vec<String> {
    let own = started(std::process::id() as i32);
    let has_nobody = |pid: i32| {
        let parent = parent_of(pid)?;
        Some(!is_tool(parent) && group_of(parent)? != group_of(pid)?)
    };
    let left = || -> Vec<String> {
        let tools = all_processes().into_iter().filter(|pid| is_tool(*pid));
        let orphans = tools.filter(|pid| started(*pid) >= own && has_nobody(*pid) == Some(true));
        orphans
            .map(|pid| format!("process {pid} ({})", words(pid)))
            .collect()
    };
    let _ = eventually("launchers end", || Ok(left().is_empty().then_some(())));
    left()
}

/// Children of a process that have ended, and that it has not asked about.
pub(super) fn zombies_of(parent: i32) -> Vec<i32> {
    children_of(parent)
        .filter(|(_, state)| *state == 'Z')
        .map(|(pid, _)| pid)
        .collect()
}

/// A child of a process whose command line has both words.
pub(crate) fn child_of(parent: i32, both: [&str; 2]) -> Option<i32> {
    let is_it = |pid: &i32| both.iter().all(|word| words(*pid).contains(word));
    children_of(parent).map(|(pid, _)| pid).find(is_it)
}

/// Processes that were started with a path at or below `root` as an argument: daemons and their clients.
pub(super) fn processes_naming(root: &Path) -> Result<Vec<i32>> {
    let root = root.to_string_lossy().into_owned();
    let own = std::process::id() as i32;
    let names = |pid: i32| {
        let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&raw).into_owned();
        text.split('\0')
            .any(|word| word == root || word.starts_with(&format!("{root}/")))
    };
    Ok(all_processes()
        .into_iter()
        .filter(|pid| *pid != own && names(*pid))
        .collect())
}

/// Mount points at or below `root`, outer ones first.
pub(super) fn mounts_below(root: &Path) -> Result<Vec<String>> {
    let root = root.to_string_lossy().into_owned();
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    Ok(points
        .filter(|at| *at == root || at.starts_with(&format!("{root}/")))
        .map(str::to_owned)
        .collect())
}

/// Processes and threads end, and descriptors are closed, while they are looked at.
pub(crate) fn unless_gone<T>(seen: io::Result<T>) -> io::Result<Option<T>> {
    match seen {
        Err(e)
            if e.kind() == io::ErrorKind::NotFound
                || e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
        {
            Ok(None)
        }
        seen => seen.map(Some),
    }
}
