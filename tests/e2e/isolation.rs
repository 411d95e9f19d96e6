//! What root of a box can see and do outside of it: nothing. Each probe runs as root in a real box.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Server};

harness::tests![
    a_box_sees_its_own_processes_only,
    a_box_sees_no_file_of_the_host,
    a_box_sees_no_file_of_another_box,
    a_box_reaches_no_abstract_socket_of_host_or_neighbour,
    no_process_of_a_box_can_speak_to_its_guest,
    no_device_of_the_host_can_be_mounted_or_made,
    nothing_can_be_mounted_at_all,
    no_module_can_be_loaded,
    the_hosts_settings_cannot_be_written,
    raw_devices_and_the_kernels_log_are_out_of_reach,
    masked_paths_are_empty,
    no_namespace_can_be_made_or_entered,
    dangerous_system_calls_are_refused,
    a_32_bit_call_does_not_get_around_the_filter,
    a_subvolume_cannot_be_made_in_a_home,
    root_of_a_box_is_nobody_on_the_host,
    two_boxes_share_no_uid,
    capabilities_are_bounded,
    no_descriptor_of_the_host_is_open_in_a_box,
    the_cgroup_of_a_box_cannot_be_changed_from_inside,
    the_machine_of_a_box_has_an_identity_of_its_own,
    the_guest_binary_cannot_be_replaced_from_inside,
    a_home_full_of_traps_starts_all_the_same,
    a_box_whose_files_are_pipes_is_forked_and_comes_back,
];

/// Runs Python in the box that tries things and prints `name: ok` or `name: ERRNO` for each.
fn probe(agent: &Agent, tries: &str) -> Result<Vec<(String, String)>> {
    let script = format!(
        r#"
import ctypes, errno, os, socket, struct, fcntl
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def report(name, error): print(f"{{name}}: {{error}}", flush=True)
def call(name, *args):
    ctypes.set_errno(0)
    result = libc.syscall(*args)
    report(name, "ok" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?"))
def attempt(name, act):
    try: act(); report(name, "ok")
    except OSError as e: report(name, errno.errorcode.get(e.errno, str(e)))
def write(path, text):
    def act():
        fd = os.open(path, os.O_WRONLY)
        try: os.write(fd, text.encode())
        finally: os.close(fd)
    attempt("write " + path, act)
def read(path):
    attempt("read " + path, lambda: open(path, "rb").read(1))
{tries}"#
    );
    let text = agent.python(&script)?.text()?;
    let lines = text.lines().map(|line| line.rsplit_once(": ").map(|(a, b)| (a.to_owned(), b.to_owned())));
    lines.collect::<Option<Vec<_>>>().with_context(|| format!("not understood: {text}"))
}

/// All of `tries` must be refused.
fn refused(agent: &Agent, tries: &str) -> Result<()> {
    let results = probe(agent, tries)?;
    ensure!(!results.is_empty(), "nothing was tried");
    let done: Vec<_> = results.iter().filter(|(_, result)| result == "ok").collect();
    ensure!(done.is_empty(), "these were not refused: {done:?} of {results:?}");
    Ok(())
}

/// All of `tries` must be stopped by policy, whatever their arguments are worth.
fn forbidden(agent: &Agent, tries: &str) -> Result<()> {
    let results = probe(agent, tries)?;
    let strange: Vec<_> = results.iter().filter(|(_, r)| r != "EPERM" && r != "ENOSYS").collect();
    ensure!(!results.is_empty() && strange.is_empty(), "these were not forbidden: {strange:?} of {results:?}");
    Ok(())
}

fn a_box_sees_its_own_processes_only() -> Result<()> {
    let server = Server::shared()?;
    let (agent, other) = (server.agent("own-procs")?, server.agent("other-procs")?);
    other.exec_with(&["-d"], &["sleep", "5151"])?.succeeded()?;
    let seen = agent.root_text("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")?;
    ensure!(!seen.contains("5151") && !seen.contains("dorm-e2e") && !seen.contains("serve"), "{seen}");
    // Threads of a kernel have no command line.
    let count: u32 = agent.root_text("grep -l . /proc/[0-9]*/cmdline | wc -l")?.trim().parse()?;
    ensure!(count < 10, "{count} processes are seen");
    let killed = agent.root(&format!("kill -9 {} {}", server.pid()?, other.pid()?))?;
    ensure!(killed.code != 0 && other.sh_text("echo alive")? == "alive", "{killed}");
    Ok(())
}

fn a_box_sees_no_file_of_the_host() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("own-files")?;
    let canary = tempfile::Builder::new().prefix("canary-of-the-host-").tempfile_in("/var/tmp")?;
    fs::write(canary.path(), "x")?;
    let path = canary.path().display();
    let data = server.data.display();
    let script = format!(
        "for p in {path} {data} /proc/1/root{path} /proc/self/root/../../..{path} /proc/1/cwd{path}; do test -e $p && echo seen $p; done; \
         find / -name 'canary-of-the-host-*' 2>/dev/null; grep -E 'dorm-e2e|pool.img' /proc/self/mountinfo /proc/1/mountinfo | grep -vE 'homes/{}|/guests/' ",
        agent.id
    );
    let seen = agent.root(&script)?.stdout();
    ensure!(seen.is_empty(), "{seen}");
    Ok(())
}

