//! The jails on the host: of the QEMU that runs a machine, and of the file server of its volumes. Each is looked at from outside, while it works.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::needs_machines;
use crate::harness::{self, Agent, Server};
use crate::volumes::Volume;

/// What a user needs who does in a volume what root of a box may: owners, modes, and the files of others.
const OVER_FILES: u64 = 0xdb;

/// A process of a box, as the host sees it.
struct Prisoner {
    pid: i32,
}

/// The processes of a box, as the host sees it, whose names begin like this.
pub(crate) fn processes(agent: &Agent, name: &str) -> Vec<i32> {
    let all = agent.server.remains.processes_of(&agent.id).into_iter();
    let is_it = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(name));
    all.filter(is_it).collect()
}

impl Prisoner {
    fn called(agent: &Agent, name: &str) -> Result<Self> {
        match processes(agent, name)[..] {
            [pid] => Ok(Self { pid }),
            ref all => bail!("{name} is {all:?}"),
        }
    }

    fn proc(&self, path: &str) -> String {
        format!("/proc/{}/{path}", self.pid)
    }

    fn read(&self, path: &str) -> Result<String> {
        fs::read_to_string(self.proc(path)).with_context(|| self.proc(path))
    }

    /// An ordinary user of the agent's, under a filter of system calls, in namespaces of its own, of which that of the network has no way out,
    /// with no capabilities but these, nor a way to more.
    fn is_locked_up(&self, agent: &Agent, capabilities: u64) -> Result<()> {
        let users = users_of(agent)?;
        for thread in fs::read_dir(self.proc("task"))? {
            let Some(status) = harness::unless_gone(fs::read_to_string(thread?.path().join("status")))? else {
                continue;
            };
            let values = |name: &str| -> Vec<String> {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.into_iter().flat_map(str::split_whitespace).map(str::to_owned).collect()
            };
            for ids in ["Uid:", "Gid:"] {
                let ids: Vec<u32> = values(ids).iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
                ensure!(ids.len() == 4 && ids.iter().all(|id| users.contains(id)), "{ids:?} are not of {users:?}");
            }
            ensure!(values("Groups:").is_empty(), "it kept groups of the host: {status}");
            for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
                ensure!(values(set) == [format!("{capabilities:016x}")], "{set} {:?} is not {capabilities:x}", values(set));
            }
            for set in ["CapInh:", "CapAmb:"] {
                ensure!(values(set) == ["0000000000000000"], "{set} {:?}", values(set));
            }
            ensure!(values("Seccomp:") == ["2"], "it is under no filter: {status}");
        }
        for kind in ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"] {
            let (own, host) = (fs::read_link(self.proc(&format!("ns/{kind}")))?, fs::read_link(format!("/proc/self/ns/{kind}"))?);
            ensure!(own != host, "its {kind} namespace is the host's");
        }
        let devices = self.read("net/dev")?;
        let interfaces: Vec<&str> = devices.lines().skip(2).filter_map(|line| line.split(':').next()).map(str::trim).collect();
        ensure!(interfaces == ["lo"], "it has the interfaces {interfaces:?}");
        ensure!(self.read("net/route")?.lines().count() <= 1, "it has a route: {}", self.read("net/route")?);
        Ok(())
    }

    /// Everything in its root: what is mounted there, and whether it may be written to. There must be nothing beside.
    fn sees(&self) -> Result<BTreeMap<String, bool>> {
        let mounts = self.read("mountinfo")?;
        let mut mounted = BTreeMap::new();
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let (at, options) = (fields.get(4).context("a place")?, fields.get(5).context("options")?);
            mounted.insert((*at).to_owned(), options.split(',').all(|option| option != "ro"));
        }
        let writable = mounted.remove("/").context("it has no root")?;
        ensure!(!writable, "its root can be written to: {mounts}");
        let root = self.proc("root");
        let (mut folders, mut found) = (vec![String::new()], BTreeSet::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(format!("{root}{folder}"))? {
                let entry = entry?;
                let at = format!("{folder}/{}", entry.file_name().to_string_lossy());
                match mounted.contains_key(&at) || !entry.file_type()?.is_dir() {
                    true => drop(found.insert(at)),
                    false => folders.push(at),
                }
            }
        }
        ensure!(found.iter().eq(mounted.keys()), "{found:?} are there, mounted are {:?}", mounted.keys());
        Ok(mounted)
    }

    /// What it has open, sockets and the like aside.
    fn has_open(&self) -> Result<BTreeSet<String>> {
        let mut open = BTreeSet::new();
        for entry in fs::read_dir(self.proc("fd"))? {
            open.extend(harness::unless_gone(fs::read_link(entry?.path()))?.map(|what| what.to_string_lossy().into_owned()));
        }
        open.retain(|what| !["socket:", "anon_inode:", "pipe:"].iter().any(|kind| what.starts_with(kind)));
        Ok(open)
    }

    /// Which file of its file system is mounted at this place.
    fn source(&self, at: &str) -> Result<String> {
        let mounts = self.read("mountinfo")?;
        let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let line = lines.find(|fields| fields.get(4) == Some(&at)).with_context(|| format!("nothing is at {at}"))?;
        Ok(line[3].to_owned())
    }

    /// A number that the kernel tells of it, if it does.
    fn number(&self, name: &str) -> Result<Option<u32>> {
        let status = self.read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        Ok(line.map(|number| number.trim().parse()).transpose()?)
    }
}

