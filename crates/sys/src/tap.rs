//! Network interfaces whose other end is a descriptor.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;

#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: i16,
    unused: [u8; 22],
}

/// Makes the interface `name` in the network namespace of the calling thread. It is gone when the descriptor is.
pub fn make(name: &str) -> io::Result<OwnedFd> {
    let mut request = InterfaceRequest {
        name: [0; 16],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR,
        unused: [0; 22],
    };
    if name.is_empty() || name.len() >= request.name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let device: File = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads and writes one ifreq, whose size and layout InterfaceRequest has.
    match unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF, &raw mut request) } {
        0 => Ok(device.into()),
        _ => Err(io::Error::last_os_error()),
    }
}
