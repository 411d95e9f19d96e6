//! The mode of a file that is named and not opened.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Sets the permissions of what an `O_PATH` descriptor names. Not supported before Linux 6.6.
pub fn set(file: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
    const FCHMODAT2: libc::c_long = 452;
    // SAFETY: the path is a valid C string that outlives the call; the rest are integers.
    let done = unsafe {
        libc::syscall(
            FCHMODAT2,
            file.as_raw_fd(),
            c"".as_ptr(),
            mode,
            libc::AT_EMPTY_PATH,
        )
    };
    match done {
        0 => Ok(()),
        _ => match std::io::Error::last_os_error().raw_os_error() {
            None | Some(libc::ENOSYS) => Err(Errno::OPNOTSUPP),
            Some(error) => Err(Errno::from_raw_os_error(error)),
        },
    }
}