fn a_box_sees_no_file_of_another_box() -> Result<()> {
    let server = Server::shared()?;
    let (agent, other) = (server.agent("files-a")?, server.agent("files-b")?);
    other.root("touch /marker-of-b /tmp/marker-of-b /run/marker-of-b /dev/shm/marker-of-b /home/user/marker-of-b")?.succeeded()?;
    let seen = agent.root("find / -name marker-of-b 2>/dev/null; ipcs -m 2>/dev/null | grep 0x0000d0c5")?.stdout();
    ensure!(seen.is_empty(), "{seen}");
    Ok(())
}

fn a_box_reaches_no_abstract_socket_of_host_or_neighbour() -> Result<()> {
    use std::os::linux::net::SocketAddrExt;
    let server = Server::shared()?;
    let (agent, other) = (server.agent("sockets-a")?, server.agent("sockets-b")?);
    let name = format!("canary-{}", std::process::id());
    let _listener = std::os::unix::net::UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(&name)?)?;
    let listen = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0neighbour'); s.listen(); print('up', flush=True); time.sleep(3600)";
    let run = other.exec_with(&["-d"], &["python3", "-c", listen])?.text()?;
    harness::eventually("the neighbour listens", || {
        Ok(server.dorm(&["logs", &other.name, &run])?.stdout().contains("up").then_some(()))
    })?;
    let connect = |name: &str| format!("attempt('{name}', lambda: socket.socket(socket.AF_UNIX).connect('\\0{name}'))\n");
    let results = probe(&agent, &(connect(&name) + &connect("neighbour")))?;
    ensure!(results.iter().all(|(_, r)| r == "ECONNREFUSED"), "{results:?}");
    ensure!(probe(&other, &connect("neighbour"))?[0].1 == "ok", "the neighbour itself reaches its own");
    Ok(())
}

fn no_process_of_a_box_can_speak_to_its_guest() -> Result<()> {
    let agent = Server::shared()?.agent("guest")?;
    let script = r#"
import socket
for user in (0, 1000):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(20)
    try:
        s.connect("\0dorm-guest")
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        print(repr(s.recv(4096)))
    except OSError as e:
        print(repr(b""))
"#;
    let answers = agent.python(script)?.text()?;
    ensure!(answers.lines().all(|line| line == "b''"), "the guest answered: {answers}");
    ensure!(agent.sh_text("echo fine")? == "fine");
    Ok(())
}

fn no_device_of_the_host_can_be_mounted_or_made() -> Result<()> {
    let agent = Server::shared()?.agent("devices")?;
    refused(
        &agent,
        r#"
for kind, name in ((0o060000, "block"), (0o020000, "character")):
    for major, minor in ((7, 0), (8, 0), (254, 0), (1, 1), (10, 237)):
        path = f"/tmp/{name}-{major}-{minor}"
        def act():
            os.mknod(path, kind | 0o666, os.makedev(major, minor))
            os.close(os.open(path, os.O_RDONLY))
        attempt(f"mknod {name} {major}:{minor}", act)
for source in ("/dev/vda", "/dev/sda", "/dev/loop0", "/dev/mapper/root"):
    attempt("open " + source, lambda: os.close(os.open(source, os.O_RDONLY)))
    for kind in (b"btrfs", b"ext4"):
        call(f"mount {source} {kind}", 165, source.encode(), b"/mnt", kind, 0, 0)
"#,
    )
}

