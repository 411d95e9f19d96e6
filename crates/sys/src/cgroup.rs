//! Control groups, in both of their versions, as one thing.
//!
//! On a host with version 2 a box has one directory; with version 1 (or a hybrid whose unified tree has no
//! controllers) it has one under each controller. [`Hierarchy`] finds out which, [`Group`] hides it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::process::is_kernel_thread;

const ROOT: &str = "/sys/fs/cgroup";
const V1_CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "memory", "pids", "freezer", "blkio"];
const V2_CONTROLLERS: [&str; 4] = ["cpu", "memory", "pids", "io"];
/// A process in an uninterruptible wait holds up a freeze.
const FREEZE_WITHIN: std::time::Duration = std::time::Duration::from_secs(20);
const CALL_AGAIN: std::time::Duration = std::time::Duration::from_secs(1);
/// What a freeze takes at the most if nothing is in its way.
const MOMENT: std::time::Duration = std::time::Duration::from_millis(20);
/// How long memory may take to be given back.
const RECLAIM_WITHIN: std::time::Duration = std::time::Duration::from_secs(1);
const CPU_PERIOD_USEC: u64 = 100_000;
/// The kernel takes no less.
const CPU_LEAST_USEC: u64 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// The tree below which a daemon keeps the groups of its boxes.
#[derive(Debug, Clone)]
pub struct Hierarchy {
    version: Version,
    /// The directory of the parent group under each controller; one entry in version 2.
    parents: Vec<(&'static str, PathBuf)>,
}

#[derive(Debug, Clone, Default)]
pub struct GroupLimits {
    pub cpu_millis: u32,
    pub memory: u64,
    pub pids: u32,
    /// Device (major, minor) and bytes a second, both ways.
    pub io: Option<((u32, u32), u64)>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupStats {
    pub cpu_usec: u64,
    pub memory: u64,
    pub memory_peak: u64,
    pub pids: u64,
    pub oom_kills: u64,
    pub forks_refused: u64,
}

/// What stands in the way of who wants to attach to the threads of a frozen group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// Whether one is stopped, as by SIGSTOP. Always false in version 2, where that is of no consequence.
    pub stopped: bool,
    /// One that waits for a child which has its memory until it executes a program or ends (vfork).
    pub lender: Option<i32>,
}

impl Hierarchy {
    pub fn version() -> io::Result<Version> {
        version_at(Path::new(ROOT))
    }

    /// Finds the host's cgroups and makes the parent group `name` for the boxes of one daemon.
    pub fn open(name: &str) -> io::Result<Self> {
        let version = Self::version()?;
        let parents: Vec<(&'static str, PathBuf)> = match version {
            Version::V2 => vec![("", Path::new(ROOT).join(name))],
            Version::V1 => V1_CONTROLLERS
                .iter()
                .map(|c| (*c, Path::new(ROOT).join(c).join(name)))
                .collect(),
        };
        for (_, path) in &parents {
            make_dir(path)?;
        }
        if version == Version::V2 {
            delegate(Path::new(ROOT))?;
            delegate(&parents[0].1)?;
        }
        Ok(Self { version, parents })
    }

    /// Makes (or finds) the group `name` and sets its limits.
    pub fn create(&self, name: &str, limits: &GroupLimits) -> io::Result<Group> {
        let group = self.group(name);
        match group.make().and_then(|()| group.limit(limits)) {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.remove();
                Err(error)
            }
        }
    }

    /// Whether a group can be given another name. Version 2 has no such thing.
    pub fn can_rename(&self) -> bool {
        self.version == Version::V1
    }

    /// Gives the group `from` the name `to`, with its processes.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<Group> {
        for (_, path) in &self.parents {
            fs::rename(path.join(from), path.join(to))?;
        }
        Ok(self.group(to))
    }

    pub fn group(&self, name: &str) -> Group {
        let directories = self
            .parents
            .iter()
            .map(|(c, path)| (*c, path.join(name)))
            .collect();
        Group {
            version: self.version,
            directories,
        }
    }

    /// Names of all groups, whole or in part.
    pub fn list(&self) -> io::Result<Vec<String>> {
        let mut names = std::collections::BTreeSet::new();
        for (_, path) in &self.parents {
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    names.extend(entry.file_name().into_string());
                }
            }
        }
        Ok(names.into_iter().collect())
    }

    /// Removes the parent group if no box is left in it.
    pub fn remove_if_empty(&self) {
        for (_, path) in &self.parents {
            let _ = fs::remove_dir(path);
        }
    }
}

