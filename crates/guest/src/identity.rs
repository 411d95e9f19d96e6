//! Lets one thread act on files with a user's rights.
//!
//! The kernel keeps credentials per thread; it is the C library that spreads them over all threads. The
//! raw calls here change only the calling thread, for as long as a closure runs. A thread with a
//! file-system uid other than 0 also loses the capabilities that override file permissions, and gets them
//! back with uid 0.

use std::io;

use crate::sys;
use crate::users::User;

struct Assumed {
    groups: Vec<libc::gid_t>,
}

fn set_groups(groups: &[libc::gid_t]) -> io::Result<()> {
    // SAFETY: the kernel reads `len` group ids from the live slice.
    let r = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn own_groups() -> io::Result<Vec<libc::gid_t>> {
    // SAFETY: with a size of 0 the kernel only counts; then it fills at most as many as the vector holds.
    unsafe {
        let n = sys::check(libc::getgroups(0, std::ptr::null_mut()))?;
        let mut groups = vec![0; n as usize];
        let n = sys::check(libc::getgroups(n, groups.as_mut_ptr()))?;
        groups.truncate(n as usize);
        Ok(groups)
    }
}

/// Where the kernel has no file-system ids, the effective ones take their place: they are this thread's alone as well, and its
/// real and saved ids stay root's, so that no user may trace or signal it.
fn set_effective_ids(uid: u32, gid: u32) -> io::Result<()> {
    const SAME: libc::c_int = -1;
    // As root it may change the group, so that comes while it is.
    let steps = match uid {
        0 => [(libc::SYS_setresuid, uid), (libc::SYS_setresgid, gid)],
        _ => [(libc::SYS_setresgid, gid), (libc::SYS_setresuid, uid)],
    };
    for (call, id) in steps {
        // SAFETY: both calls take three integers.
        if unsafe { libc::syscall(call, SAME, id, SAME) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: takes integers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    Ok(())
}

fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: an id that is none changes nothing.
    let asked = unsafe { libc::syscall(libc::SYS_setfsuid, -1) };
    if asked < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        return set_effective_ids(uid, gid);
    }
    // SAFETY: all calls take integers. The first pair reports no error, so the second asks what holds now.
    let (now_uid, now_gid) = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        // The change has marked the memory as not to be dumped, and it could not be put to disk any more.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        (
            libc::syscall(libc::SYS_setfsuid, -1),
            libc::syscall(libc::SYS_setfsgid, -1),
        )
    };
    if now_uid == i64::from(uid) && now_gid == i64::from(gid) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

impl Assumed {
    fn new(user: &User) -> io::Result<Self> {
        let assumed = Self {
            groups: own_groups()?,
        };
        set_groups(&user.groups)?;
        set_fs_ids(user.uid, user.gid)?;
        Ok(assumed)
    }
}

impl Drop for Assumed {
    fn drop(&mut self) {
        // A thread that cannot go back must not serve anyone else.
        if set_fs_ids(0, 0).is_err() || set_groups(&self.groups).is_err() {
            std::process::abort();
        }
        // A change of user marks the memory of all threads as not to be dumped, and a box that came back from disk could
        // not be saved again.
        // SAFETY: takes integers. The real and effective ids of a thread are never a user's, so that no user may trace it.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    }
}

/// Runs `f` with the file rights of `user`. For blocking threads only: `f` must not yield.
pub(crate) fn with<T>(user: &User, f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if user.uid == 0 || !sys::is_root() {
        return f();
    }
    let _assumed = Assumed::new(user)?;
    f()
}

/// Runs `f` on a blocking thread with the file rights of `user`.
pub(crate) async fn run<T: Send + 'static>(
    user: User,
    f: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match tokio::task::spawn_blocking(move || with(&user, f)).await {
        Ok(result) => result,
        Err(e) => Err(io::Error::other(e)),
    }
}