/// The host's ids that are the box's.
fn users_of(agent: &Agent) -> Result<std::ops::Range<u32>> {
    let map = fs::read_to_string(format!("/proc/{}/uid_map", agent.pid()?))?;
    let numbers: Vec<u32> = map.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(numbers.len() == 3 && numbers[0] == 0 && numbers[1] >= 100_000 && numbers[2] == 65_536, "{map}");
    Ok(numbers[1]..numbers[1] + numbers[2])
}

pub(super) fn qemu_and_the_file_server_of_a_machine_are_locked_up() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let volume = Volume::new(&server, "vm-jail")?;
    let agent = server.agent_with("jailed", &["--isolation", "vm", "--memory", "256M", "--cpus", "1", "--volume", &volume.at("/data")])?;
    agent.root("echo there > /data/file")?.succeeded()?;

    let qemu = Prisoner::called(&agent, "qemu")?;
    ensure!(qemu.pid == agent.pid()?, "{} is not the box", qemu.pid);
    qemu.is_locked_up(&agent, 0)?;
    ensure!(qemu.number("NoNewPrivs:")? == Some(1), "a program could give it rights");
    // QEMU, what it starts from, and the two files of this machine, which are all that it may write to.
    let (own, devices) = (["/disk", "/memory"], ["/dev/null", "/dev/urandom"]);
    let files = ["/usr/bin/qemu-system-x86_64", "/kernel", "/initrd", "/modules"];
    let folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/qemu", "/usr/share/seabios"];
    let sees = qemu.sees()?;
    for (at, writable) in &sees {
        let at = at.as_str();
        let known = own.contains(&at) || devices.contains(&at) || files.contains(&at) || folders.contains(&at) || at == "/dev/kvm";
        ensure!(known, "QEMU sees {at}");
        ensure!(*writable == (own.contains(&at) || at.starts_with("/dev/")), "{at} can be written to: {writable}");
    }
    for at in own {
        let source = qemu.source(at)?;
        ensure!(source.ends_with(&format!("homes/{}{at}", agent.id)), "{at} is {source}");
    }
    let open = qemu.has_open()?;
    let known = ["/dev/null", "/dev/net/tun", "/disk", "/memory", "/modules"];
    ensure!(open.iter().all(|what| known.contains(&what.as_str())), "QEMU has {open:?} open");

    let files = Prisoner::called(&agent, "dorm-volumes")?;
    files.is_locked_up(&agent, OVER_FILES)?;
    let sees: Vec<String> = files.sees()?.into_keys().collect();
    ensure!(sees == ["/dev/null", "/files-0"], "the file server sees {sees:?}");
    let volume = files.source("/files-0")?;
    ensure!(Path::new(&volume).parent().is_some_and(|folder| folder.ends_with("volumes")), "it serves {volume}");
    let open = files.has_open()?;
    ensure!(open.iter().all(|what| what == "/dev/null" || what.starts_with("/files-0")), "the file server has {open:?} open");
    // It is under one of its own, and QEMU under that of a box and the one that it sets for itself.
    if let (Some(of_qemu), Some(of_server)) = (qemu.number("Seccomp_filters:")?, files.number("Seccomp_filters:")?) {
        ensure!(of_qemu > of_server, "QEMU is under {of_qemu} filters, and the file server under {of_server}");
    }
    Ok(())
}
