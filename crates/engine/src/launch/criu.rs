//! The launcher as CRIU, and as the one who sets its stage.
//!
//! CRIU takes milliseconds to start, so that one waits for the next box that is to be restored. What it needs of that box's,
//! foremost the home, is mounted into its namespace by another launcher when it is known.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use super::{Failure, Report, Spec, Step, bind, bind_mapped, command_line, report, rootfs};

/// Where a home is mounted for CRIU to restore a box on, in a mount namespace of its own.
pub(crate) const STAGED_ROOT: &str = "/tmp/root";
/// Where it finds the box's guest.
pub(crate) const STAGED_GUEST: &str = "/tmp/guest";

/// Where it finds the box's volumes, in the order in which the box has them.
pub(crate) fn staged_volume(number: usize) -> String {
    format!("/tmp/volume-{number}")
}

/// Directories that CRIU, or a program that it starts, looks into.
const NEEDED: [&str; 8] = ["/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sys", "/usr"];

pub(super) fn execute(
    command: &[PathBuf],
    knowledge: Option<&Path>,
    user: u32,
    ahead: bool,
) -> Result<(), Failure> {
    let knowledge = knowledge.and_then(|path| fs::read(path).ok());
    dorm_sys::namespace::unshare_mounts().step("make a mount namespace")?;
    if ahead {
        let_go(command).step("let other mounts go")?;
    }
    rootfs::stage().step("make a place for the root filesystem")?;
    rustix::mount::mount(
        "tmpfs",
        "/run",
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        c"mode=700,size=1m",
    )
    .step("mount /run")?;
    if let Some(knowledge) = knowledge {
        fs::write("/run/criu.kdat", knowledge).step("hand over what criu knows")?;
    }
    std::env::set_current_dir("/").step("leave the staging directory")?;
    if user != 0 {
        dorm_sys::confine::become_user_with_capabilities(user)
            .step("become the owner of the box's namespaces")?;
    }
    report(&Report::Executing);
    Err(exec(command)).step("execute criu")
}

/// Lets go of all mounts but those that CRIU needs, so that nobody who unmounts one has to wait until this CRIU has been used.
fn let_go(command: &[PathBuf]) -> io::Result<()> {
    let needed: Vec<&Path> = NEEDED
        .map(Path::new)
        .into_iter()
        .chain(command.iter().map(PathBuf::as_path))
        .collect();
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    for mount in dorm_sys::mount::mounted()?.iter().rev() {
        let keep = |path: &&Path| path.starts_with(&mount.at) || mount.at.starts_with(path);
        if !needed.iter().any(keep) {
            // One that is hidden below another cannot be named.
            let _ = rustix::mount::unmount(&mount.at, UnmountFlags::DETACH);
        }
    }
    Ok(())
}

/// Mounts the home, the guest and the volumes of a box in the namespace of the process `criu`.
pub(super) fn stage(criu: i32, guest: &Path, spec: &Spec) -> Result<(), Failure> {
    use dorm_sys::mount::{NODEV, NOEXEC, NOSUID, RDONLY};
    let ids = dorm_sys::namespace::user_namespace(spec.uid_base).step("make a user namespace")?;
    let home = bind_mapped(&spec.home, ids.as_fd()).step("bind the home")?;
    let mut volumes = Vec::new();
    for volume in &spec.volumes {
        volumes.push(bind_mapped(&volume.source, ids.as_fd()).step("bind a volume")?);
    }
    let guest = bind(guest, RDONLY | NOSUID | NODEV, NOEXEC).step("bind the guest")?;

    let namespace = dorm_sys::namespace::open(criu, "mnt").step("find criu")?;
    dorm_sys::namespace::enter_mounts(namespace.as_fd()).step("go to criu")?;
    for (number, volume) in volumes.into_iter().enumerate() {
        let at = staged_volume(number);
        fs::create_dir(&at).step("attach a volume")?;
        volume.attach(&at).step("attach a volume")?;
    }
    home.attach(STAGED_ROOT).step("attach the home")?;
    fs::File::create(STAGED_GUEST).step("attach the guest")?;
    guest.attach(STAGED_GUEST).step("attach the guest")
}

fn exec(command: &[PathBuf]) -> io::Error {
    let mut criu = match command_line(command) {
        Ok(criu) => criu,
        Err(error) => return error,
    };
    criu.args(["swrk", "0"])
        // What it has to say of a call is in that call's log.
        .stderr(std::process::Stdio::null())
        // Where it looks for what it knows of this kernel if it is not root.
        .env("XDG_RUNTIME_DIR", "/run")
        .exec()
}
