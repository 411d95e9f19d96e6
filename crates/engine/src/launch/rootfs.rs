//! What process 1 does to its own namespaces before it becomes the guest.
//!
//! All of it runs without any privilege on the host: root here is an ordinary user outside. Paths are looked up only
//! after the pivot, so that whatever the box left in its home leads no further than the home.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use dorm_sys::mount::Detached;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{Gid, Uid};

use super::{Failure, Step};

/// Devices of the host that every box has, under /dev.
pub(crate) const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Hidden, as container runtimes hide them: they tell of the host, or act on it.
const MASKED: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// Those of [`MASKED`] that are files on this host, and so are covered by /dev/null.
pub(crate) fn masked_files() -> impl Iterator<Item = &'static str> {
    MASKED
        .into_iter()
        .filter(|path| fs::symlink_metadata(path).is_ok_and(|found| !found.is_dir()))
}

/// Readable only.
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// Pseudoterminals of one box. The kernel has 4096 for the whole host, of which the host keeps 1024 for itself.
const TERMINALS: u32 = 256;
const PTS: &str = "ptmxmode=0666,mode=0620,gid=5";

/// Where the contents of /run are.
const RUN: &str = "/dev/.run";

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Bytes of memory.
const SHORT_WORK: u64 = 2 << 30;

/// Raised by the launcher, which may: a box may lower them and raise them up to these again.
pub(super) fn raise_limits() -> io::Result<()> {
    let set = |resource, soft, hard| {
        rustix::process::setrlimit(
            resource,
            Rlimit {
                current: Some(soft),
                maximum: Some(hard),
            },
        )
    };
    // Without CAP_SYS_RESOURCE the daemon's own limit is the most a box can have.
    if set(Resource::Nofile, 65_536, 1_048_576).is_err() {
        let own = rustix::process::getrlimit(Resource::Nofile)
            .maximum
            .unwrap_or(65_536);
        set(Resource::Nofile, own.min(65_536), own)?;
    }
    set(Resource::Core, 0, 0)?;
    // When the whole host is out of memory, a box goes before the daemon does.
    fs::write("/proc/self/oom_score_adj", "300")
}

/// For short work on files that a box chose. It is done by one thread that maps no files, so that this is far above what honest files take.
pub(super) fn limit_memory() -> io::Result<()> {
    let most = Rlimit {
        current: Some(SHORT_WORK),
        maximum: Some(SHORT_WORK),
    };
    Ok(rustix::process::setrlimit(Resource::As, most)?)
}

/// Leaves the launcher, in its own mount namespace, in a directory that process 1, which has no rights on the
/// host's directories, can reach as its working directory.
pub(super) fn stage() -> io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    rustix::mount::mount(
        "tmpfs",
        "/tmp",
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        c"mode=755,size=64k",
    )?;
    fs::create_dir("/tmp/root")?;
    std::env::set_current_dir("/tmp")
}

pub(super) fn become_root() -> io::Result<()> {
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    Ok(())
}

/// Makes the home the root filesystem, with everything mounted that a guest needs.
pub(super) fn enter(
    mounts: Vec<Detached>,
    hostname: &str,
    boot_id: &str,
    tmpfs_bytes: u64,
    volumes: &[&str],
) -> Result<(), Failure> {
    rustix::process::setsid().step("make a session")?;
    rustix::system::sethostname(hostname.as_bytes()).step("set the host name")?;
    let mut mounts = mounts.into_iter();
    let host = pivot(mounts.next())?;

    let plain = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", plain, "")?;
    // A host that is itself a container may hide parts of its /sys; then a box has none.
    if mount("sysfs", "/sys", plain | MountFlags::RDONLY, "").is_err() {
        mount("tmpfs", "/sys", plain | MountFlags::RDONLY, "size=4k,mode=555")?;
    }
    // One filesystem for all that is in memory: a memory image is the faster made and brought back the fewer there are.
    mount(
        "tmpfs",
        "/dev",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        &format!("mode=755,size={tmpfs_bytes}"),
    )?;
    mount(
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        &format!("newinstance,max={TERMINALS},{PTS}"),
    )?;
    make_dir("/dev/shm").step("make /dev/shm")?;
    fs::set_permissions("/dev/shm", fs::Permissions::from_mode(0o1777)).step("make /dev/shm")?;
    bind_part(RUN, "/run")?;
    leave(host)?;

    make_dir("/run/dorm").step("make /run/dorm")?;
    attach(mounts.next(), dorm_proto::boot::GUEST_PATH)?;
    for device in DEVICES {
        attach(mounts.next(), &format!("/dev/{device}"))?;
    }
    for (link, target) in [
        ("/dev/ptmx", "pts/ptmx"),
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, link).step(&format!("make {link}"))?;
    }
    for at in volumes {
        make_dir(at).step(&format!("make {at}"))?;
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let volume = mounts.next().ok_or_else(missing);
        volume
            .and_then(|volume| volume.attach(at))
            .step(&format!("attach the volume {at}"))?;
    }
    make_dir("/tmp").step("make /tmp")?;
    let _ = fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777));
    hide(boot_id)
}

