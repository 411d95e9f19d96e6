//! The first moments of process 1: the boot message, and what it changes in the box.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use dorm_proto::boot::{
    AGENT_ID_PATH, BOOT_FD, BootConfig, BootOnStdio, GUEST_SOCKET, MAX_BOOT_MESSAGE, READY,
};
use serde::de::DeserializeOwned;

use crate::log::log;
use crate::plain_file;
use crate::sys::{self, check};

/// The socket to the daemon. It leads out of the box, so it must be gone before the guest serves.
pub(crate) struct BootSocket(OwnedFd);

/// Who tells a guest what it is, and is told that it serves.
pub(crate) trait Daemon: Sized {
    /// What the box is, and the secret of its door if it has one.
    fn receive(&self) -> io::Result<(BootConfig, Option<String>)>;

    /// Tells the daemon that the guest serves, and closes the way out.
    fn ready(self) -> io::Result<()>;

    fn failed(self, error: &io::Error);
}

/// The daemon behind standard input and output.
pub(crate) struct Stdio;

impl Daemon for Stdio {
    fn receive(&self) -> io::Result<(BootConfig, Option<String>)> {
        let mut message = Vec::new();
        let limit = MAX_BOOT_MESSAGE as u64;
        io::stdin().lock().take(limit).read_to_end(&mut message)?;
        let BootOnStdio { config, secret } = parse(&message)?;
        Ok((config, Some(secret)))
    }

    fn ready(self) -> io::Result<()> {
        let said = tell(READY);
        // Whatever leads out of the box stands in the way of a memory image.
        let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        for number in 0..3 {
            // SAFETY: takes integers. Nothing in this process owns the standard descriptors.
            check(unsafe { libc::dup2(null.as_raw_fd(), number) })?;
        }
        said
    }

    fn failed(self, error: &io::Error) {
        let _ = tell(format!("the guest cannot start: {error}").as_bytes());
    }
}

fn tell(words: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(words)?;
    out.flush()
}

fn parse<T: DeserializeOwned>(message: &[u8]) -> io::Result<T> {
    serde_json::from_slice(message).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Makes what a launcher makes for a guest that it starts itself.
pub(crate) fn settle_in() {
    // SAFETY: takes nothing.
    unsafe { libc::setsid() };
    // gVisor puts a filesystem of its own over an empty /tmp, which would be gone with the box.
    // SAFETY: the pointer is that of a C string.
    unsafe { libc::umount2(c"/tmp".as_ptr(), libc::MNT_DETACH) };
    for (folder, mode) in [("/run/dorm", 0o755), ("/run/lock", 0o1777), ("/tmp", 0o1777)] {
        let made = fs::create_dir_all(folder)
            .and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(mode)));
        if let Err(e) = made {
            log!("{folder} cannot be made: {e}");
        }
    }
}

impl BootSocket {
    pub(crate) fn take() -> io::Result<Self> {
        sys::set_cloexec(BOOT_FD)?;
        // SAFETY: F_SETFL takes an integer. The guest waits for the message before it does anything else.
        check(unsafe { libc::fcntl(BOOT_FD, libc::F_SETFL, 0) })?;
        // SAFETY: the descriptor is open, as the call above has shown, and handed to process 1 to own.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(BOOT_FD) }))
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
}

impl Daemon for BootSocket {
    fn receive(&self) -> io::Result<(BootConfig, Option<String>)> {
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
        Ok((parse(message)?, None))
    }

    fn ready(self) -> io::Result<()> {
        self.send(READY)
    }

    fn failed(self, error: &io::Error) {
        let _ = self.send(format!("the guest cannot start: {error}").as_bytes());
    }
}

pub(crate) fn listen() -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(GUEST_SOCKET)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Writes what the box must know about itself. A box without these files is worse, but it is a box.
///
/// Also of a box that was forked: its files and memory still name the one that it was forked from.
pub(crate) fn apply(agent_id: &str, hostname: &str, nameservers: &[String]) {
    if !nameservers.is_empty() {
        let lines: String = nameservers.iter().map(|n| format!("nameserver {n}\n")).collect();
        write_logged(Path::new("/etc/resolv.conf"), lines.as_bytes());
    }
    if !agent_id.is_empty() {
        write_logged(Path::new(AGENT_ID_PATH), format!("{agent_id}\n").as_bytes());
    }
    let former = plain_file::text("/etc/hostname");
    if !hostname.is_empty() {
        write_logged(Path::new("/etc/hostname"), format!("{hostname}\n").as_bytes());
        // The launcher, or whoever restores a container, has done that already, and may; elsewhere it is the guest's part.
        // SAFETY: the pointer and the length are those of a live string.
        unsafe { libc::sethostname(hostname.as_ptr().cast(), hostname.len()) };
    }
    let hosts = Path::new("/etc/hosts");
    let old = plain_file::text(hosts);
    if let Some(new) = with_hosts(&old, former.trim(), hostname) {
        write_logged(hosts, new.as_bytes());
    }
}

/// Mixes what the daemon sent into the kernel's random source. It is the host's as well, and goes on whatever
/// was restored, so this can only help.
pub(crate) fn stir(entropy: &[u8]) {
    let mut options = fs::OpenOptions::new();
    // Root in the box may have put a pipe there.
    let opened = options
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/urandom");
    if let Err(e) = opened.and_then(|mut pool| pool.write_all(entropy)) {
        log!("the random source takes nothing: {e}");
    }
}

fn write_logged(path: &Path, contents: &[u8]) {
    if let Err(e) = plain_file::replace(path, contents) {
        log!("{} cannot be written: {e}", path.display());
    }
}

/// The hosts file with localhost and the box's own name, and without the line that `former` was given here, or
/// `None` if that is what it is.
fn with_hosts(old: &str, former: &str, hostname: &str) -> Option<String> {
    let own = |name: &str| format!("127.0.1.1\t{name}\n");
    let mut new: String = old
        .split_inclusive('\n')
        .filter(|line| former == hostname || former.is_empty() || **line != own(former))
        .collect();
    let has = |name: &str| {
        new.lines()
            .map(|l| l.split('#').next().unwrap_or_default())
            .any(|l| l.split_whitespace().skip(1).any(|n| n == name))
    };
    let mut added = String::new();
    if !has("localhost") {
        added.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    if !hostname.is_empty() && !has(hostname) {
        added.push_str(&own(hostname));
    }
    if !added.is_empty() && !new.is_empty() && !new.ends_with('\n') {
        new.push('\n');
    }
    new.push_str(&added);
    (new != old).then_some(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_gets_what_it_lacks_and_keeps_what_it_has() {
        let made = with_hosts("", "", "box").unwrap();
        assert!(made.starts_with("127.0.0.1\tlocalhost\n") && made.ends_with("127.0.1.1\tbox\n"));
        assert_eq!(with_hosts(&made, "box", "box"), None);
        let kept = with_hosts("127.0.0.1 localhost # box\n10.0.0.1 db", "", "box").unwrap();
        assert_eq!(kept, "127.0.0.1 localhost # box\n10.0.0.1 db\n127.0.1.1\tbox\n");
        let renamed = with_hosts(&made, "box", "fork").unwrap();
        assert_eq!(renamed, made.replace("box", "fork"));
        let theirs = with_hosts("127.0.0.1 localhost box\n", "box", "fork").unwrap();
        assert_eq!(theirs, "127.0.0.1 localhost box\n127.0.1.1\tfork\n");
    }
}
