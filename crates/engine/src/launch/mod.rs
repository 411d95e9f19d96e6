//! The launcher: a short-lived process of the same binary, with a single thread, that clones into the
//! namespaces of a box, prepares them, and becomes the guest.
//!
//! ```text
//!  daemon                 launcher                    process 1 of the box
//!    │ spawn ────────────────▶│
//!    │ Preparation, filter ──▶│ join cgroup
//!    │◀───────────── prepared │
//!    ┆ (a spare launcher waits here until there is a box to launch)
//!    │ Spec ─────────────────▶│ clone ───────────────────▶│ wait
//!    │◀──────────────── pid ──│ uid map                   │
//!    │ network                │ mounts ──────────────────▶│ mount, pivot, confine, exec guest
//!    │ boot message ─────────────────────────────────────▶│
//!    │◀───────────────────────────────────────────ready ──│ serve
//! ```
//!
//! One `SOCK_SEQPACKET` socket carries it all. It is the launcher's standard input and the guest's
//! descriptor 3. A process whose peer is gone reads an end of file, and ends.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use dorm_sys::confine::SystemCallFilter;
use dorm_sys::mount::Detached;
use dorm_sys::namespace::{self, Cloned};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::home::unpack::Names;

mod criu;
mod disk;
mod errand;
mod launcher;
pub(crate) mod machine;
mod rootfs;
mod sandbox;
mod unpack;
mod volumes;

pub(crate) use criu::{STAGED_GUEST, STAGED_ROOT, staged_volume};
pub(crate) use launcher::{Launcher, complaint, tellable};
pub(crate) use rootfs::{DEVICES, masked_files};
pub(crate) use sandbox::Staged;

pub(crate) use disk::make_disk;
pub(crate) use unpack::{unpack, unpack_within};
pub(crate) use volumes::serve_volumes;

/// The hidden subcommand under which the binary calls [`main`].
pub const SUBCOMMAND: &str = "__launch";

/// Largest message on the launch socket.
pub(crate) const MAX_PACKET: usize = dorm_proto::boot::MAX_BOOT_MESSAGE;

/// What a launcher can do before it knows which box it is for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Preparation {
    /// Files to which a process writes its pid to be under a box's limits.
    pub(crate) join: Vec<PathBuf>,
    /// Whether a system call filter follows.
    pub(crate) filter: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) home: PathBuf,
    pub(crate) uid_base: u32,
    pub(crate) volumes: Vec<Volume>,
    pub(crate) job: Job,
}

impl Spec {
    /// For what has nothing to do with a home.
    pub(crate) fn without_home(job: Job) -> Self {
        Self {
            home: PathBuf::new(),
            uid_base: 0,
            volumes: Vec::new(),
            job,
        }
    }
}

/// A volume, and where in the box it is mounted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Volume {
    pub(crate) source: PathBuf,
    pub(crate) at: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Become the guest.
    Guest {
        guest: PathBuf,
        hostname: String,
        /// Identifies this start of the box; shown as the kernel's boot id.
        boot_id: String,
        /// As in [`Preparation`], where that was too early to join.
        join: Vec<PathBuf>,
        /// Bytes that the files which a box keeps in memory, under /dev/shm and /run, may hold.
        tmpfs_bytes: u64,
    },
    /// Become CRIU, answering on the launch socket.
    Criu {
        command: Vec<PathBuf>,
        knowledge: Option<PathBuf>,
        /// Who CRIU is, with root's capabilities: the owner of the user namespace that it looks into.
        user: u32,
        /// Whether it will wait for something to do.
        ahead: bool,
    },
    /// Give a CRIU that waits what it needs to restore a box on the home.
    Stage {
        criu: i32,
        guest: PathBuf,
        /// As in [`Preparation`], for CRIU.
        join: Vec<PathBuf>,
    },
    /// Become the process of a virtual machine. The home is the file of its disk, and its memory the one volume.
    Machine(machine::Machine),
    /// Become runsc, once the daemon has given the network namespace of this process an interface.
    Runsc {
        command: Vec<PathBuf>,
        guest: PathBuf,
        /// The run directory of the box.
        directory: PathBuf,
    },
    /// Make a disk of the files of the home. The disk is the one volume.
    MakeDisk(disk::MakeDisk),
    /// Apply an archive, read from standard output's descriptor, to the home.
    Unpack { offset: u64, length: u64, names: Names },
    /// Serve files to a machine, on standard output's descriptor. The home is its first volume, and the volumes are the others.
    ServeVolumes,
}

