//! Pseudo-terminals of the box.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::sys::check;

const TIOCGPTPEER: libc::c_ulong = 0x5441;

/// Opens a pseudo-terminal: the guest's end, which does not block, and the process's.
pub(super) fn open(cols: u16, rows: u16, owner: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    let master: OwnedFd = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open("/dev/ptmx")?
        .into();
    let unlocked: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlocked) })?;
    let slave = other_end(&master)?;
    resize(&master, cols, rows)?;
    set_utf8(&slave)?;
    // The user must be able to open its own terminal again by name.
    // SAFETY: fchown takes integers; -1 leaves the group as the mount has set it.
    let _ = unsafe { libc::fchown(slave.as_raw_fd(), owner, u32::MAX) };
    Ok((master, slave))
}

fn other_end(master: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes flags and gives a descriptor that nobody else owns.
    match check(unsafe { libc::ioctl(master.as_raw_fd(), TIOCGPTPEER, flags) }) {
        // SAFETY: as above.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        // A kernel that cannot give it can name it.
        Err(e) if e.raw_os_error() == Some(libc::ENOTTY) => {
            let mut number: libc::c_uint = 0;
            // SAFETY: TIOCGPTN writes one unsigned int.
            check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &mut number) })?;
            let named = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOCTTY)
                .open(format!("/dev/pts/{number}"))?;
            Ok(named.into())
        }
        Err(e) => Err(e),
    }
}

pub(super) fn resize(master: &OwnedFd, cols: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &size) }).map(drop)
}

/// The process group that has the terminal now.
pub(super) fn foreground(master: BorrowedFd<'_>) -> io::Result<i32> {
    let mut group: libc::pid_t = 0;
    // SAFETY: TIOCGPGRP writes one pid_t.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPGRP, &mut group) })?;
    Ok(group)
}

/// Erasing a character of several bytes erases all of them.
fn set_utf8(slave: &OwnedFd) -> io::Result<()> {
    // SAFETY: an all-zero termios is valid, and both calls get a live one.
    unsafe {
        let mut modes: libc::termios = std::mem::zeroed();
        check(libc::tcgetattr(slave.as_raw_fd(), &mut modes))?;
        modes.c_iflag |= libc::IUTF8;
        check(libc::tcsetattr(slave.as_raw_fd(), libc::TCSANOW, &modes)).map(drop)
    }
}