fn nothing_can_be_mounted_at_all() -> Result<()> {
    let agent = Server::shared()?.agent("mounts")?;
    forbidden(
        &agent,
        r#"
call("mount tmpfs", 165, b"none", b"/mnt", b"tmpfs", 0, 0)
call("mount proc", 165, b"none", b"/mnt", b"proc", 0, 0)
call("mount sysfs", 165, b"none", b"/mnt", b"sysfs", 0, 0)
call("mount cgroup2", 165, b"none", b"/mnt", b"cgroup2", 0, 0)
call("mount overlay", 165, b"none", b"/mnt", b"overlay", 0, b"lowerdir=/etc,upperdir=/tmp,workdir=/var/tmp")
call("bind", 165, b"/etc", b"/mnt", 0, 4096, 0)
call("remount proc/sys", 165, 0, b"/proc/sys", 0, 32 | 4096, 0)
call("umount masked", 166, b"/proc/kcore", 2)
call("umount proc/sys", 166, b"/proc/sys", 2)
call("umount root", 166, b"/", 2)
call("pivot_root", 155, b"/", b"/mnt")
call("fsopen", 430, b"tmpfs", 0)
call("open_tree", 428, -100, b"/etc", 1)
call("move_mount", 429, -100, b"/etc", -100, b"/mnt", 0)
call("mount_setattr", 442, -100, b"/proc/sys", 0, 0, 0)
"#,
    )
}

fn no_module_can_be_loaded() -> Result<()> {
    let agent = Server::shared()?.agent("modules")?;
    forbidden(
        &agent,
        r#"
call("init_module", 175, b"\x7fELF", 4, b"")
fd = os.open("/bin/true", os.O_RDONLY)
call("finit_module", 313, fd, b"", 0)
call("delete_module", 176, b"btrfs", 0)
call("kexec_load", 246, 0, 0, 0, 0)
call("kexec_file_load", 320, fd, fd, 0, b"", 0)
"#,
    )
}

fn the_hosts_settings_cannot_be_written() -> Result<()> {
    let agent = Server::shared()?.agent("settings")?;
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern")?;
    refused(
        &agent,
        r#"
write("/proc/sys/kernel/core_pattern", "|/tmp/owned")
write("/proc/sys/kernel/hostname", "owned")
write("/proc/sys/kernel/modprobe", "/tmp/owned")
write("/proc/sys/vm/panic_on_oom", "1")
write("/proc/sys/fs/file-max", "10")
write("/proc/sys/net/ipv4/ip_forward", "0")
write("/proc/sysrq-trigger", "h")
write("/proc/irq/default_smp_affinity", "1")
write("/sys/kernel/uevent_helper", "/tmp/owned")
write("/sys/power/state", "mem")
write("/proc/1/oom_score_adj", "-1000")
call("sethostname", 170, b"owned", 5)
call("settimeofday", 164, b"\0" * 16, 0)
call("reboot", 169, 0xfee1dead, 672274793, 0, 0)
call("swapoff", 168, b"/dev/null")
call("acct", 163, b"/tmp/acct")
"#,
    )?;
    ensure!(fs::read_to_string("/proc/sys/kernel/core_pattern")? == pattern);
    Ok(())
}

fn raw_devices_and_the_kernels_log_are_out_of_reach() -> Result<()> {
    let agent = Server::shared()?.agent("raw")?;
    refused(
        &agent,
        r#"
for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/loop-control",
             "/dev/btrfs-control", "/dev/userfaultfd", "/proc/kmsg", "/proc/kpagecount", "/sys/kernel/debug/x"):
    read(path)
call("syslog", 103, 3, ctypes.create_string_buffer(4096), 4096)
call("iopl", 172, 3)
call("ioperm", 173, 0, 16, 1)
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
"#,
    )?;
    let devices = agent.root_text("cd /dev && find . -type b -o -type c | sort | tr '\\n' ' '")?;
    let known = ["./full", "./null", "./pts/ptmx", "./random", "./tty", "./urandom", "./zero"];
    ensure!(devices.split_whitespace().all(|d| known.contains(&d) || d.starts_with("./pts/")), "{devices}");
    Ok(())
}