/// Makes the home the root filesystem and nothing more: for work on its files.
pub(super) fn enter_bare(mounts: Vec<Detached>) -> Result<(), Failure> {
    let host = pivot(mounts.into_iter().next())?;
    leave(host)
}

/// Standard input, output and error of the guest are the box's own /dev/null.
pub(super) fn detach_stdio() -> io::Result<()> {
    replace_stdio(&open_null()?)
}

pub(super) fn open_null() -> io::Result<rustix::fd::OwnedFd> {
    Ok(rustix::fs::open(
        "/dev/null",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

pub(super) fn replace_stdio(null: &rustix::fd::OwnedFd) -> io::Result<()> {
    rustix::stdio::dup2_stdin(null)?;
    rustix::stdio::dup2_stdout(null)?;
    rustix::stdio::dup2_stderr(null)?;
    Ok(())
}

/// Makes the directory `root` the root file system, as it is.
pub(super) fn pivot_and_leave() -> Result<(), Failure> {
    let host = pivot_into_root()?;
    leave(host)
}

/// Attaches the home to the staging directory and pivots into it. The host's root stays mounted below until
/// [`leave`], since the kernel lets a user namespace mount /proc only while it sees one.
fn pivot(home: Option<Detached>) -> Result<rustix::fd::OwnedFd, Failure> {
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .step("make all mounts private")?;
    home.ok_or_else(missing)
        .and_then(|home| home.attach("root"))
        .step("attach the home")?;
    pivot_into_root()
}

fn pivot_into_root() -> Result<rustix::fd::OwnedFd, Failure> {
    let host = rustix::fs::open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .step("open the host's root")?;
    std::env::set_current_dir("root").step("enter the home")?;
    rustix::process::pivot_root(".", ".").step("pivot into the home")?;
    // Working directory and root are named anew, since the stacked old root would shadow them.
    std::env::set_current_dir("/").step("enter the new root")?;
    Ok(host)
}

fn leave(host: rustix::fd::OwnedFd) -> Result<(), Failure> {
    rustix::process::fchdir(&host).step("turn to the host's root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).step("leave the host's root")?;
    std::env::set_current_dir("/").step("enter the new root")
}

fn mount(kind: &str, at: &str, flags: MountFlags, options: &str) -> Result<(), Failure> {
    let options = std::ffi::CString::new(options)
        .map_err(io::Error::from)
        .step("mount")?;
    clear_place(at)?;
    rustix::mount::mount(kind, at, kind, flags, Some(options.as_c_str())).step(&format!("mount {at}"))
}

/// Makes the directory `at`. A link, which only an imported image can have here, might lead elsewhere by the time that
/// parts are hidden.
fn clear_place(at: &str) -> Result<(), Failure> {
    if fs::symlink_metadata(at).is_ok_and(|found| !found.is_dir()) {
        fs::remove_file(at).step(&format!("clear {at}"))?;
    }
    make_dir(at).step(&format!("make {at}"))
}

/// Mounts a folder of /dev elsewhere.
fn bind_part(folder: &str, at: &str) -> Result<(), Failure> {
    use dorm_sys::mount::{NODEV, NOEXEC, NOSUID};
    make_dir(folder).step(&format!("make {folder}"))?;
    clear_place(at)?;
    let bound = Detached::bind(Path::new(folder)).and_then(|part| {
        part.set(NOSUID | NODEV, NOEXEC)?;
        part.attach(at)
    });
    bound.step(&format!("mount {at}"))
}

fn attach(mount: Option<Detached>, at: &str) -> Result<(), Failure> {
    let file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o644)
        .open(at);
    file.step(&format!("make {at}"))?;
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    mount
        .ok_or_else(missing)
        .and_then(|mount| mount.attach(at))
        .step(&format!("attach {at}"))
}

fn make_dir(at: &str) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o755).recursive(true).create(at)
}

fn hide(boot_id: &str) -> Result<(), Failure> {
    const EMPTY: &str = "/run/dorm/empty";
    fs::DirBuilder::new()
        .mode(0o555)
        .create(EMPTY)
        .step("make an empty directory")?;
    for path in MASKED {
        let Ok(found) = fs::symlink_metadata(path) else {
            continue;
        };
        let cover = if found.is_dir() { EMPTY } else { "/dev/null" };
        bind_read_only(Path::new(cover), path)?;
    }
    for path in READ_ONLY {
        if Path::new(path).exists() {
            bind_read_only(Path::new(path), path)?;
        }
    }
    let own = "/run/dorm/boot_id";
    fs::write(own, format!("{boot_id}\n")).step("write the boot id")?;
    fs::set_permissions(own, fs::Permissions::from_mode(0o444)).step("write the boot id")?;
    bind_read_only(Path::new(own), BOOT_ID)
}

fn bind_read_only(source: &Path, at: &str) -> Result<(), Failure> {
    use dorm_sys::mount::{NODEV, NOEXEC, NOSUID, RDONLY};
    // A cover of the device /dev/null must stay one.
    let nodev = if source == Path::new("/dev/null") {
        0
    } else {
        NODEV
    };
    let covered = Detached::bind(source).and_then(|cover| {
        cover.set(RDONLY | NOSUID | NOEXEC | nodev, 0)?;
        cover.attach(at)
    });
    covered.step(&format!("cover {at}"))
}
