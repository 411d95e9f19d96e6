//! From the kernel's first process to the root disk.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dorm_proto::boot::GUEST_PATH;
use dorm_proto::vm::{INIT, LATER_MODULES, MODULES, WITH_MODULES};

use super::modules;
use crate::sys::check;

/// The first argument of the program that [`enter`] becomes.
pub(crate) const SECOND_STAGE: &str = "--machine";
/// Where the modules are kept that are loaded later.
pub(super) const KEPT_MODULES: &str = "/run/dorm/later";

const ROOT_DISK: &str = "/dev/vda";
const MODULES_DISK: &str = "/dev/vdb";
const NEW_ROOT: &str = "/root";
const DISK_WITHIN: Duration = Duration::from_secs(60);

/// Loads what the root disk needs, makes it the root file system, and becomes the guest there.
pub(crate) fn enter() -> io::Result<()> {
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        mount(kind, at, kind, libc::MS_NOSUID, "")?;
    }
    modules::load_all(MODULES);
    wait_for(ROOT_DISK)?;
    fs::create_dir_all(NEW_ROOT)?;
    mount(
        ROOT_DISK,
        NEW_ROOT,
        "ext4",
        libc::MS_NOATIME,
        "discard,noinit_itable",
    )?;
    if let Err(e) = grow() {
        // It is then smaller than it might be, and says so when it is full.
        eprintln!("the root disk does not grow: {e}");
    }
    for at in ["dev", "proc", "sys", "run", "tmp"] {
        let at = Path::new(NEW_ROOT).join(at);
        if fs::symlink_metadata(&at).is_ok_and(|found| !found.is_dir()) {
            fs::remove_file(&at)?;
        }
        fs::create_dir_all(&at)?;
    }
    fs::set_permissions(
        Path::new(NEW_ROOT).join("tmp"),
        fs::Permissions::from_mode(0o1777),
    )?;
    for at in ["/dev", "/proc", "/sys"] {
        move_mount(at, &format!("{NEW_ROOT}{at}"))?;
    }
    let run = format!("{NEW_ROOT}/run");
    mount(
        "tmpfs",
        &run,
        "tmpfs",
        libc::MS_NOSUID | libc::MS_NODEV,
        "mode=755,size=20%",
    )?;
    fs::create_dir(format!("{run}/dorm"))?;
    let guest = format!("{NEW_ROOT}{GUEST_PATH}");
    fs::copy(INIT, &guest)?;
    fs::set_permissions(&guest, fs::Permissions::from_mode(0o755))?;
    keep_modules(&format!("{NEW_ROOT}{KEPT_MODULES}"));
    empty_initial_files();

    std::env::set_current_dir(NEW_ROOT)?;
    move_mount(".", "/")?;
    std::os::unix::fs::chroot(".")?;
    std::env::set_current_dir("/")?;
    mount_rest()?;
    if let Err(e) = use_modules() {
        // A box can do much without.
        eprintln!("the kernel's modules are not there: {e}");
    }
    Err(std::process::Command::new(GUEST_PATH)
        .arg(SECOND_STAGE)
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .exec())
}

fn use_modules() -> io::Result<()> {
    let told = fs::read_to_string("/proc/cmdline")?;
    if !told.split_whitespace().any(|word| word == WITH_MODULES) {
        return Ok(());
    }
    wait_for(MODULES_DISK)?;
    modules::use_disk(MODULES_DISK)
}

/// What programs expect below /dev, and a tree of control groups for whoever makes containers of their own.
fn mount_rest() -> io::Result<()> {
    let plain = libc::MS_NOSUID | libc::MS_NOEXEC;
    fs::create_dir_all("/dev/pts")?;
    mount(
        "devpts",
        "/dev/pts",
        "devpts",
        plain,
        "ptmxmode=0666,mode=0620,gid=5",
    )?;
    fs::create_dir_all("/dev/shm")?;
    mount(
        "tmpfs",
        "/dev/shm",
        "tmpfs",
        libc::MS_NOSUID | libc::MS_NODEV,
        "mode=1777",
    )?;
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = symlink(target, link);
    }
    let groups = |options| {
        mount(
            "cgroup2",
            "/sys/fs/cgroup",
            "cgroup2",
            plain | libc::MS_NODEV,
            options,
        )
    };
    // Every run joins a group, which without the second option takes a quiet moment of all processors. Linux has it since 6.0.
    groups("nsdelegate,favordynmods").or_else(|_| groups("nsdelegate"))
}

fn keep_modules(at: &str) {
    let kept = fs::create_dir(at).and_then(|()| {
        for entry in fs::read_dir(LATER_MODULES)?.flatten() {
            fs::copy(entry.path(), Path::new(at).join(entry.file_name()))?;
        }
        Ok(())
    });
    if let Err(e) = kept {
        eprintln!("no modules are kept for later: {e}");
    }
}

/// The memory that the initial file system takes is the box's.
fn empty_initial_files() {
    for folder in [MODULES, LATER_MODULES] {
        let _ = fs::remove_dir_all(folder);
    }
    let _ = fs::remove_file(INIT);
}

fn wait_for(path: &str) -> io::Result<()> {
    let until = Instant::now() + DISK_WITHIN;
    while !Path::new(path).exists() {
        if Instant::now() > until {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("the machine has no {path}"),
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Makes the file system on the root disk as large as the disk is.
fn grow() -> io::Result<()> {
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
    let disk = fs::File::open(ROOT_DISK)?;
    let root = fs::File::open(NEW_ROOT)?;
    let mut bytes = 0u64;
    // SAFETY: the request writes one u64.
    check(unsafe { libc::ioctl(disk.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) })?;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fstatfs fills the structure, or fails and it is not read.
    let found = unsafe {
        check(libc::fstatfs(root.as_raw_fd(), found.as_mut_ptr()))?;
        found.assume_init()
    };
    let blocks = bytes / u64::try_from(found.f_bsize).unwrap_or(4096);
    // The kernel does nothing if it is as large already. What statfs tells is less, by what the file system keeps for itself.
    // SAFETY: the request reads one u64.
    check(unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) }).map(drop)
}

fn move_mount(from: &str, to: &str) -> io::Result<()> {
    mount(from, to, "", libc::MS_MOVE, "")
}

pub(super) fn mount(
    source: &str,
    at: &str,
    kind: &str,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<()> {
    let text = |text: &str| CString::new(text).map_err(io::Error::from);
    let (source, target, kind, options) = (text(source)?, text(at)?, text(kind)?, text(options)?);
    let _ = fs::create_dir_all(at);
    // SAFETY: all four are strings that end in a zero byte and live until the call returns.
    let done = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    check(done)
        .map(drop)
        .map_err(|e| io::Error::new(e.kind(), format!("mount {at}: {e}")))
}