fn masked_paths_are_empty() -> Result<()> {
    let agent = Server::shared()?.agent("masked")?;
    let script = "for p in /proc/kcore /proc/keys /proc/timer_list /proc/sched_debug /proc/latency_stats /proc/interrupts; do \
                  test -e $p && head -c 1 $p | wc -c; done; \
                  for d in /proc/acpi /proc/scsi /proc/asound /sys/firmware /sys/devices/virtual/powercap; do test -e $d && ls -A $d; done; true";
    let seen = agent.root_text(script)?;
    ensure!(seen.lines().all(|line| line.trim() == "0"), "{seen}");
    Ok(())
}

fn no_namespace_can_be_made_or_entered() -> Result<()> {
    let agent = Server::shared()?.agent("namespaces")?;
    let flags = "names = dict(mnt=0x20000, cgroup=0x2000000, uts=0x4000000, ipc=0x8000000, user=0x10000000, pid=0x20000000, net=0x40000000, time=0x80)\n";
    forbidden(
        &agent,
        &format!(
            r#"{flags}
for name, flag in names.items():
    call("unshare " + name, 272, flag)
    if name != "time":
        ctypes.set_errno(0)
        pid = libc.syscall(56, flag | 17, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        report("clone " + name, "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()])
arguments = struct.pack("<11Q", 0x10000000, *[0] * 10)
pid = libc.syscall(435, arguments, len(arguments))
if pid == 0: os._exit(0)
report("clone3 user", "ok" if pid > 0 else errno.errorcode[ctypes.get_errno()])
for name in ("mnt", "uts", "net", "user", "pid"):
    fd = os.open("/proc/1/ns/" + name, os.O_RDONLY)
    call("setns " + name, 308, fd, 0)
"#
        ),
    )?;
    let as_user = agent.sh("unshare --user true")?;
    ensure!(as_user.code != 0, "an ordinary user made a user namespace: {as_user}");
    Ok(())
}

fn dangerous_system_calls_are_refused() -> Result<()> {
    let agent = Server::shared()?.agent("calls")?;
    forbidden(
        &agent,
        r#"
call("bpf", 321, 0, b"\0" * 128, 128)
call("perf_event_open", 298, b"\0" * 128, 0, -1, -1, 0)
call("io_uring_setup", 425, 8, ctypes.create_string_buffer(256))
call("keyctl", 250, 0, -3, 1)
call("add_key", 248, b"user", b"x", b"y", 1, -3)
call("userfaultfd", 323, 0)
call("open_by_handle_at", 304, -100, b"\0" * 64, 0)
call("name_to_handle_at", 303, -100, b"/etc", ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0)
call("quotactl", 179, 0, b"/dev/null", 0, 0)
call("fanotify_init", 300, 0, 0)
call("lookup_dcookie", 212, 0, 0, 0)
call("a call of the future", 1023)
"#,
    )
}

fn a_32_bit_call_does_not_get_around_the_filter() -> Result<()> {
    let agent = Server::shared()?.agent("abi")?;
    // mov eax, 310 (unshare in the i386 table); mov ebx, CLONE_NEWUTS; int 0x80; ret
    let script = r#"
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("53" "b836010000" "bb00000004" "cd80" "5b" "c3"))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
before = os.readlink("/proc/self/ns/uts")
result = call()
print("escaped" if result >= 0 or os.readlink("/proc/self/ns/uts") != before else "refused", flush=True)
"#;
    let output = agent.python(script)?;
    ensure!(!output.stdout().contains("escaped"), "{output}");
    let x32 = agent.python("import ctypes; print(ctypes.CDLL(None).syscall(0x40000000 | 272, 0x4000000))")?;
    ensure!(x32.code != 0 || x32.stdout().trim() == "-1", "{x32}");
    Ok(())
}

fn a_subvolume_cannot_be_made_in_a_home() -> Result<()> {
    let agent = Server::shared()?.agent("subvolume")?;
    forbidden(
        &agent,
        r#"
home = os.open("/root", os.O_RDONLY)
name = b"sub"
arguments = struct.pack("<q4088s", 0, name)
call("subvolume create", 16, home, 0x5000940E, arguments)
call("subvolume create v2", 16, home, 0x50009418, struct.pack("<qQQ32x4040s", 0, 0, 0, name))
call("snapshot", 16, home, 0x50009401, struct.pack("<q4088s", os.open("/", os.O_RDONLY), name))
call("snapshot v2", 16, home, 0x50009417, struct.pack("<qQQ32x4040s", os.open("/", os.O_RDONLY), 0, 0, name))
call("quota off", 16, home, 0xC0109428, struct.pack("<QQ", 2, 0))
call("quota limit", 16, home, 0x8030942B, bytes(48))
call("subvolume list", 16, home, 0xD0009411, ctypes.create_string_buffer(4096))
"#,
    )?;
    let clone = agent.root_text("echo data > /root/a && cp --reflink=always /root/a /root/b && cat /root/b")?;
    ensure!(clone == "data", "an ordinary clone of a file's content works");
    Ok(())
}

/// First host uid and the number of uids of the box that process 1 of `agent` is in.
fn uid_map(agent: &Agent) -> Result<(u32, u32)> {
    let map = fs::read_to_string(format!("/proc/{}/uid_map", agent.pid()?))?;
    let numbers: Vec<u32> = map.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(numbers.len() == 3 && numbers[0] == 0, "{map}");
    Ok((numbers[1], numbers[2]))
}

fn root_of_a_box_is_nobody_on_the_host() -> Result<()> {
    let agent = Server::shared()?.agent("nobody")?;
    let (first, count) = uid_map(&agent)?;
    ensure!(first >= 100_000 && count == 65_536, "{first} {count}");
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid()?))?;
    for field in ["Uid:", "Gid:"] {
        let line = status.lines().find(|l| l.starts_with(field)).context("status has ids")?;
        ensure!(line.split_whitespace().skip(1).all(|id| id == first.to_string()), "{line}");
    }
    ensure!(status.lines().any(|l| l.split_whitespace().eq(["Groups:"])), "it kept groups of the host: {status}");
    Ok(())
}

