//! Descriptors that tokio waits on.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the runtime.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd gives the same open descriptor for as long as it lives, and AsyncFd owns it.
    Ok(unsafe { AsyncFd::register(fd) }?)
}