/// The group of one box.
#[derive(Debug, Clone)]
pub struct Group {
    version: Version,
    directories: Vec<(&'static str, PathBuf)>,
}

impl Group {
    /// Files to which a process writes its pid to become a member.
    pub fn join_files(&self) -> Vec<PathBuf> {
        self.directories
            .iter()
            .map(|(_, path)| path.join("cgroup.procs"))
            .collect()
    }

    /// Makes the group, without limits.
    pub fn make(&self) -> io::Result<()> {
        self.directories.iter().try_for_each(|(_, path)| make_dir(path))
    }

    pub fn exists(&self) -> bool {
        self.directories.iter().any(|(_, path)| path.exists())
    }

    /// How many processes and threads it may have. One that has more already keeps them.
    pub fn limit_processes(&self, pids: u32) -> io::Result<()> {
        self.write("pids", "pids.max", &pids.to_string())
    }

    /// How much of the processors it may have, in thousandths of one.
    pub fn limit_processors(&self, millis: u32) -> io::Result<()> {
        let quota = (u64::from(millis) * CPU_PERIOD_USEC / 1000).max(CPU_LEAST_USEC);
        match self.version {
            Version::V2 => self.write("", "cpu.max", &format!("{quota} {CPU_PERIOD_USEC}")),
            Version::V1 => {
                self.write("cpu", "cpu.cfs_period_us", &CPU_PERIOD_USEC.to_string())?;
                self.write("cpu", "cpu.cfs_quota_us", &quota.to_string())
            }
        }
    }

    pub fn limit(&self, limits: &GroupLimits) -> io::Result<()> {
        self.limit_processes(limits.pids)?;
        self.limit_processors(limits.cpu_millis)?;
        match self.version {
            Version::V2 => {
                self.write("", "memory.max", &limits.memory.to_string())?;
                // Perhaps a daemon died while it had memory given back.
                self.write("", "memory.high", "max").or_else(absent)?;
                self.write("", "memory.swap.max", "0").or_else(absent)?;
                self.write("", "memory.oom.group", "0").or_else(absent)?;
                if let Some(((major, minor), bps)) = limits.io {
                    self.write("", "io.max", &format!("{major}:{minor} rbps={bps} wbps={bps}"))?;
                }
            }
            Version::V1 => {
                self.write("memory", "memory.limit_in_bytes", &limits.memory.to_string())?;
                self.write(
                    "memory",
                    "memory.memsw.limit_in_bytes",
                    &limits.memory.to_string(),
                )
                .or_else(absent)?;
                // Buffers of sockets count as memory in version 2; here they have a limit of their own, or none at all.
                self.write(
                    "memory",
                    "memory.kmem.tcp.limit_in_bytes",
                    &(limits.memory / 4).to_string(),
                )
                .or_else(absent)?;
                if let Some(((major, minor), bps)) = limits.io {
                    let line = format!("{major}:{minor} {bps}");
                    self.write("blkio", "blkio.throttle.read_bps_device", &line)?;
                    self.write("blkio", "blkio.throttle.write_bps_device", &line)?;
                }
            }
        }
        Ok(())
    }

    /// Like [`Self::limit`], for a group whose processes may have more memory than that already. It is an error then, and they keep what they
    /// have, in version 2 as well, which would kill them.
    pub fn lower(&self, limits: &GroupLimits) -> io::Result<()> {
        self.limit_processes(limits.pids)?;
        if self.version == Version::V2 {
            self.reclaim(limits.memory)?;
        }
        self.limit(limits)
    }