fn two_boxes_share_no_uid() -> Result<()> {
    let server = Server::shared()?;
    let (a, b) = (server.agent("uids-a")?, server.agent("uids-b")?);
    let ((first_a, count_a), (first_b, count_b)) = (uid_map(&a)?, uid_map(&b)?);
    ensure!(first_a + count_a <= first_b || first_b + count_b <= first_a, "{first_a} and {first_b} overlap");
    Ok(())
}

fn capabilities_are_bounded() -> Result<()> {
    let agent = Server::shared()?.agent("capabilities")?;
    let text = agent.root_text("grep -h ^CapBnd /proc/1/status /proc/self/status")?;
    for line in text.lines() {
        let bound = u64::from_str_radix(line.split_whitespace().nth(1).context("a value")?, 16)?;
        let forbidden = [(12, "NET_ADMIN"), (21, "SYS_ADMIN"), (16, "SYS_MODULE"), (17, "SYS_RAWIO"), (22, "SYS_BOOT"), (23, "SYS_NICE"),
            (24, "SYS_RESOURCE"), (25, "SYS_TIME"), (34, "SYSLOG"), (38, "PERFMON"), (39, "BPF"), (2, "DAC_READ_SEARCH"), (40, "CHECKPOINT_RESTORE")];
        let has: Vec<_> = forbidden.iter().filter(|(bit, _)| bound & (1 << bit) != 0).collect();
        ensure!(has.is_empty(), "{has:?} in {line}");
    }
    let ambient = agent.root_text("grep -h ^CapAmb /proc/self/status")?;
    ensure!(ambient.ends_with("0000000000000000"), "{ambient}");
    Ok(())
}

fn no_descriptor_of_the_host_is_open_in_a_box() -> Result<()> {
    let agent = Server::shared()?.agent("descriptors")?;
    let pid = agent.pid()?;
    let mut open = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        open.extend(harness::unless_gone(fs::read_link(entry?.path()))?.map(|target| target.display().to_string()));
    }
    let own = |target: &String| {
        ["socket:", "anon_inode:", "pipe:", "/dev/null", "/memfd:", "/var/log/", "/run/", "/var/lib/"].iter().any(|p| target.starts_with(p))
    };
    ensure!(open.iter().all(own), "{open:?}");
    let seen = agent.root_text("ls -l /proc/self/fd | grep -vE 'pipe:|socket:|/proc/|total|/dev/null' | wc -l")?;
    ensure!(seen == "0", "a run has {seen} strange descriptors");
    let namespaces = agent.root_text("readlink /proc/self/ns/*")?;
    for line in namespaces.lines().filter(|l| !l.starts_with("time")) {
        let (kind, _) = line.split_once(':').context("a namespace")?;
        ensure!(fs::read_link(format!("/proc/self/ns/{kind}"))?.to_str() != Some(line), "{kind} is the host's");
    }
    Ok(())
}

