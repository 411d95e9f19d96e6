//! The guest as process 1, in namespaces of its own but for the user's.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use dorm_proto::boot::{BOOT_FD, BootConfig, GUEST_SOCKET};
use serde_json::json;

use crate::client::{Guest, eventually, shell};

struct Booted {
    daemon: Daemon,
    /// `unshare`, whose only child is the guest.
    child: Child,
    /// What the guest's end of the boot socket is called in /proc.
    way_out: PathBuf,
}

struct Daemon(OwnedFd);

impl Daemon {
    /// Both ends of a boot socket.
    fn pair() -> (Self, OwnedFd) {
        let mut fds = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: there is room for two descriptors, which nobody else owns.
        unsafe {
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()), 0);
            (Self(OwnedFd::from_raw_fd(fds[0])), OwnedFd::from_raw_fd(fds[1]))
        }
    }

    fn send(&self, message: &[u8]) {
        // SAFETY: the pointer and the length are those of a live slice.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
        assert_eq!(usize::try_from(sent).unwrap(), message.len());
    }

    /// One message.
    fn receive(&self) -> Vec<u8> {
        let mut message = vec![0; 4096];
        // SAFETY: the pointer and the length are those of a live, exclusive buffer.
        let n = unsafe { libc::recv(self.0.as_raw_fd(), message.as_mut_ptr().cast(), message.len(), 0) };
        message.truncate(usize::try_from(n).unwrap());
        message
    }
}

/// Connects inside the network namespace of a process.
fn connect_in(pid: u32) -> UnixStream {
    let connect = move || {
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net")).unwrap();
        // SAFETY: setns changes the calling thread only, which ends right after.
        let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(entered, 0);
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(GUEST_SOCKET).unwrap()).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// What the descriptors of a process lead to.
fn descriptors(pid: u32) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    folder
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .collect()
}

fn boot(message: &[u8]) -> Booted {
    let (daemon, guests_end) = Daemon::pair();
    let way_out = std::fs::read_link(format!("/proc/self/fd/{}", guests_end.as_raw_fd())).unwrap();
    // Folders that the guest writes to are the box's own.
    let script = "mount -t tmpfs none /etc && mount -t tmpfs none /var && mount -t tmpfs none /run && mkdir /run/dorm && exec \"$0\"";
    let mut command = Command::new("unshare");
    command
        .args([
            "--pid",
            "--fork",
            "--mount",
            "--mount-proc",
            "--uts",
            "--net",
            "--kill-child",
            "sh",
            "-c",
            script,
        ])
        .arg(env!("CARGO_BIN_EXE_dorm-guest"))
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let fd = guests_end.as_raw_fd();
    // SAFETY: dup2 and fcntl are safe to call between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let done = if fd == BOOT_FD {
                libc::fcntl(fd, libc::F_SETFD, 0)
            } else {
                libc::dup2(fd, BOOT_FD)
            };
            if done < 0 {
                Err(std::io::Error::last_os_error())
            } else {
                Ok(())
            }
        });
    }
    let child = command.spawn().unwrap();
    drop(guests_end);
    daemon.send(message);
    Booted {
        daemon,
        child,
        way_out,
    }
}

/// The process that `unshare` has started.
fn init_of(unshare: u32) -> u32 {
    let mut pid = 0;
    eventually("unshare has its child", || {
        let children = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        pid = children.unwrap_or_default().trim().parse().unwrap_or(0);
        pid != 0
    });
    pid
}

fn config() -> Vec<u8> {
    let config = BootConfig {
        agent_id: "abc".into(),
        hostname: "mybox".into(),
        env: [("BOX_VAR".to_owned(), "yes".to_owned())].into(),
        nameservers: vec!["192.0.2.1".into()],
        start_command: Some(dorm_proto::boot::Command {
            command: "echo begun; exec sleep 100".into(),
            user: None,
            keeps_awake: false,
        }),
        ..Default::default()
    };
    serde_json::to_vec(&config).unwrap()
}

