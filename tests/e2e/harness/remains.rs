//! What a daemon and its boxes have on the host, found without asking the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};

use super::host::{all_processes, is_tool, kill, mounts_below, parent_of, processes_naming, words};
use super::wait::eventually;
use super::world::command;

const CGROUPS: &str = "/sys/fs/cgroup";

/// Everything on this host that belongs to the daemon of one data directory.
#[derive(Debug, Clone)]
pub(crate) struct Remains {
    data: PathBuf,
    instance: String,
}

impl Remains {
    pub(crate) fn of(data: &Path) -> Self {
        let canonical = fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
        let hash = blake3::hash(canonical.as_os_str().as_encoded_bytes()).to_hex();
        Self {
            data: canonical,
            instance: hash[..6].to_owned(),
        }
    }

    /// The daemon's own cgroups: one, or one for each controller.
    pub(crate) fn cgroups(&self) -> Vec<PathBuf> {
        let name = format!("dorm-{}", self.instance);
        let below = fs::read_dir(CGROUPS)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path());
        let candidates = std::iter::once(PathBuf::from(CGROUPS)).chain(below);
        candidates.map(|c| c.join(&name)).filter(|c| c.is_dir()).collect()
    }

    /// Ids of boxes that have a cgroup. What the daemon keeps ready for the next box is none.
    pub(crate) fn boxes(&self) -> BTreeSet<String> {
        let groups = self.cgroups().into_iter().flat_map(|group| groups_in(&group));
        groups.filter(|name| !name.starts_with("spare-")).collect()
    }

    /// Processes of boxes, as the host numbers them.
    pub(crate) fn processes(&self) -> BTreeSet<i32> {
        self.cgroups()
            .into_iter()
            .flat_map(|g| children(&g))
            .flat_map(|g| members(&g))
            .collect()
    }

    /// The same of one box.
    pub(crate) fn processes_of(&self, id: &str) -> BTreeSet<i32> {
        let groups = self.cgroups().into_iter();
        groups.flat_map(|group| members(&group.join(id))).collect()
    }

    /// Lets a frozen box move, without the daemon's knowledge.
    pub(crate) fn thaw(&self, id: &str) {
        for group in self.cgroups() {
            // One or the other, by the version of cgroups.
            let _ = fs::write(group.join(id).join("freezer.state"), "THAWED");
            let _ = fs::write(group.join(id).join("cgroup.freeze"), "0");
        }
    }

    /// Where the daemon keeps what boxes need while they run.
    fn run(&self) -> PathBuf {
        PathBuf::from(format!("/run/dorm-{}", self.instance))
    }

    /// Ids of boxes for which something is kept there.
    pub(crate) fn run_directories(&self) -> BTreeSet<String> {
        names_in(&self.run())
    }

    fn interface_prefix(&self) -> String {
        format!("d{}", &self.instance[..4])
    }

    pub(crate) fn interfaces(&self) -> Vec<String> {
        let prefix = self.interface_prefix();
        let all = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        all.filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| n.starts_with(&prefix))
            .collect()
    }

    /// Tables of the daemon's firewall, as `family name`.
    fn tables(&self) -> Result<Vec<String>> {
        let name = format!(" dorm_{}", self.instance);
        let all = command("nft", &["list", "tables"])?;
        Ok(all
            .lines()
            .filter(|l| l.ends_with(&name))
            .filter_map(|l| l.strip_prefix("table "))
            .map(str::to_owned)
            .collect())
    }

    /// Blocks of addresses that the daemon claims, by a route whose metric is its number.
    fn claims(&self) -> Result<Vec<String>> {
        let metric = 0x0100_0000 | u32::from_str_radix(&self.instance, 16)?;
        let all = command("ip", &["route", "show", "type", "unreachable"])?;
        let own = all
            .lines()
            .filter(|l| l.split_whitespace().any(|word| word == metric.to_string()));
        Ok(own
            .filter_map(|l| l.split_whitespace().nth(1))
            .map(str::to_owned)
            .collect())
    }

    /// Where the daemon answers boxes' DNS queries, as far as the host has that address.
    pub(super) fn ears(&self) -> Result<Option<String>> {
        let range = fs::read_to_string(self.data.join("network")).unwrap_or_default();
        let base = format!("{}/32", range.split('/').next().unwrap_or_default());
        let all = command("ip", &["-4", "addr", "show", "dev", "lo"])?;
        Ok(all.split_whitespace().any(|word| word == base).then_some(base))
    }

    /// Homes on disk, agents' and unfinished templates' alike.
    pub(crate) fn homes(&self) -> BTreeSet<String> {
        names_in(&self.data.join("pool/homes"))
    }

    /// The same when no daemon runs, and a pool in a file is not mounted.
    pub(crate) fn homes_left(&self) -> Result<BTreeSet<String>> {
        let (image, pool) = (self.data.join("pool.img"), self.data.join("pool"));
        if !image.exists() || !names_in(&pool).is_empty() {
            return Ok(self.homes());
        }
        let (image, pool) = (image.display().to_string(), pool.display().to_string());
        command("mount", &["-o", "loop,ro", &image, &pool])?;
        let homes = self.homes();
        command("umount", &[&pool])?;
        Ok(homes)
    }

    pub(crate) fn snapshots(&self) -> BTreeSet<String> {
        names_in(&self.data.join("pool/snapshots"))
    }

    /// Memory images by agent, unfinished ones and those that were set aside included.
    pub(crate) fn images(&self) -> BTreeMap<String, BTreeSet<String>> {
        let images = self.data.join("images");
        let of = |agent: String| {
            let kept = names_in(&images.join(&agent));
            (agent, kept)
        };
        names_in(&images).into_iter().map(of).collect()
    }

    pub(crate) fn templates(&self) -> BTreeSet<String> {
        names_in(&self.data.join("pool/templates"))
    }

    /// Processes that work on the data directory and are neither the daemon nor its children.
    pub(crate) fn strangers(&self, daemon: i32) -> Result<Vec<String>> {
        let all = processes_naming(&self.data)?.into_iter();
        let strange = all.filter(|pid| *pid != daemon && parent_of(*pid).is_some_and(|ppid| ppid != daemon));
        Ok(strange.map(|pid| format!("{pid} ({})", words(pid))).collect())
    }

    /// Processes that have ids of this daemon's boxes and are in none of `boxes`; and those that do a daemon's work, on boxes or files of
    /// this one, and are not its children.
    pub(crate) fn lost(&self, daemon: i32, boxes: &BTreeSet<String>) -> Vec<String> {
        let (ids, group) = (self.host_ids(), format!("/dorm-{}/", self.instance));
        let is_lost = |pid: i32| {
            let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
            let within = groups.lines().find_map(|line| Some(line.split_once(&group)?.1));
            // Runs that go on at the same time have the same ids.
            if within.is_none() && groups.contains("/dorm-") {
                return None;
            }
            let of = within.map(|path| path.split('/').next().unwrap_or_default());
            if of.is_some_and(|id| boxes.contains(id)) {
                return None;
            }
            let is_here = ids.contains(&owner(pid)?);
            let works_here = || is_tool(pid) && (of.is_some() || self.has_open(pid));
            let is_orphan = || parent_of(pid).is_some_and(|parent| parent != daemon);
            (is_here || works_here() && is_orphan()).then_some(())
        };
        let lost = all_processes().into_iter().filter(|pid| is_lost(*pid).is_some());
        lost.map(|pid| format!("process {pid} ({}) of no box", words(pid)))
            .collect()
    }

    /// Users on the host that processes of its boxes may be.
    fn host_ids(&self) -> Range<u32> {
        let config = fs::read_to_string(self.data.join("config.toml")).unwrap_or_default();
        let number = |key: &str| {
            let value = config.lines().find_map(|line| line.strip_prefix(key));
            value.and_then(|value| value.parse::<u32>().ok())
        };
        match (number("first_uid = "), number("max_agents = ")) {
            (Some(first), Some(agents)) => first..first + agents * 65_536,
            _ => 0..0,
        }
    }

    /// Whether a process has a file of the data directory open.
    fn has_open(&self, pid: i32) -> bool {
        let open = children(Path::new(&format!("/proc/{pid}/fd")));
        let mut files = open.iter().filter_map(|link| fs::read_link(link).ok());
        files.any(|file| file.starts_with(&self.data))
    }

    /// Mount points in the data directory, as the host sees them.
    pub(crate) fn mounts(&self) -> Result<Vec<String>> {
        mounts_below(&self.data)
    }

    /// Loop devices on files of the data directory.
    pub(crate) fn loops(&self) -> Vec<String> {
        let prefix = self.data.to_string_lossy().into_owned();
        let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
        let backed = devices.filter(|d| {
            let file = fs::read_to_string(d.path().join("loop/backing_file")).unwrap_or_default();
            file.starts_with(&format!("{prefix}/"))
        });
        backed.filter_map(|d| d.file_name().into_string().ok()).collect()
    }

    /// Loop devices that stay. A launcher of another daemon has every mount of the host for a moment, and with it the device.
    pub(crate) fn lasting_loops(&self) -> Vec<String> {
        let _ = eventually("loop devices go", || Ok(self.loops().is_empty().then_some(())));
        self.loops()
    }

    /// What is there of the box of agent `id`, in words; nothing once it is deleted.
    pub(crate) fn of_agent(&self, id: &str) -> Vec<String> {
        let mut found = self.of_box(id);
        let home = self.data.join("pool/homes").join(id);
        if home.exists() {
            found.push(format!("home {}", home.display()));
        }
        if let Some(images) = self.images().get(id) {
            found.push(format!("memory images {images:?}"));
        }
        found
    }

    /// What is there of the box alone; nothing once it is stopped.
    pub(crate) fn of_box(&self, id: &str) -> Vec<String> {
        let mut found = Vec::new();
        for group in self
            .cgroups()
            .into_iter()
            .map(|g| g.join(id))
            .filter(|g| g.exists())
        {
            found.push(format!(
                "cgroup {} with processes {:?}",
                group.display(),
                members(&group)
            ));
        }
        for pid in all_processes() {
            let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            if groups.contains(id) {
                found.push(format!("process {pid}"));
            }
        }
        let run = self.run().join(id);
        if run.exists() {
            found.push(format!("run directory {}", run.display()));
        }
        let interface = format!("{}{}", self.interface_prefix(), &id[..10]);
        if Path::new("/sys/class/net").join(&interface).exists() {
            found.push(format!("interface {interface}"));
        }
        let chain = format!("chain inet dorm_{} b_{interface}", self.instance);
        if command("nft", &["list", &chain]).is_ok() {
            found.push(chain);
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        found.extend(
            mounts
                .lines()
                .filter(|l| l.contains(id))
                .map(|l| format!("mount {l}")),
        );
        found
    }

    /// What is there of daemon and boxes after an orderly end, files aside.
    pub(crate) fn of_daemon(&self) -> Result<Vec<String>> {
        let in_words = |group: &PathBuf| format!("cgroup {} with {:?}", group.display(), groups_in(group));
        let mut found: Vec<String> = self.cgroups().iter().map(in_words).collect();
        found.extend(
            self.processes()
                .iter()
                .map(|pid| format!("process {pid} of a box")),
        );
        found.extend(
            processes_naming(&self.data)?
                .iter()
                .map(|pid| format!("process {pid} ({})", words(*pid))),
        );
        found.extend(self.interfaces().iter().map(|name| format!("interface {name}")));
        if self.run().exists() {
            let (run, boxes) = (self.run(), self.run_directories());
            found.push(format!("run directory {} with {boxes:?}", run.display()));
        }
        for folder in [&self.data, &self.run()] {
            found.extend(mounts_below(folder)?.iter().map(|at| format!("mount {at}")));
        }
        found.extend(
            self.lasting_loops()
                .iter()
                .map(|name| format!("loop device {name}")),
        );
        found.extend(
            names_in(&self.data.join("tmp"))
                .iter()
                .map(|name| format!("temporary file {name}")),
        );
        found.extend(self.tables()?.iter().map(|name| format!("nft table {name}")));
        found.extend(self.claims()?.iter().map(|range| format!("claim of {range}")));
        found.extend(self.ears()?.map(|address| format!("address {address}")));
        Ok(found)
    }

    /// What a crash of the whole machine takes away: processes, cgroups, interfaces, rules, mounts.
    pub(crate) fn destroy(&self) -> Result<()> {
        eventually("the processes of boxes end", || {
            let left = self.processes();
            left.iter().for_each(|pid| kill(*pid));
            // What is frozen in version 1 of cgroups does not even die.
            for frozen in self.cgroups().iter().flat_map(|group| children(group)) {
                let _ = fs::write(frozen.join("freezer.state"), "THAWED");
            }
            Ok(left.is_empty().then_some(()))
        })?;
        for group in self.cgroups() {
            for child in children(&group).into_iter().filter(|c| c.is_dir()) {
                remove_group(&child)?;
            }
            remove_group(&group)?;
        }
        let _ = fs::remove_dir_all(self.run());
        for interface in self.interfaces() {
            // It may go by itself in this moment, with its namespace.
            let _ = command("ip", &["link", "delete", &interface]);
        }
        for table in self.tables()? {
            command("nft", &["delete", &format!("table {table}")])?;
        }
        if let Some(address) = self.ears()? {
            deafen(&address)?;
        }
        for range in self.claims()? {
            command("ip", &["route", "delete", "unreachable", &range])?;
        }
        for at in mounts_below(&self.data)?.into_iter().rev() {
            command("umount", &[&at])?;
        }
        for device in self.loops() {
            // It may go by itself in this moment.
            let _ = command("losetup", &["--detach", &format!("/dev/{device}")]);
        }
        Ok(())
    }
}