fn the_cgroup_of_a_box_cannot_be_changed_from_inside() -> Result<()> {
    let agent = Server::shared()?.agent("cgroup")?;
    let seen = agent.root_text("find /sys/fs/cgroup -name '*max' -o -name 'memory.limit_in_bytes' 2>/dev/null | head -3; cat /proc/self/cgroup")?;
    ensure!(!seen.contains("/sys/fs/cgroup") && !seen.contains(&agent.id), "{seen}");
    Ok(())
}

fn the_machine_of_a_box_has_an_identity_of_its_own() -> Result<()> {
    let server = Server::shared()?;
    let (a, b) = (server.agent("identity-a")?, server.agent("identity-b")?);
    let boot = "cat /proc/sys/kernel/random/boot_id";
    let (of_a, of_b) = (a.root_text(boot)?, b.root_text(boot)?);
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    ensure!(of_a != of_b && of_a != host.trim(), "{of_a} {of_b} {host}");
    a.stop()?;
    ensure!(a.root_text(boot)? != of_a, "a new start is a new boot");
    Ok(())
}

fn the_guest_binary_cannot_be_replaced_from_inside() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("guest-file")?;
    let script = "echo x > /run/dorm/guest; rm -f /run/dorm/guest; mv /run/dorm/guest /tmp/; chmod 777 /run/dorm/guest; exec 3<>/proc/1/exe && echo x >&3";
    let output = agent.root(script)?;
    ensure!(output.code != 0, "{output}");
    for entry in fs::read_dir(server.data.join("guests"))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // What machines boot with, with a guest in it, is named by what it was made of.
        if name.starts_with("initrd-") {
            continue;
        }
        let hash = blake3::hash(&fs::read(entry.path())?).to_hex();
        ensure!(name == hash.as_str(), "the guest's file was changed");
    }
    Ok(())
}

/// What is opened by a guest as a file must not be waited for.
fn a_box_whose_files_are_pipes_is_forked_and_comes_back() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("pipes")?;
    agent.root("for file in /etc/resolv.conf /etc/hostname /etc/hosts; do rm -f $file; mkfifo $file; done")?.succeeded()?;
    let fork = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &fork])?.succeeded()?;
    let fork = server.adopt(&fork)?;
    ensure!(fork.exec(&["hostname"])?.text()? == fork.name);
    ensure!(fork.exec(&["cat", "/etc/hostname"])?.text()? == fork.name);
    // The guest has this one open.
    agent.root("rm -f /var/log/dorm/guest.log; mkfifo /var/log/dorm/guest.log")?.succeeded()?;
    agent.stop()?;
    ensure!(agent.exec(&["cat", "/etc/hostname"])?.text()? == agent.name);
    // Nobody is found in these, but nobody waits either.
    agent.root("rm /etc/passwd; mkfifo /etc/passwd")?.succeeded()?;
    agent.exec_with(&["-u", "root"], &["true"])?.succeeded()?;
    Ok(())
}

fn a_home_full_of_traps_starts_all_the_same() -> Result<()> {
    let agent = Server::shared()?.agent("traps")?;
    let canary = tempfile::tempdir()?;
    let outside = canary.path().display();
    let script = format!(
        "rm -rf /etc/resolv.conf /etc/hostname /etc/hosts /var/log/dorm; ln -s {outside}/a /etc/resolv.conf; ln -s {outside}/b /etc/hostname; \
         mkdir /etc/hosts; ln -s {outside} /var/log/dorm; chmod 000 /tmp"
    );
    agent.root(&script)?.succeeded()?;
    agent.stop()?;
    ensure!(agent.sh_text("echo started")? == "started");
    ensure!(fs::read_dir(canary.path())?.next().is_none(), "a link in the home was followed on the host");
    Ok(())
}