/// What the launcher answers, followed by what process 1 has to say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Prepared,
    /// The next words on the socket are those of another program.
    Executing,
    /// CRIU has the home in its place.
    Staged,
    Pid(i32),
    Failed(String),
    /// An unpacked layer: entries applied, and what had to be left out.
    Unpacked {
        entries: u64,
        warnings: Vec<String>,
    },
    BadLayer(String),
    DiskMade,
    /// Files are served from now on.
    Serving,
    /// The home has no room for the layer.
    Full,
}

/// Entry of the launcher process. Never returns to the caller's program.
pub fn main() -> ! {
    if crate::criu::is_self_test() {
        crate::criu::self_test_process()
    }
    let code = match launch() {
        Ok(()) => 0,
        Err(failure) => {
            report(&Report::Failed(failure.to_string()));
            1
        }
    };
    std::process::exit(code)
}

/// A step of the launch that failed, in words.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
struct Failure {
    step: String,
    source: io::Error,
}

trait Step<T> {
    fn step(self, step: &str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &str) -> Result<T, Failure> {
        self.map_err(|e| Failure {
            step: step.to_owned(),
            source: e.into(),
        })
    }
}

fn daemon() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}

fn report(report: &Report) {
    let bytes = serde_json::to_vec(report).unwrap_or_default();
    let _ = rustix::net::send(daemon(), &bytes, SendFlags::NOSIGNAL);
}

fn receive(from: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; MAX_PACKET];
    let (length, _) = rustix::net::recv(from, &mut buffer[..], RecvFlags::empty())?;
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    buffer.truncate(length);
    Ok(buffer)
}

fn receive_json<T: serde::de::DeserializeOwned>(from: BorrowedFd<'_>) -> io::Result<T> {
    Ok(serde_json::from_slice(&receive(from)?)?)
}

fn join(files: &[PathBuf], pid: &str) -> Result<(), Failure> {
    files
        .iter()
        .try_for_each(|file| std::fs::write(file, pid).step(&format!("join {}", file.display())))
}

fn launch() -> Result<(), Failure> {
    let preparation: Preparation = receive_json(daemon()).step("read the preparation")?;
    let filter = match preparation.filter {
        true => {
            let bytes = receive(daemon()).step("read the system call filter")?;
            let filter =
                SystemCallFilter::from_bytes(&bytes).ok_or(io::Error::from(io::ErrorKind::InvalidData));
            Some(filter.step("read the system call filter")?)
        }
        false => None,
    };
    join(&preparation.join, "0")?;
    report(&Report::Prepared);

    let spec: Spec = match receive_json(daemon()) {
        // A spare that is no longer wanted.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        spec => spec.step("read the launch spec")?,
    };
    let mut tap = None;
    match &spec.job {
        Job::Guest { join: late, .. } => {
            join(late, "0")?;
            rootfs::raise_limits().step("set resource limits")?;
        }
        Job::Criu {
            command,
            knowledge,
            user,
            ahead,
        } => return criu::execute(command, knowledge.as_deref(), *user, *ahead),
        Job::Stage {
            criu: pid,
            guest,
            join: late,
        } => {
            join(late, &pid.to_string())?;
            criu::stage(*pid, guest, &spec)?;
            report(&Report::Staged);
            return Ok(());
        }
        Job::Machine(machine) => {
            rootfs::raise_limits().step("set resource limits")?;
            tap = Some(dorm_sys::tap::make(&machine.interface).step("make a network interface")?);
        }
        Job::Runsc {
            command,
            guest,
            directory,
        } => {
            rootfs::raise_limits().step("set resource limits")?;
            return sandbox::execute(command, guest, directory, &spec);
        }
        Job::ServeVolumes => rootfs::raise_limits().step("set resource limits")?,
        Job::MakeDisk(_) | Job::Unpack { .. } => rootfs::limit_memory().step("set resource limits")?,
    }
    dorm_sys::namespace::unshare_mounts().step("make a mount namespace")?;
    let mounts = bind_mounts(&spec).step("prepare the mounts")?;
    rootfs::stage().step("make a place for the root filesystem")?;

    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .step("make a socket pair")?;
    match namespace::clone_into(namespace::BOX_NAMESPACES, spec.uid_base).step("make the namespaces")? {
        Cloned::Child => {
            drop(ours);
            let failed = match become_box(&spec, filter.as_ref(), theirs, tap) {
                Ok(never) => match never {},
                Err(failure) => failure,
            };
            report(&Report::Failed(failed.to_string()));
            std::process::exit(1)
        }
        Cloned::Parent { child } => {
            drop(theirs);
            // From here on the daemon knows whom to reap.
            report(&Report::Pid(child));
            if let Err(failure) = hand_over(&spec, child, &mounts, ours.as_fd()) {
                // Said before the child notices that its socket is closed, and says less.
                report(&Report::Failed(failure.to_string()));
                std::process::exit(1)
            }
            Ok(())
        }
    }
}

