//! Entering and making namespaces.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, Uid, UnshareFlags};

/// Where the caller of [`clone_into`] finds itself afterwards.
pub enum Cloned {
    Child,
    Parent { child: i32 },
}

/// All the namespaces of a box.
pub const BOX_NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWTIME;

/// Forks into new `namespaces`. The child becomes a child of the caller's parent, so that the caller
/// may end while the child lives on with somebody to reap it.
///
/// The user namespace belongs to the uid `owner`. Its owner also pays for it: inotify instances, message queues,
/// pending signals, locked memory and the like count towards the limits that the host has for each user.
/// If root owned it, one box could use up what the host's root and all other boxes have.
///
/// Refuses to run in a process with several threads: the child of such a process could find any
/// lock held by a thread that it does not have.
pub fn clone_into(namespaces: i32, owner: u32) -> io::Result<Cloned> {
    act_as(Uid::from_raw(owner))?;
    // With CLONE_PARENT the exit signal is the caller's own, and must be given as 0.
    let cloned = clone_with(namespaces | libc::CLONE_PARENT, 0);
    if !matches!(cloned, Ok(Cloned::Child)) {
        act_as(Uid::ROOT)?;
    }
    cloned
}

fn clone_with(flags: i32, exit_signal: i32) -> io::Result<Cloned> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other(
            "a process with several threads cannot be cloned safely",
        ));
    }
    #[repr(C)]
    #[derive(Default)]
    struct CloneArgs {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
    }
    let args = CloneArgs {
        flags: u64::from(flags.cast_unsigned()),
        exit_signal: u64::from(exit_signal.cast_unsigned()),
        ..Default::default()
    };
    // SAFETY: `args` is a valid clone_args of the size given. No stack is passed and CLONE_VM is not set, so
    // the child runs on a copy of this stack like after fork(); the process has one thread, checked above, so
    // every lock in that copy is free.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        child => Ok(Cloned::Parent { child: child as i32 }),
    }
}

/// Makes `uid` the effective one of the calling thread, which keeps its capabilities.
fn act_as(uid: Uid) -> io::Result<()> {
    rustix::thread::set_thread_res_uid(Uid::ROOT, uid, Uid::ROOT)?;
    let mut capabilities = rustix::thread::capabilities(None)?;
    capabilities.effective = capabilities.permitted;
    Ok(rustix::thread::set_capabilities(None, capabilities)?)
}

/// A new user namespace that maps its ids 0 to 65,535 to those from `base` on. It lives as long as the descriptor.
pub fn user_namespace(base: u32) -> io::Result<OwnedFd> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let Cloned::Parent { child } = clone_with(libc::CLONE_NEWUSER, libc::SIGCHLD)? else {
        drop(theirs);
        // Ends when the other side of the pipe does, and does nothing else in between.
        let _ = rustix::io::read(&ours, &mut [0u8; 1]);
        std::process::exit(0)
    };
    drop(ours);
    let mapped = ["uid_map", "gid_map"]
        .iter()
        .try_for_each(|map| std::fs::write(format!("/proc/{child}/{map}"), format!("0 {base} 65536")))
        .and_then(|()| open(child, "user"));
    drop(theirs);
    let child = rustix::process::Pid::from_raw(child).ok_or(io::ErrorKind::InvalidInput)?;
    rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())?;
    mapped
}

/// Moves the calling thread into a network namespace, for good.
pub fn enter_network(netns: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(
        netns,
        Some(LinkNameSpaceType::Network),
    )?)
}

/// Moves the calling process, which must have a single thread, into a mount namespace.
pub fn enter_mounts(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(
        namespace,
        Some(LinkNameSpaceType::Mount),
    )?)
}

/// Sets the host name in a uts namespace, from a thread that enters it and ends.
pub fn set_hostname(uts: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let work = || {
        rustix::thread::move_into_link_name_space(uts, Some(LinkNameSpaceType::HostNameAndNISDomainName))?;
        Ok(rustix::system::sethostname(name.as_bytes())?)
    };
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Gives the calling thread (of a process with one) a mount namespace of its own.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: rustix marks unshare unsafe because of CLONE_FILES, which is not given; a new mount
    // namespace invalidates no descriptor.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    Ok(())
}

/// Gives the calling thread (of a process with one) a network namespace of its own.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: as above; sockets stay in the namespace that they were made in.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

/// Opens one of the namespaces of a process: `net`, `user`, ….
pub fn open(pid: i32, kind: &str) -> io::Result<OwnedFd> {
    Ok(std::fs::File::open(format!("/proc/{pid}/ns/{kind}"))?.into())
}

/// The uid that owns a user namespace.
pub fn owner(userns: BorrowedFd<'_>) -> io::Result<u32> {
    const NS_GET_OWNER_UID: libc::c_ulong = 0xB704;
    let mut uid: libc::uid_t = 0;
    // SAFETY: NS_GET_OWNER_UID writes one uid_t.
    match unsafe { libc::ioctl(userns.as_raw_fd(), NS_GET_OWNER_UID, &raw mut uid) } {
        0 => Ok(uid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The inode that identifies the namespace behind a descriptor.
pub fn inode(namespace: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(namespace)?.st_ino)
}