    /// Has the kernel take back memory until no more than `limit` is used.
    fn reclaim(&self, limit: u64) -> io::Result<()> {
        let used = || Ok::<_, io::Error>(number(&self.read("", "memory.current")?));
        if used()? <= limit {
            return Ok(());
        }
        // The write itself takes back what it can, but for files that are not on disk yet.
        self.write("", "memory.high", &limit.to_string())?;
        let deadline = std::time::Instant::now() + RECLAIM_WITHIN;
        let mut still = used()?;
        while still > limit && std::time::Instant::now() < deadline {
            std::thread::sleep(MOMENT);
            still = used()?;
        }
        self.write("", "memory.high", "max")?;
        match still > limit {
            true => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("its processes have {still} bytes of memory, and their limit is {limit}"),
            )),
            false => Ok(()),
        }
    }

    pub fn stats(&self) -> io::Result<GroupStats> {
        Ok(match self.version {
            Version::V2 => {
                let memory = number(&self.read("", "memory.current")?);
                GroupStats {
                    cpu_usec: field(&self.read("", "cpu.stat")?, "usage_usec"),
                    memory,
                    // Kernels before 5.19 keep no peak.
                    memory_peak: self.read("", "memory.peak").map_or(memory, |s| number(&s)),
                    pids: number(&self.read("", "pids.current")?),
                    oom_kills: field(&self.read("", "memory.events")?, "oom_kill"),
                    forks_refused: field(&self.read("", "pids.events")?, "max"),
                }
            }
            Version::V1 => GroupStats {
                cpu_usec: number(&self.read("cpuacct", "cpuacct.usage")?) / 1000,
                memory: number(&self.read("memory", "memory.usage_in_bytes")?),
                memory_peak: number(&self.read("memory", "memory.max_usage_in_bytes")?),
                pids: number(&self.read("pids", "pids.current")?),
                oom_kills: field(&self.read("memory", "memory.oom_control")?, "oom_kill"),
                forks_refused: field(&self.read("pids", "pids.events")?, "max"),
            },
        })
    }

    /// Bytes of its memory that are in no file: what a memory image of it has to hold.
    pub fn memory_in_no_file(&self) -> io::Result<u64> {
        let (stat, anonymous) = match self.version {
            Version::V2 => (self.read("", "memory.stat")?, "anon"),
            Version::V1 => (self.read("memory", "memory.stat")?, "rss"),
        };
        // In version 2 a group has none of it in swap.
        let parts = [anonymous, "shmem", "swap"];
        Ok(parts.iter().map(|part| field(&stat, part)).sum())
    }

    /// Stops all processes of the group where they are. Returns when they are.
    pub fn freeze(&self) -> io::Result<()> {
        let deadline = std::time::Instant::now() + FREEZE_WITHIN;
        loop {
            match self.version {
                Version::V2 => self.write("", "cgroup.freeze", "1")?,
                Version::V1 => self.write("freezer", "freezer.state", "FROZEN")?,
            }
            if self.freezes_within(MOMENT)?
                || !self.dismiss_kernel_threads()? && self.freezes_within(CALL_AGAIN)?
            {
                return Ok(());
            }
            // A process that has missed the call, as one may that is just coming up, hears the next.
            self.thaw()?;
            if std::time::Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "a process of the box cannot be frozen",
                ));
            }
        }
    }

    /// Sends threads of the kernel away, as KVM puts one into the group of who makes a machine. They cannot be frozen, and in version 2 the
    /// group would never be. True if there were any.
    fn dismiss_kernel_threads(&self) -> io::Result<bool> {
        if self.version == Version::V1 {
            return Ok(false);
        }
        let groups = self.directories[0]
            .1
            .ancestors()
            .map(|path| path.join("cgroup.procs"));
        let top = groups.take_while(|file| file.exists()).last().unwrap_or_default();
        let mut threads = self.processes()?;
        threads.retain(|pid| is_kernel_thread(*pid).unwrap_or(false));
        for thread in &threads {
            fs::write(&top, thread.to_string())?;
        }
        Ok(!threads.is_empty())
    }

    fn freezes_within(&self, patience: std::time::Duration) -> io::Result<bool> {
        let deadline = std::time::Instant::now() + patience;
        // The kernel tells nobody in version 1, and in version 2 up to 10 ms late. What it needs is a moment's scheduling, mostly.
        let mut pause = std::time::Duration::from_micros(100);
        while !self.frozen()? {
            if std::time::Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(pause);
            pause = (pause * 5 / 4).min(MOMENT / 2);
        }
        Ok(true)
    }

    pub fn thaw(&self) -> io::Result<()> {
        match self.version {
            Version::V2 => self.write("", "cgroup.freeze", "0"),
            Version::V1 => self.write("freezer", "freezer.state", "THAWED"),
        }
    }

    pub fn frozen(&self) -> io::Result<bool> {
        Ok(match self.version {
            Version::V2 => field(&self.read("", "cgroup.events")?, "frozen") == 1,
            Version::V1 => self.read("freezer", "freezer.state")?.trim() == "FROZEN",
        })
    }

    /// Whether nobody has called on it to freeze; one that has been called on may take a moment yet.
    pub fn is_thawed(&self) -> io::Result<bool> {
        Ok(match self.version {
            Version::V2 => self.read("", "cgroup.freeze")?.trim() == "0",
            Version::V1 => self.read("freezer", "freezer.state")?.trim() == "THAWED",
        })
    }

    /// What threads of the frozen group wait for. The state of one is that of any other; the place in the kernel where it waits tells more.
    pub fn waits(&self) -> io::Result<Waits> {
        let threads = match self.version {
            Version::V2 => self.read("", "cgroup.threads")?,
            Version::V1 => self.read("freezer", "tasks")?,
        };
        let mut waits = Waits::default();
        for thread in threads.lines().filter_map(|line| line.parse().ok()) {
            match fs::read_to_string(format!("/proc/{thread}/wchan")).as_deref() {
                Ok("do_signal_stop") => waits.stopped = self.version == Version::V1,
                Ok("kernel_clone") => waits.lender = Some(thread),
                _ => {}
            }
        }
        Ok(waits)
    }

    /// The directory whose freezer CRIU may use.
    pub fn freezer(&self) -> PathBuf {
        self.path("freezer", "")
    }

    /// Processes in the group, as the host numbers them.
    pub fn processes(&self) -> io::Result<Vec<i32>> {
        let mut pids = std::collections::BTreeSet::new();
        for (_, path) in &self.directories {
            match fs::read_to_string(path.join("cgroup.procs")) {
                Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok())),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(pids.into_iter().collect())
    }

    /// Removes the group, which must have no processes. Removing what is not there is no error.
    pub fn remove(&self) -> io::Result<()> {
        for (_, path) in &self.directories {
            match fs::remove_dir(path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn path(&self, controller: &str, file: &str) -> PathBuf {
        let directory = self
            .directories
            .iter()
            .find(|(c, _)| *c == controller)
            .map(|(_, path)| path);
        directory.unwrap_or(&self.directories[0].1).join(file)
    }

    fn write(&self, controller: &str, file: &str, value: &str) -> io::Result<()> {
        let path = self.path(controller, file);
        // Written with the flags of a plain open: create would be refused, and truncate is meaningless here.
        let write = || {
            io::Write::write_all(
                &mut fs::OpenOptions::new().write(true).open(&path)?,
                value.as_bytes(),
            )
        };
        write().map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("cannot write {value} to {}: {e}", path.display()),
            )
        })
    }

    fn read(&self, controller: &str, file: &str) -> io::Result<String> {
        fs::read_to_string(self.path(controller, file))
    }
}

