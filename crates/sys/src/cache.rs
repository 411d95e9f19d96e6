//! The kernel's cache of file contents.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Since Linux 6.5; libc does not name it.
const SYS_CACHESTAT: libc::c_long = 451;
const PAGE: u64 = 4096;

#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// In pages.
#[repr(C)]
#[derive(Default)]
struct Statistics {
    cached: u64,
    dirty: u64,
    being_written: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether all of the first `length` bytes of a file are in memory, so that nothing of them would be read from the disk.
pub fn holds(file: BorrowedFd<'_>, length: u64) -> io::Result<bool> {
    let range = Range { offset: 0, length };
    let mut statistics = Statistics::default();
    // SAFETY: the kernel reads the one structure and writes the other, both of the layout that it declares for them,
    // and both outlive the call.
    let done = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            &raw const range,
            &raw mut statistics,
            0,
        )
    };
    match done {
        0 => Ok(statistics.cached >= length.div_ceil(PAGE)),
        _ => Err(io::Error::last_os_error()),
    }
}
