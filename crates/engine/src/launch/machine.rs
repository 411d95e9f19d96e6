//! The jail of a virtual machine's process.
//!
//! QEMU parses what the machine's kernel does, so it is treated like the box itself: all namespaces of a box, an ordinary
//! user outside, no capability inside, a network namespace without any interface, and a root file system that has
//! what the program needs to start and the files of this one machine.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use dorm_sys::confine::SystemCallFilter;
use dorm_sys::mount::{Detached, NODEV, NOEXEC, NOSUID, RDONLY};
use rustix::fs::{FileType, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use super::{Failure, Never, Step, bind, daemon, rootfs};
use crate::host::trial::KVM;

/// Of the host's, as far as it has them: libraries, and the firmware of machines.
const SHARED: [&str; 6] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/qemu",
    "/usr/share/seabios",
];
pub(super) const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
/// Where it is on every host, as it finds its firmware by its own place.
const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";

/// Where the process finds the files of its machine.
pub(crate) const DISK: &str = "/disk";
/// Where one finds the files of a home that is no machine's yet.
pub(super) const FILES: &str = "/files";
pub(crate) const MEMORY: &str = "/memory";
pub(crate) const KERNEL: &str = "/kernel";
pub(crate) const INITRD: &str = "/initrd";
pub(crate) const MODULES: &str = "/modules";
/// The descriptor of the machine's network interface.
pub(crate) const TAP_FD: i32 = 3;

/// What a machine is started with, beside its disk and its memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    /// A disk with the modules of the kernel.
    pub(crate) modules: Option<PathBuf>,
    /// Whether it may use the processor's own means.
    pub(crate) kvm: bool,
    /// The name of the network interface that is made for it, on the host.
    pub(crate) interface: String,
}

impl Machine {
    /// What the process sees of the host, in the order in which it is mounted. Nothing of it can be written.
    pub(super) fn bind_mounts(&self, user: u32) -> io::Result<Vec<Detached>> {
        let mut mounts = vec![
            bind(&self.program, RDONLY | NOSUID | NODEV, NOEXEC)?,
            bind(&self.kernel, RDONLY | NOSUID | NODEV | NOEXEC, 0)?,
            bind(&self.initrd, RDONLY | NOSUID | NODEV | NOEXEC, 0)?,
        ];
        if let Some(modules) = &self.modules {
            mounts.push(bind(modules, RDONLY | NOSUID | NODEV | NOEXEC, 0)?);
        }
        if self.kvm {
            mounts.push(device_of(Path::new(KVM), user)?);
        }
        mounts.extend(shared_mounts()?);
        Ok(mounts)
    }

    /// The last steps: `mounts` are the disk, those above, and the memory.
    pub(super) fn enter(
        &self,
        mounts: Vec<Detached>,
        filter: &SystemCallFilter,
        tap: &OwnedFd,
    ) -> Result<Never, Failure> {
        rustix::process::setsid().step("make a session")?;
        let places = [DISK, PROGRAM, KERNEL, INITRD]
            .into_iter()
            .chain(self.modules.iter().map(|_| MODULES))
            .chain(self.kvm.then_some(KVM))
            .chain(DEVICES)
            .chain(shared())
            .chain([MEMORY]);
        make_root(places.zip(mounts))?;
        // What QEMU complains about is for the daemon.
        let complaints = rustix::io::dup(daemon()).step("hand over the way to complain")?;
        rootfs::detach_stdio().step("detach standard input and output")?;
        rustix::stdio::dup2_stderr(&complaints).step("hand over the way to complain")?;
        // From a number far off, as the one it gets must be a copy: only copies stay open in the program.
        let tap = rustix::io::fcntl_dupfd_cloexec(tap, 64).step("hand over the interface")?;
        dorm_sys::process::place_fd(tap.as_fd(), TAP_FD).step("hand over the interface")?;
        dorm_sys::process::close_on_exec_from(TAP_FD as u32 + 1).step("close descriptors")?;
        dorm_sys::confine::bound_capabilities(CapabilitySet::empty()).step("drop capabilities")?;
        filter.install().step("install the system call filter")?;
        let failed = std::process::Command::new(PROGRAM)
            .args(&self.arguments)
            .env_clear()
            .exec();
        Err(failed).step("execute QEMU")
    }
}

pub(super) fn shared() -> impl Iterator<Item = &'static str> {
    // Asked of the host before the pivot, and of the new root not at all.
    SHARED.into_iter().filter(|folder| Path::new(folder).is_dir())
}

/// A device of the host's under another owner: who may use the original is for the host to say.
fn device_of(device: &Path, user: u32) -> io::Result<Detached> {
    let found = fs::metadata(device)?;
    let folder = tempfile::tempdir()?;
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", folder.path(), "tmpfs", flags, c"mode=700,size=4k")?;
    let made = (|| {
        let node = folder.path().join("device");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &node,
            FileType::CharacterDevice,
            mode,
            found.rdev(),
        )?;
        std::os::unix::fs::chown(&node, Some(user), Some(user))?;
        bind(&node, NOSUID | NOEXEC, NODEV)
    })();
    // What is attached nowhere stays until nobody has it.
    rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::DETACH)?;
    made
}

/// [`DEVICES`] and what is [`shared`], in this order.
pub(super) fn shared_mounts() -> io::Result<Vec<Detached>> {
    let devices = DEVICES.map(|device| bind(Path::new(device), NOSUID | NOEXEC, NODEV));
    let folders = shared().map(|folder| bind(Path::new(folder), RDONLY | NOSUID | NODEV, NOEXEC));
    devices.into_iter().chain(folders).collect()
}

/// A root file system with `mounts` and nothing else.
pub(super) fn make_root<'a>(mounts: impl Iterator<Item = (&'a str, Detached)>) -> Result<(), Failure> {
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .step("make all mounts private")?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", "root", "tmpfs", flags, c"mode=755,size=64k").step("make a root")?;
    for (place, mount) in mounts {
        let at = Path::new("root").join(place.trim_start_matches('/'));
        let made = match SHARED.contains(&place) || place.starts_with(FILES) {
            true => fs::create_dir_all(&at),
            false => at
                .parent()
                .map_or(Ok(()), fs::create_dir_all)
                .and_then(|()| fs::File::create(&at).map(drop)),
        };
        made.step(&format!("make {place}"))?;
        mount.attach(&at).step(&format!("attach {place}"))?;
    }
    rootfs::pivot_and_leave()?;
    rustix::mount::mount_remount("/", flags | MountFlags::RDONLY, c"").step("seal the root")
}
