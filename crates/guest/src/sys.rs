//! The few system calls that std and tokio do not give, each with its errors as `io::Error`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::unix::AsyncFd;

/// The result of a call that answers -1 and sets `errno`.
pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub(crate) fn set_cloexec(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_SETFD takes an integer and touches no memory of ours.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }).map(drop)
}

/// Closes every descriptor from `first` on. For the start of the program, when none of them is anyone's.
pub(crate) fn close_from(first: u32) {
    // SAFETY: nothing has been opened yet, so no open descriptor in the range has an owner.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
}

pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL and F_SETFL take and give integers.
    unsafe {
        let flags = check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))?;
        check(libc::fcntl(
            fd.as_raw_fd(),
            libc::F_SETFL,
            flags | libc::O_NONBLOCK,
        ))
        .map(drop)
    }
}

/// Lets this much be on its way in a socket, or as much as the system allows.
pub(crate) fn set_send_buffer(fd: BorrowedFd<'_>, bytes: libc::c_int) {
    for option in [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF] {
        // SAFETY: the value is an integer, whose address and size are given.
        let set = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const bytes).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if set == 0 {
            return;
        }
    }
}

/// Whether this box is behind gVisor.
static GVISOR: AtomicBool = AtomicBool::new(false);

pub(crate) fn note_gvisor() {
    GVISOR.store(true, Ordering::Relaxed);
}

pub(crate) fn is_gvisor() -> bool {
    GVISOR.load(Ordering::Relaxed)
}

/// A pipe, reading end first, both ends closed on exec.
pub(crate) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: `fds` has room for the two descriptors, which nobody else owns.
    unsafe {
        check(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC))?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

/// Hands a descriptor that does not block to the runtime.
pub(crate) fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stays open, and the same descriptor, until it is dropped, which the `AsyncFd` does after it has
    // taken it out of the runtime.
    Ok(unsafe { AsyncFd::register(fd) }?)
}

/// Reads without waiting; for use inside `try_io`.
pub(crate) fn read(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and the length are those of a live, exclusive slice.
    let n = unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn write(fd: BorrowedFd<'_>, buf: &[u8]) -> io::Result<usize> {
    // SAFETY: the pointer and the length are those of a live slice.
    let n = unsafe { libc::write(fd.as_raw_fd(), buf.as_ptr().cast(), buf.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Writes all of `buf`, waiting for room as needed. `written` hears of each part of it at once.
pub(crate) async fn write_all(
    fd: &AsyncFd<OwnedFd>,
    mut buf: &[u8],
    mut written: impl FnMut(usize),
) -> io::Result<()> {
    use std::os::fd::AsFd;
    while !buf.is_empty() {
        let mut ready = fd.writable().await?;
        match ready.try_io(|fd| write(fd.get_ref().as_fd(), buf)) {
            Ok(Ok(n)) => {
                written(n);
                buf = &buf[n..];
            }
            Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(e)) => return Err(e),
            Err(_would_block) => {}
        }
    }
    Ok(())
}

pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// The session that a process is in, by the process that began it.
pub(crate) fn session_of(pid: i32) -> Option<i32> {
    // SAFETY: getsid takes an integer.
    check(unsafe { libc::getsid(pid) }).ok()
}

pub(crate) fn is_init() -> bool {
    std::process::id() == 1
}

pub(crate) fn is_root() -> bool {
    // SAFETY: geteuid has no arguments and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Fills `buf` from the kernel's random source.
pub(crate) fn random(buf: &mut [u8]) {
    // SAFETY: the pointer and the length are those of a live, exclusive slice.
    let n = unsafe { libc::getrandom(buf.as_mut_ptr().cast(), buf.len(), 0) };
    assert_eq!(
        usize::try_from(n),
        Ok(buf.len()),
        "the kernel's random source answers"
    );
}

/// One identifier of 16 hexadecimal digits.
pub(crate) fn random_id() -> String {
    let mut bytes = [0; 8];
    random(&mut bytes);
    format!("{:016x}", u64::from_ne_bytes(bytes))
}

/// Milliseconds since the epoch.
pub(crate) fn now_ms() -> i64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}