/// Makes the child root of its user namespace and gives it its mounts.
fn hand_over(spec: &Spec, child: i32, mounts: &[Detached], to: BorrowedFd<'_>) -> Result<(), Failure> {
    for map in ["uid_map", "gid_map"] {
        let line = format!("0 {} 65536", spec.uid_base);
        std::fs::write(format!("/proc/{child}/{map}"), line).step(&format!("write {map}"))?;
    }
    let userns = namespace::open(child, "user").step("open the user namespace")?;
    let volumes = &mounts[mounts.len() - spec.volumes.len()..];
    for own in mounts.first().into_iter().chain(volumes) {
        own.map_ids(userns.as_fd())
            .step("map the ids of the home and its volumes")?;
    }
    send_mounts(to, mounts).step("hand over the mounts")
}

enum Never {}

fn become_box(
    spec: &Spec,
    filter: Option<&SystemCallFilter>,
    launcher: OwnedFd,
    tap: Option<OwnedFd>,
) -> Result<Never, Failure> {
    let mounts = receive_mounts(launcher.as_fd()).step("receive the mounts")?;
    drop(launcher);
    rootfs::become_root().step("become root of the box")?;
    match &spec.job {
        Job::Guest {
            hostname,
            boot_id,
            tmpfs_bytes,
            ..
        } => {
            let volumes: Vec<&str> = spec.volumes.iter().map(|volume| volume.at.as_str()).collect();
            rootfs::enter(mounts, hostname, boot_id, *tmpfs_bytes, &volumes)?;
            dorm_sys::process::place_fd(daemon(), dorm_proto::boot::BOOT_FD)
                .step("hand over the boot socket")?;
            rootfs::detach_stdio().step("detach standard input and output")?;
            dorm_sys::process::close_on_exec_from(dorm_proto::boot::BOOT_FD as u32 + 1)
                .step("close descriptors")?;
            dorm_sys::confine::bound_capabilities(dorm_sys::confine::BOX_CAPABILITIES)
                .step("drop capabilities")?;
            if let Some(filter) = filter {
                filter.install().step("install the system call filter")?;
            }
            Err(command(dorm_proto::boot::GUEST_PATH).exec()).step("execute the guest")
        }
        Job::Machine(machine) => {
            let missing = || io::Error::from(io::ErrorKind::NotFound);
            let tap = tap.ok_or_else(missing).step("find the network interface")?;
            let filter = filter.ok_or_else(missing).step("find the system call filter")?;
            machine.enter(mounts, filter, &tap)
        }
        Job::Criu { .. } | Job::Stage { .. } | Job::Runsc { .. } => {
            Err(io::Error::from(io::ErrorKind::InvalidInput)).step("become criu in a box")
        }
        Job::MakeDisk(disk) => {
            disk.make(mounts)?;
            std::process::exit(0)
        }
        Job::Unpack {
            offset,
            length,
            names,
        } => {
            rootfs::enter_bare(mounts)?;
            unpack::apply(*offset, *length, *names)?;
            std::process::exit(0)
        }
        Job::ServeVolumes => {
            let missing = || io::Error::from(io::ErrorKind::NotFound);
            let filter = filter.ok_or_else(missing).step("find the system call filter")?;
            volumes::serve(mounts, filter)?;
            std::process::exit(0)
        }
    }
}

