//! The kernel's random source.

use std::io;
use std::os::fd::AsRawFd;

/// Has the kernel seed its generator anew, and with it every program that keeps a generator of the kernel's making
/// in its own memory (getrandom of the vDSO).
///
/// Such a program notices by a counter of the kernel's. Without this, two that were restored from one image
/// would give the same numbers until the next regular seed.
pub fn reseed() -> io::Result<()> {
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let source = std::fs::File::open("/dev/urandom")?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    match unsafe { libc::ioctl(source.as_raw_fd(), RNDRESEEDCRNG) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn root_may_have_the_generator_seeded() {
        if rustix::process::geteuid().is_root() {
            super::reseed().unwrap();
        } else {
            println!("skipped: only root may");
        }
    }
}
