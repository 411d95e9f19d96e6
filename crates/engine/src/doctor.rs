//! What this host has of what dorm needs, by trying it.

use std::collections::BTreeMap;
use std::path::Path;

use dorm_sys::cgroup::{Hierarchy, Version};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// Something optional is missing.
    Warn,
    /// dorm does not work without it.
    Missing,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    pub found: String,
    /// What it is needed for.
    pub enables: String,
    /// How to get it, where it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// What an engine took here when it was last measured, as it is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// Milliseconds that agents with one isolation took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// A new agent, up to the end of its first command.
    pub boot: f64,
    /// A command.
    pub exec: f64,
    pub wake_from_standby: f64,
    /// `None` where memory cannot be put to disk.
    pub wake_from_disk: Option<f64>,
}

/// What was measured of each engine, with what was found of it then.
type Kept = BTreeMap<String, (String, Measured)>;

const KEPT: &str = "measured.json";

/// Keeps what was measured of engines for the next [`check`], by their names. What was kept of others stays.
pub fn keep(data: &Path, checks: &[Check]) -> std::io::Result<()> {
    let mut kept = kept(data);
    for check in checks {
        if let Some(measured) = &check.measured {
            kept.insert(check.name.clone(), (check.found.clone(), measured.clone()));
        }
    }
    let unfinished = tempfile::NamedTempFile::new_in(data)?;
    serde_json::to_writer(&unfinished, &kept)?;
    unfinished.persist(data.join(KEPT)).map_err(|e| e.error)?;
    Ok(())
}

fn kept(data: &Path) -> Kept {
    let text = std::fs::read(data.join(KEPT)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

struct Requirement {
    name: &'static str,
    required: bool,
    enables: &'static str,
    fix: &'static str,
    look: fn(&Path) -> Result<String, String>,
}

const REQUIREMENTS: &[Requirement] = &[
    Requirement {
        name: "root",
        required: true,
        enables: "namespaces, cgroups, mounts and interfaces of boxes",
        fix: "run dorm as root (sudo dorm …)",
        look: |_| match rustix::process::geteuid().is_root() {
            true => Ok("uid 0".to_owned()),
            false => Err(format!("uid {}", rustix::process::geteuid().as_raw())),
        },
    },
    Requirement {
        name: "kernel",
        required: true,
        enables: "idmapped mounts of homes (5.15 or newer)",
        fix: "upgrade to a kernel of version 5.15 or newer",
        look: |_| kernel(),
    },
    Requirement {
        name: "namespaces",
        required: true,
        enables: "isolation of boxes",
        fix: "use a kernel with user, pid, net, mount, ipc, uts, cgroup and time namespaces, and user.max_user_namespaces above 0",
        look: |_| namespaces(),
    },
    Requirement {
        name: "cgroups",
        required: true,
        enables: "limits of cpu, memory, processes and io",
        fix: "mount cgroup2 on /sys/fs/cgroup, or the version 1 controllers below it; a kernel may need the parameter cgroup_enable=memory",
        look: |_| match Hierarchy::version() {
            Ok(Version::V1) => Ok("version 1".to_owned()),
            Ok(Version::V2) => Ok("version 2".to_owned()),
            Err(error) => Err(error.to_string()),
        },
    },
    Requirement {
        name: "seccomp",
        required: true,
        enables: "the system call filter of boxes",
        fix: "use a kernel with CONFIG_SECCOMP_FILTER",
        look: |_| exists("/proc/sys/kernel/seccomp/actions_avail"),
    },
    Requirement {
        name: "btrfs",
        required: true,
        enables: "homes that are made and copied in constant time",
        fix: "use a kernel with btrfs (modprobe btrfs)",
        look: |_| filesystem("btrfs"),
    },
    Requirement {
        name: "mkfs.btrfs",
        required: true,
        enables: "making the pool, and templates as files",
        fix: "apt-get install btrfs-progs",
        look: |data| match on_btrfs(data) {
            true => program("btrfs"),
            false => program("mkfs.btrfs"),
        },
    },
    Requirement {
        name: "loop devices",
        required: true,
        enables: "a pool in a file, where the data directory is not on btrfs",
        fix: "use a kernel with loop devices (modprobe loop), or put the data directory on btrfs",
        look: |data| match on_btrfs(data) {
            true => Ok("not needed: the data directory is on btrfs".to_owned()),
            false => exists("/dev/loop-control"),
        },
    },
    Requirement {
        name: "nft",
        required: true,
        enables: "the firewall between boxes, host and private networks",
        fix: "apt-get install nftables",
        look: |_| program("nft"),
    },
    Requirement {
        name: "mmdebstrap",
        required: false,
        enables: "templates from nothing: dorm template build base",
        fix: "apt-get install mmdebstrap",
        look: |_| program("mmdebstrap"),
    },
    Requirement {
        name: "container",
        required: true,
        enables: "agents with --isolation container: boxes on the host's own kernel",
        fix: "see namespaces, cgroups and seccomp",
        look: |_| container(),
    },
    Requirement {
        name: "criu",
        required: false,
        enables: "hibernation of containers: memory and running processes on disk",
        fix: "scripts/setup-criu fetches a copy of its own; a system's criu of version 4.2 or newer serves as well",
        look: |data| {
            crate::criu::find(data, Path::new("/proc/self/exe"))
                .map(|criu| format!("version {}", criu.version))
        },
    },
    Requirement {
        name: "vm",
        required: false,
        enables: "agents with --isolation vm: boxes as virtual machines",
        fix: "scripts/setup-vm installs QEMU and fetches a kernel",
        look: crate::vm::look,
    },
    Requirement {
        name: "gvisor",
        required: false,
        enables: "agents behind a kernel in user space: dorm new --isolation gvisor",
        fix: "scripts/setup-gvisor fetches a copy of its own; a system's runsc of 20240729 or newer serves as well",
        look: |data| {
            let found = crate::gvisor::find::find(data)?;
            let (version, platform) = (found.version, found.platform.name());
            Ok(format!(
                "version {version}, {platform}, a program runs in {} ms",
                found.millis
            ))
        },
    },
    Requirement {
        name: "resolver",
        required: false,
        enables: "names in boxes",
        fix: "set network.nameservers in the configuration",
        look: |_| match crate::network::host_resolvers() {
            found if found.is_empty() => Err("none that boxes could use".to_owned()),
            found => Ok(found
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")),
        },
    },
    Requirement {
        name: "disk space",
        required: false,
        enables: "homes and templates (5 GiB to begin with)",
        fix: "free some space, or choose another data directory with --data",
        look: space,
    },
];

/// Looks at everything. `data` is the data directory, which need not exist yet.
pub fn check(data: &Path) -> Vec<Check> {
    let mut kept = kept(data);
    REQUIREMENTS
        .iter()
        .map(|requirement| {
            let looked = (requirement.look)(data);
            let status = match (&looked, requirement.required) {
                (Ok(_), _) => Status::Ok,
                (Err(_), false) => Status::Warn,
                (Err(_), true) => Status::Missing,
            };
            let fix = looked.is_err().then(|| requirement.fix.to_owned());
            let found = looked.unwrap_or_else(|missing| missing);
            let measured = kept.remove(requirement.name).filter(|(then, _)| *then == found);
            Check {
                name: requirement.name.to_owned(),
                status,
                fix,
                found,
                enables: requirement.enables.to_owned(),
                measured: measured.map(|(_, measured)| measured),
            }
        })
        .collect()
}

fn kernel() -> Result<String, String> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut parts = release
        .split(['.', '-'])
        .map(|part| part.parse::<u32>().unwrap_or_default());
    let version = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if version >= (5, 15) {
        Ok(release)
    } else {
        Err(release)
    }
}

fn container() -> Result<String, String> {
    namespaces()?;
    Hierarchy::version().map_err(|e| e.to_string())?;
    exists("/proc/sys/kernel/seccomp/actions_avail")?;
    Ok(format!("Linux {}, the processor itself", kernel()?))
}

fn namespaces() -> Result<String, String> {
    let kinds = ["user", "pid", "net", "mnt", "ipc", "uts", "cgroup", "time"];
    let missing: Vec<_> = kinds
        .into_iter()
        .filter(|kind| !Path::new("/proc/self/ns").join(kind).exists())
        .collect();
    if !missing.is_empty() {
        return Err(format!("no {} namespace", missing.join(", ")));
    }
    match std::fs::read_to_string("/proc/sys/user/max_user_namespaces") {
        Ok(max) if max.trim() == "0" => Err("user.max_user_namespaces is 0".to_owned()),
        _ => Ok("all".to_owned()),
    }
}

/// Asked for by opening it, since that has the kernel load a module that nobody needed yet.
fn filesystem(name: &str) -> Result<String, String> {
    let known = || {
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        known
            .lines()
            .any(|line| line.split_whitespace().last() == Some(name))
    };
    match rustix::mount::fsopen(name, rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(_) => Ok("in the kernel".to_owned()),
        Err(_) if known() => Ok("in the kernel".to_owned()),
        Err(rustix::io::Errno::PERM) => {
            Err("not in /proc/filesystems; only root can have it loaded".to_owned())
        }
        Err(error) => Err(format!("not in the kernel, nor in its modules: {error}")),
    }
}

fn exists(path: &str) -> Result<String, String> {
    if Path::new(path).exists() {
        Ok(path.to_owned())
    } else {
        Err(format!("no {path}"))
    }
}

fn program(name: &str) -> Result<String, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| file.is_file());
    found
        .map(|file| file.display().to_string())
        .ok_or_else(|| "not on the PATH".to_owned())
}

