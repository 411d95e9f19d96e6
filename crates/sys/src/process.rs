//! What the kernel tells of a process.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal};

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug)]
pub struct Process {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

impl Process {
    pub fn open(pid: i32) -> io::Result<Self> {
        let raw = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pid,
            pidfd: rustix::process::pidfd_open(raw, PidfdFlags::empty())?,
        })
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether nothing is left of it but, perhaps, its exit status.
    pub fn has_ended(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut ended, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Takes the exit status if the process is a child of ours that has ended. `None` otherwise.
    pub fn reap(&self) -> Option<rustix::process::WaitIdStatus> {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        use std::os::fd::AsFd;
        waitid(
            WaitId::PidFd(self.pidfd.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        )
        .ok()
        .flatten()
    }
}

/// When `pid` was started, in clock ticks since boot.
pub fn start_time(pid: i32) -> io::Result<u64> {
    stat(pid, 22)
}

/// Whether `pid` is a thread of the kernel's own.
pub fn is_kernel_thread(pid: i32) -> io::Result<bool> {
    const PF_KTHREAD: u64 = 0x0020_0000;
    Ok(stat(pid, 9)? & PF_KTHREAD != 0)
}

/// A number in `/proc/PID/stat`, by its place there, counted from 1 as its manual does.
fn stat(pid: i32, place: usize) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command name, which is the second, may hold spaces and parentheses; the fields after the last one do not.
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    fields
        .split_whitespace()
        .nth(place - 3)
        .and_then(|f| f.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Identifies this boot of the host.
pub fn host_boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Puts a copy of `fd` under the number `number`, inherited by programs executed from now on.
pub fn place_fd(fd: std::os::fd::BorrowedFd<'_>, number: i32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: dup2 closes whatever `number` was. The launcher calls this on numbers that no owner in the
    // process holds: it has just started, with three standard descriptors and nothing else below `number`.
    match unsafe { libc::dup2(fd.as_raw_fd(), number) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Closes every descriptor from `first` on. For the first lines of a program, when none of them has an owner yet.
pub fn close_inherited_from(first: u32) -> io::Result<()> {
    // SAFETY: the caller has opened nothing, so what is closed was inherited, and nothing in this process refers to it.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Marks every descriptor from `first` on to be closed by the next execve.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_CLOEXEC no descriptor is closed now, so no owner loses one.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
