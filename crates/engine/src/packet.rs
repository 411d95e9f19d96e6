//! A `SOCK_SEQPACKET` socket for tokio.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::launch::MAX_PACKET;

#[derive(Debug)]
pub(crate) struct PacketSocket(AsyncFd<OwnedFd>);

impl PacketSocket {
    /// A connected pair: this end, and one for a process that blocks on it.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        Ok((Self(dorm_sys::readiness::register(ours)?), theirs))
    }

    pub(crate) async fn send(&self, packet: &[u8]) -> io::Result<()> {
        let send = |fd: &OwnedFd| Ok(rustix::net::send(fd, packet, SendFlags::NOSIGNAL)?);
        self.0.async_io(Interest::WRITABLE, send).await.map(|_| ())
    }

    pub(crate) async fn send_json(&self, message: &impl serde::Serialize) -> io::Result<()> {
        self.send(&serde_json::to_vec(message)?).await
    }

    /// The next packet; an error if the other side is gone.
    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; MAX_PACKET];
        let read = self.0.async_io(Interest::READABLE, |fd| {
            Ok(rustix::net::recv(fd, &mut buffer[..], RecvFlags::empty())?.0)
        });
        let length = read.await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer.truncate(length);
        Ok(buffer)
    }
}