/// The nearest ancestor that exists says what the data directory will be on.
fn existing(data: &Path) -> &Path {
    data.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
}

fn on_btrfs(data: &Path) -> bool {
    use std::os::fd::AsFd;
    std::fs::File::open(existing(data))
        .is_ok_and(|file| dorm_sys::btrfs::is_btrfs(file.as_fd()).unwrap_or(false))
}

fn space(data: &Path) -> Result<String, String> {
    const WANTED: u64 = 5 << 30;
    let stat = rustix::fs::statvfs(existing(data)).map_err(|e| e.to_string())?;
    let free = stat.f_bavail * stat.f_frsize;
    let text = format!("{} GiB free below {}", free >> 30, existing(data).display());
    if free >= WANTED { Ok(text) } else { Err(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_told_until_something_else_is_found() {
        let data = tempfile::tempdir().unwrap();
        let measured = Measured {
            boot: 20.0,
            exec: 3.0,
            wake_from_standby: 2.5,
            wake_from_disk: None,
        };
        let of = |name: &str| {
            check(data.path())
                .into_iter()
                .find(|check| check.name == name)
                .unwrap()
        };
        let mut engine = of("container");
        assert_eq!(engine.measured, None);
        engine.measured = Some(measured.clone());
        keep(data.path(), &[engine.clone(), of("root")]).unwrap();
        assert_eq!(of("container").measured, Some(measured));
        assert_eq!(of("root").measured, None);
        engine.found = "another kernel".to_owned();
        keep(data.path(), &[engine]).unwrap();
        assert_eq!(of("container").measured, None);
    }
}