/// Takes away the address at which a daemon answered boxes' DNS queries.
pub(super) fn deafen(address: &str) -> Result<()> {
    command("ip", &["addr", "delete", address, "dev", "lo"]).map(drop)
}

/// A cgroup is busy for a moment after its last process has ended.
fn remove_group(group: &Path) -> Result<()> {
    for _ in 0..250 {
        match fs::remove_dir(group) {
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {
                std::thread::sleep(Duration::from_millis(20))
            }
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                bail!("cannot remove {}: {e}", group.display())
            }
            _ => return Ok(()),
        }
    }
    bail!("{} stays busy", group.display())
}

fn children(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect()
}

/// Names of the groups in a group.
fn groups_in(group: &Path) -> BTreeSet<String> {
    let groups = children(group).into_iter().filter(|g| g.is_dir());
    groups
        .filter_map(|g| g.file_name()?.to_str().map(str::to_owned))
        .collect()
}

/// Who a process really is, if it is there and has not ended.
fn owner(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    if field("State:")?.trim().starts_with('Z') {
        return None;
    }
    field("Uid:")?.split_whitespace().next()?.parse().ok()
}

fn members(group: &Path) -> Vec<i32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    children(directory)
        .iter()
        .filter_map(|p| p.file_name()?.to_str().map(str::to_owned))
        .collect()
}
