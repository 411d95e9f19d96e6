//! Breakpoints of the processor, which a process can set in another that it traces.
//!
//! To the kernel they are performance events. For the first such event of a machine it rewrites a part of itself, and waits until all
//! processors have seen that, which takes 10 to 20 ms. A second after the last one it goes back.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// While this is held, breakpoints are set at once.
#[derive(Debug)]
pub struct Ready(#[expect(dead_code, reason = "it is held, not used")] OwnedFd);

/// The first version of the kernel's `perf_event_attr`, which every kernel takes.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

const SOFTWARE: u32 = 1;
/// Counts nothing.
const DUMMY: u64 = 9;
const DISABLED: u64 = 1;
const CLOSE_ON_EXEC: libc::c_ulong = 8;
const THIS_THREAD: libc::pid_t = 0;
const ANY_PROCESSOR: libc::c_int = -1;
const NO_GROUP: libc::c_int = -1;

impl Ready {
    /// Takes as long as the first breakpoint would.
    pub fn make() -> io::Result<Self> {
        let attributes = Attributes {
            kind: SOFTWARE,
            size: size_of::<Attributes>() as u32,
            config: DUMMY,
            flags: DISABLED,
            ..Attributes::default()
        };
        // SAFETY: the attributes are laid out as the kernel's, as long as they say, and live until the call is over; it keeps no
        // reference to them.
        let event = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                THIS_THREAD,
                ANY_PROCESSOR,
                NO_GROUP,
                CLOSE_ON_EXEC,
            )
        };
        let event = i32::try_from(event).unwrap_or(-1);
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor, and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(event) }))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn root_may_have_the_kernel_get_ready() {
        if rustix::process::geteuid().is_root() {
            super::Ready::make().unwrap();
        } else {
            println!("skipped: only root may");
        }
    }
}