#[test]
fn process_1_boots_serves_reaps_and_stops() {
    let Booted {
        daemon,
        child,
        way_out,
    } = boot(&config());
    let pid = init_of(child.id());
    let mut guest = Guest::of(child, move || connect_in(pid));
    assert_eq!(daemon.receive(), b"ready");
    eventually("no descriptor leads out of the box any more", || {
        !descriptors(pid).contains(&way_out)
    });

    let output =
        guest.shell("echo $$ $BOX_VAR; cat /run/dorm/agent-id /etc/resolv.conf /etc/hostname /etc/hosts");
    let (first, files) = output.stdout.split_once('\n').unwrap();
    assert!(first.ends_with(" yes"), "{first}");
    assert!(
        files.starts_with("abc\nnameserver 192.0.2.1\nmybox\n127.0.0.1\tlocalhost\n"),
        "{files}"
    );
    assert!(files.ends_with("127.0.1.1\tmybox\n"), "{files}");

    let replay = json!({"process": {"tag": "start"}, "replayFrom": "0"});
    guest
        .stream("process.Process/Connect", &replay, &[])
        .until("begun\n");
    let runs = guest.call("process.Process/List", &json!({}));
    assert_eq!(runs["processes"][0]["keepsAwake"], false, "{runs}");

    guest.shell("for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.0$0; exit $0' $i &) ; done");
    eventually("orphans are reaped", || {
        let processes = guest.get("/dorm/processes").json();
        processes.as_array().unwrap().len() == 2
    });

    let inside = r#"
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("\0dorm-guest")
try:
    s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    print(len(s.recv(100)))
except ConnectionError: print(0)
"#;
    let output = guest
        .start_run(&json!({"process": {"cmd": "python3", "args": ["-c", inside]}}))
        .output();
    assert_eq!(
        output.stdout, "0\n",
        "a process of the box is not answered: {output:?}"
    );

    let mut running = guest.start_run(&shell("echo up; sleep 100"));
    running.until("up");
    // SAFETY: kill takes two integers; the pid is that of our own guest.
    let asked = unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGTERM) };
    assert_eq!(asked, 0);
    assert_eq!(running.output().end["status"], "signal: terminated");
    assert!(guest.wait().success());
}

#[test]
fn a_box_that_is_told_who_it_is_now_forgets_who_it_was() {
    let Booted { daemon, child, .. } = boot(&config());
    let pid = init_of(child.id());
    let guest = Guest::of(child, move || connect_in(pid));
    assert_eq!(daemon.receive(), b"ready");
    let told = json!({
        "agentId": "def", "hostname": "fork", "nameservers": ["192.0.2.2"], "entropy": "c2FsdA==",
        "envVars": {"BOX_VAR": "no"},
    });
    let init = guest.request("POST", "/init", &[], told.to_string().as_bytes());
    assert_eq!(init.status, 204);
    let output =
        guest.shell("echo $BOX_VAR; cat /run/dorm/agent-id /etc/resolv.conf /etc/hostname /etc/hosts");
    assert!(
        output
            .stdout
            .starts_with("no\ndef\nnameserver 192.0.2.2\nfork\n127.0.0.1\tlocalhost\n"),
        "{output:?}"
    );
    assert!(
        output.stdout.ends_with("127.0.1.1\tfork\n") && !output.stdout.contains("mybox"),
        "{output:?}"
    );
    let bad = guest.request("POST", "/init", &[], br#"{"entropy": "?"}"#);
    assert_eq!(bad.status, 400);
}

#[test]
fn a_boot_message_that_makes_no_sense_is_answered_with_the_reason() {
    let Booted {
        daemon, mut child, ..
    } = boot(b"{\"env\": 5}");
    let answer = String::from_utf8(daemon.receive()).unwrap();
    assert!(
        answer.starts_with("the guest cannot start: invalid type"),
        "{answer}"
    );
    assert!(!child.wait().unwrap().success());
}