fn version_at(root: &Path) -> io::Result<Version> {
    let missing = |what: String| {
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} has {what}", root.display()),
        ))
    };
    if let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) {
        let absent = V2_CONTROLLERS
            .iter()
            .find(|c| !controllers.split_whitespace().any(|found| found == **c));
        return match absent {
            None => Ok(Version::V2),
            Some(controller) => missing(format!("version 2 without its controller {controller}")),
        };
    }
    let absent = V1_CONTROLLERS
        .iter()
        .find(|c| !root.join(c).join("tasks").exists());
    match absent {
        None => Ok(Version::V1),
        Some(controller) => missing(format!(
            "neither version 2 nor the version 1 controller {controller}"
        )),
    }
}

fn make_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io::Error::new(
            e.kind(),
            format!("cannot make the cgroup {}: {e}", path.display()),
        )),
        _ => Ok(()),
    }
}

/// Lets the children of a version 2 group have limits of their own.
fn delegate(path: &Path) -> io::Result<()> {
    let wanted = V2_CONTROLLERS.map(|c| format!("+{c}")).join(" ");
    fs::write(path.join("cgroup.subtree_control"), &wanted).map_err(|e| {
        io::Error::new(
            e.kind(),
            format!(
                "cannot enable the controllers {wanted} in {}: {e}",
                path.display()
            ),
        )
    })
}

/// Some files are missing where the kernel was built without swap accounting or the like.
fn absent(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Ok(()),
        _ => Err(error),
    }
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_default()
}

fn field(text: &str, name: &str) -> u64 {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map(number).unwrap_or_default()
}

#[cfg(test)]
mod tests;