/// A program that knows nothing but where others are everywhere.
fn command(program: impl AsRef<OsStr>) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    command.env_clear().env(
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    );
    command
}

/// The same of a program and its first arguments.
fn command_line(words: &[PathBuf]) -> io::Result<std::process::Command> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = command(program);
    command.args(arguments);
    Ok(command)
}

/// Everything of the host's that a box sees, as mounts attached nowhere yet: the home first, then for a
/// guest its program, the devices of [`rootfs::DEVICES`] and its volumes; for a machine, or the making of its disk, what its process
/// needs, and its memory or disk.
fn bind_mounts(spec: &Spec) -> io::Result<Vec<Detached>> {
    use dorm_sys::mount::{NODEV, NOEXEC, NOSUID, RDONLY};
    let home = match &spec.job {
        Job::MakeDisk(_) => bind(&spec.home, RDONLY | NODEV | NOSUID | NOEXEC, 0),
        Job::ServeVolumes => bind(&spec.home, NODEV | NOSUID | NOEXEC, 0),
        _ => bind(&spec.home, NODEV, NOSUID),
    };
    let mut mounts = vec![home?];
    if let Job::Guest { guest, .. } = &spec.job {
        mounts.push(bind(guest, RDONLY | NOSUID | NODEV, NOEXEC)?);
        for device in rootfs::DEVICES {
            mounts.push(bind(&Path::new("/dev").join(device), NOSUID | NOEXEC, NODEV)?);
        }
    }
    if let Job::Machine(machine) = &spec.job {
        mounts.extend(machine.bind_mounts(spec.uid_base)?);
    }
    if let Job::MakeDisk(disk) = &spec.job {
        mounts.extend(disk.bind_mounts()?);
    }
    if let Job::ServeVolumes = &spec.job {
        mounts.push(bind(Path::new("/dev/null"), NOSUID | NOEXEC, NODEV)?);
    }
    for volume in &spec.volumes {
        mounts.push(match &spec.job {
            Job::ServeVolumes => bind(&volume.source, NODEV | NOSUID | NOEXEC, 0)?,
            _ => bind(&volume.source, NODEV, NOSUID)?,
        });
    }
    Ok(mounts)
}

fn bind(path: &Path, set: u64, clear: u64) -> io::Result<Detached> {
    let mount = Detached::bind(path)?;
    mount.set(set, clear)?;
    Ok(mount)
}

/// One whose files belong to the users of the namespace `ids`.
fn bind_mapped(path: &Path, ids: BorrowedFd<'_>) -> io::Result<Detached> {
    use dorm_sys::mount::{NODEV, NOSUID};
    let mount = bind(path, NODEV, NOSUID)?;
    mount.map_ids(ids)?;
    Ok(mount)
}

fn send_mounts(to: BorrowedFd<'_>, mounts: &[Detached]) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = mounts.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("too many mounts"));
    }
    rustix::net::sendmsg(to, &[IoSlice::new(b"mounts")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive_mounts(from: BorrowedFd<'_>) -> io::Result<Vec<Detached>> {
    let mut text = [0; 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        from,
        &mut [IoSliceMut::new(&mut text)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if got.bytes == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the launcher gave up",
        ));
    }
    let mut mounts = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            mounts.extend(fds.map(Detached::from_fd));
        }
    }
    Ok(mounts)
}
