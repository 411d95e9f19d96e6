//! The first moments of process 1: the boot message, and what it changes in the box.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use dorm_proto::boot::{BOOT_FD, BootConfig, GUEST_SOCKET, MAX_BOOT_MESSAGE, READY};

use crate::log::log;
use crate::sys::{self, check};

/// The socket to the daemon. It leads out of the box, so it must be gone before the guest serves.
pub(crate) struct BootSocket(OwnedFd);

impl BootSocket {
    pub(crate) fn take() -> io::Result<Self> {
        sys::set_cloexec(BOOT_FD)?;
        // SAFETY: F_SETFL takes an integer. The guest waits for the message before it does anything else.
        check(unsafe { libc::fcntl(BOOT_FD, libc::F_SETFL, 0) })?;
        // SAFETY: the descriptor is open, as the call above has shown, and handed to process 1 to own.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(BOOT_FD) }))
    }

    pub(crate) fn receive(&self) -> io::Result<BootConfig> {
        let mut message = vec![0u8; MAX_BOOT_MESSAGE];
        let n = loop {
            // SAFETY: the pointer and the length are those of a live, exclusive buffer.
            let n = unsafe {
                libc::recv(
                    self.0.as_raw_fd(),
                    message.as_mut_ptr().cast(),
                    message.len(),
                    libc::MSG_TRUNC,
                )
            };
            match usize::try_from(n) {
                Ok(n) => break n,
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if e.kind() != io::ErrorKind::Interrupted {
                        return Err(e);
                    }
                }
            }
        };
        if n == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the daemon hung up before the boot message",
            ));
        }
        let message = message
            .get(..n)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the boot message is too long"))?;
        serde_json::from_slice(message).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        // SAFETY: the pointer and the length are those of a live slice.
        let n = unsafe {
            libc::send(
                self.0.as_raw_fd(),
                message.as_ptr().cast(),
                message.len(),
                libc::MSG_NOSIGNAL,
            )
        };
        check(n as libc::c_int).map(drop)
    }

    /// Tells the daemon that the guest serves, and closes the way out.
    pub(crate) fn ready(self) -> io::Result<()> {
        self.send(READY)
    }

    pub(crate) fn failed(self, error: &io::Error) {
        let _ = self.send(format!("the guest cannot start: {error}").as_bytes());
    }
}

pub(crate) fn listen() -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(GUEST_SOCKET)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Writes what the box must know about itself. A box without these files is worse, but it is a box.
pub(crate) fn apply(config: &BootConfig) {
    if !config.nameservers.is_empty() {
        let lines: String = config
            .nameservers
            .iter()
            .map(|n| format!("nameserver {n}\n"))
            .collect();
        write_logged(Path::new("/etc/resolv.conf"), lines.as_bytes());
    }
    name(&config.hostname);
}

/// Writes the host name to where programs look for it.
pub(crate) fn name(hostname: &str) {
    if !hostname.is_empty() {
        write_logged(Path::new("/etc/hostname"), format!("{hostname}\n").as_bytes());
    }
    let hosts = Path::new("/etc/hosts");
    let old = fs::read_to_string(hosts).unwrap_or_default();
    if let Some(new) = with_hosts(&old, hostname) {
        write_logged(hosts, new.as_bytes());
    }
}

fn write_logged(path: &Path, contents: &[u8]) {
    if let Err(e) = replace(path, contents) {
        log!("{} cannot be written: {e}", path.display());
    }
}

/// Writes a file in place. A link is replaced by a file: it may lead to where a service that the box does not have
/// would have put one.
fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_symlink()) {
        fs::remove_file(path)?;
    }
    if fs::read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?
        .write_all(contents)
}

/// The hosts file with localhost and the box's own name, or `None` if it has them.
fn with_hosts(old: &str, hostname: &str) -> Option<String> {
    let has = |name: &str| {
        old.lines()
            .map(|l| l.split('#').next().unwrap_or_default())
            .any(|l| l.split_whitespace().skip(1).any(|n| n == name))
    };
    let mut added = String::new();
    if !has("localhost") {
        added.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    if !hostname.is_empty() && !has(hostname) {
        added.push_str(&format!("127.0.1.1\t{hostname}\n"));
    }
    if added.is_empty() {
        return None;
    }
    let separator = if old.is_empty() || old.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    Some(format!("{old}{separator}{added}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_gets_what_it_lacks_and_keeps_what_it_has() {
        let made = with_hosts("", "box").unwrap();
        assert!(made.starts_with("127.0.0.1\tlocalhost\n") && made.ends_with("127.0.1.1\tbox\n"));
        assert_eq!(with_hosts(&made, "box"), None);
        let kept = with_hosts("127.0.0.1 localhost # box\n10.0.0.1 db", "box").unwrap();
        assert_eq!(kept, "127.0.0.1 localhost # box\n10.0.0.1 db\n127.0.1.1\tbox\n");
    }

    #[test]
    fn a_linked_file_is_replaced_and_its_target_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "theirs").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"ours").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"theirs");
        assert_eq!(fs::read(&link).unwrap(), b"ours");
        assert!(!fs::symlink_metadata(&link).unwrap().file_type().is_symlink());
    }
}
