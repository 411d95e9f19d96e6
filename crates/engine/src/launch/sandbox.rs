//! The launcher as runsc.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::mount::{MountFlags, MountPropagationFlags};

use super::{Failure, Report, Spec, Step, bind, bind_mapped, command_line, daemon, receive, report};

/// What is where in the run directory of a box. What is staged is seen in the mount namespace of its launcher alone.
#[derive(Debug, Clone)]
pub(crate) struct Staged(pub(crate) PathBuf);

impl Staged {
    fn stage(&self) -> PathBuf {
        self.0.join("stage")
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.stage().join("root")
    }

    pub(crate) fn guest(&self) -> PathBuf {
        self.stage().join("guest")
    }

    /// In the order in which the box has them.
    pub(crate) fn volume(&self, number: usize) -> PathBuf {
        self.stage().join(format!("volume-{number}"))
    }

    /// What the guest reads, and is told in turn.
    pub(crate) fn input(&self) -> PathBuf {
        self.0.join("boot.json")
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.0.join("said")
    }

    /// What runsc has to say.
    pub(crate) fn errors(&self) -> PathBuf {
        self.0.join("errors")
    }
}

pub(super) fn execute(
    command: &[PathBuf],
    guest: &Path,
    directory: &Path,
    spec: &Spec,
) -> Result<(), Failure> {
    dorm_sys::namespace::unshare_network().step("make a network namespace")?;
    report(&Report::Pid(std::process::id().cast_signed()));
    stage(guest, directory, spec)?;
    receive(daemon()).step("wait for the network")?;
    rustix::process::umask(Mode::from_raw_mode(0o077));
    connect_stdio(&Staged(directory.to_owned())).step("open standard input and output")?;
    std::env::set_current_dir("/").step("enter the root")?;
    let mut runsc = command_line(command).step("find runsc")?;
    Err(runsc.exec()).step("execute runsc")
}

fn stage(guest: &Path, directory: &Path, spec: &Spec) -> Result<(), Failure> {
    use dorm_sys::mount::{NODEV, NOEXEC, NOSUID, RDONLY};
    dorm_sys::namespace::unshare_mounts().step("make a mount namespace")?;
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .step("make all mounts private")?;
    let ids = dorm_sys::namespace::user_namespace(spec.uid_base).step("make a user namespace")?;
    let home = bind_mapped(&spec.home, ids.as_fd()).step("bind the home")?;
    let staged = Staged(directory.to_owned());
    let tmpfs = |at: &Path, options| {
        rustix::mount::mount(
            "tmpfs",
            at,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            Some(options),
        )
    };
    fs::create_dir_all(staged.stage()).step("make a stage")?;
    tmpfs(&staged.stage(), c"mode=755,size=64k").step("make a stage")?;
    fs::create_dir(staged.root()).step("attach the home")?;
    home.attach(staged.root()).step("attach the home")?;
    fs::File::create(staged.guest()).step("attach the guest")?;
    bind(guest, RDONLY | NOSUID | NODEV, NOEXEC)
        .and_then(|guest| guest.attach(staged.guest()))
        .step("attach the guest")?;
    for (number, volume) in spec.volumes.iter().enumerate() {
        let at = staged.volume(number);
        fs::create_dir(&at)
            .and_then(|()| bind_mapped(&volume.source, ids.as_fd())?.attach(at))
            .step("attach a volume")?;
    }
    // runsc takes a network namespace that has this for the host's own, and leaves that alone; newer kernels have it in all.
    if Path::new("/proc/sys/net/core/rmem_default").exists() {
        tmpfs(Path::new("/proc/sys/net"), c"mode=755,size=4k").step("cover /proc/sys/net")?;
    }
    Ok(())
}

fn connect_stdio(staged: &Staged) -> io::Result<()> {
    rustix::stdio::dup2_stdin(fs::File::open(staged.input())?)?;
    rustix::stdio::dup2_stdout(fs::OpenOptions::new().write(true).open(staged.output())?)?;
    let errors = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(staged.errors())?;
    rustix::stdio::dup2_stderr(errors)?;
    Ok(())
}
