//! Agents whose boxes are virtual machines. In emulation a machine takes seconds to start, so that each test asks for as few
//! of them as it can, and much of each.

use std::collections::HashSet;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Outside, Server, Skip, answers_peer_address};
use crate::network::{connect, is_error};

mod isolations;
mod full;
pub(crate) mod jail;
mod ports;
mod room;

use isolations::{
    an_agent_keeps_its_files_whatever_isolation_it_gets, an_agent_that_cannot_become_a_machine_goes_on_as_it_was,
    an_agent_that_is_deleted_while_its_isolation_changes_goes_without_its_files_being_waited_for,
};
use full::a_machine_on_a_full_disk_loses_nothing_that_it_has_synced;
use jail::qemu_and_the_file_server_of_a_machine_are_locked_up;
use ports::what_root_of_a_machine_says_on_its_ports_hurts_nobody_else;
use room::{
    a_disk_that_qemu_makes_longer_gives_a_machine_no_more_room,
    a_file_named_as_a_machines_disk_is_a_file_of_the_machine, connections_that_nobody_accepts_leave_room_for_others,
    files_are_not_kept_without_a_memory_that_has_what_the_disk_lacks,
    runs_in_a_machine_have_as_many_processes_as_they_may, what_a_machine_gives_up_the_host_has_again,
    what_a_machine_had_in_memory_is_nowhere_once_that_is_given_up,
};

harness::tests![
    a_machine_has_a_kernel_of_its_own_and_what_containers_deny,
    a_ring_of_io_uring_goes_on_over_the_disk_and_the_end_of_network_and_daemon,
    forks_of_a_machine_are_nobody_but_themselves_and_a_rollback_is_whole,
    a_damaged_state_of_a_machine_costs_its_memory_and_never_its_files,
    a_fork_of_a_machines_damaged_snapshot_is_refused_and_the_machine_goes_on,
    the_end_of_a_machine_is_noticed_and_told_as_what_it_is,
    qemu_and_the_file_server_of_a_machine_are_locked_up,
    what_root_of_a_machine_says_on_its_ports_hurts_nobody_else,
    a_machine_on_a_full_disk_loses_nothing_that_it_has_synced,
    a_file_named_as_a_machines_disk_is_a_file_of_the_machine,
    a_disk_that_qemu_makes_longer_gives_a_machine_no_more_room,
    runs_in_a_machine_have_as_many_processes_as_they_may,
    what_a_machine_gives_up_the_host_has_again,
    what_a_machine_had_in_memory_is_nowhere_once_that_is_given_up,
    files_are_not_kept_without_a_memory_that_has_what_the_disk_lacks,
    connections_that_nobody_accepts_leave_room_for_others,
    an_agent_keeps_its_files_whatever_isolation_it_gets,
    an_agent_that_cannot_become_a_machine_goes_on_as_it_was,
    an_agent_that_is_deleted_while_its_isolation_changes_goes_without_its_files_being_waited_for,
    a_container_engine_of_the_boxs_own_goes_on_over_the_disk,
];

/// Where `scripts/setup-vm` found no QEMU to be had, it said so, and there is nothing to test.
pub(crate) fn needs_machines() -> Result<()> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&folders).chain(["/usr/bin".into()]);
    let qemu = folders.any(|folder| folder.join("qemu-system-x86_64").is_file());
    let kernel = std::path::Path::new("/usr/local/lib/dorm/vm/current/kernel").is_file();
    if qemu && kernel {
        return Ok(());
    }
    let reason = "virtual machines are not set up here; see scripts/setup-vm";
    Err(harness::engines::skipped("vm", reason.to_owned()))
}

/// A template of a few megabytes, `small`, so that what is done to all files is soon done.
pub(crate) fn import_small(server: &Arc<Server>) -> Result<()> {
    let archive = harness::tar(&harness::rootfs()?)?;
    server.dorm_with_input(&["template", "import", "small", "-"], &archive)?.succeeded().map(drop)
}

fn machine(server: &Arc<Server>, label: &str) -> Result<Agent> {
    server.agent_with(label, &["--isolation", "vm", "--memory", "256M", "--cpus", "1"])
}

/// Reads a packet off an interface of its own, and sends it back to whom it came from.
const TUN: &str = r#"
import fcntl, os, socket, struct, subprocess
tun = os.open('/dev/net/tun', os.O_RDWR)
fcntl.ioctl(tun, 0x400454ca, struct.pack('16sH22x', b'own', 0x1001))
subprocess.run('ip address add 192.0.2.1/24 dev own && ip link set own up', shell=True, check=True)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.sendto(b'there', ('192.0.2.2', 9))
packet = b''
while not packet.endswith(b'there'): packet = os.read(tun, 2000)
# The sums are the same the other way round.
os.write(tun, packet[:12] + packet[16:20] + packet[12:16] + packet[22:24] + packet[20:22] + packet[24:])
data, peer = sender.recvfrom(99)
assert peer == ('192.0.2.2', 9), peer
print(data.decode(), 'and back')
"#;

/// Mounts a file system of its own, with a root that was changed at a certain time and nothing else.
const FUSE: &str = r#"
import ctypes, os, struct
fuse = os.open('/dev/fuse', os.O_RDWR)
os.mkdir('/mnt/own')
libc = ctypes.CDLL(None, use_errno=True)
options = f'fd={fuse},rootmode=40000,user_id=0,group_id=0'.encode()
assert libc.mount(b'own', b'/mnt/own', b'fuse', 0, options) == 0, os.strerror(ctypes.get_errno())
asker = os.fork()
if asker == 0:
    print(int(os.stat('/mnt/own').st_mtime), flush=True)
    os._exit(0)
call = 0
while call != 3:
    _, call, number = struct.unpack_from('IIQ', os.read(fuse, 1 << 17))
    answer = {
        26: struct.pack('4I2HI', 7, 12, 65536, 0, 0, 0, 65536),
        3: struct.pack('QII6Q10I', 0, 0, 0, 1, 0, 0, 0, 1234567, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0),
    }.get(call, b'')
    os.write(fuse, struct.pack('IiQ', 16 + len(answer), 0 if answer else -38, number) + answer)
assert os.waitpid(asker, 0)[1] == 0
assert libc.umount(b'/mnt/own') == 0, os.strerror(ctypes.get_errno())
"#;

/// Sends operations through a ring, one after the other, and counts those that came back.
const RING: &str = r#"
import ctypes, mmap, os, struct, time
libc = ctypes.CDLL(None, use_errno=True)
params = ctypes.create_string_buffer(120)
ring = libc.syscall(425, 8, params)
assert ring >= 0, os.strerror(ctypes.get_errno())
sq = struct.unpack_from('10I', params, 40)
cq = struct.unpack_from('10I', params, 80)
size = max(sq[6] + 8 * 4, cq[5] + 16 * 16)
rings = mmap.mmap(ring, size, offset=0)
entries = mmap.mmap(ring, 8 * 64, offset=0x10000000)
def get(at): return struct.unpack_from('I', rings, at)[0]
def put(at, value): struct.pack_into('I', rings, at, value)
secret, count = os.urandom(8).hex(), 0
while True:
    tail = get(sq[1])
    slot = tail & get(sq[2])
    entries[slot * 64:slot * 64 + 64] = bytes(32) + struct.pack('Q', count) + bytes(24)
    put(sq[6] + 4 * slot, slot)
    put(sq[1], tail + 1)
    assert libc.syscall(426, ring, 1, 1, 1, 0, 0) == 1, os.strerror(ctypes.get_errno())
    head = get(cq[0])
    assert get(cq[1]) == head + 1
    at = cq[5] + 16 * (head & get(cq[2]))
    assert struct.unpack_from('Qi', rings, at) == (count, 0)
    put(cq[0], head + 1)
    count += 1
    with open('/tmp/ring.new', 'w') as f: f.write(f'{secret} {count}')
    os.rename('/tmp/ring.new', '/tmp/ring')
    time.sleep(0.05)
"#;

/// What root can do to the network of its machine, which the daemon does not need. A template without nft has nothing to drop packets with.
const CUT_OFF: &str = "ip link set eth0 down && ip link set eth0 name uplink && { ! command -v nft >/dev/null || nft \
    'add table inet own; add chain inet own coming { type filter hook input priority 0; policy drop; }; \
     add chain inet own going { type filter hook output priority 0; policy drop; }'; }";

/// The link, its address and its routes are there, and lead nowhere.
const FORGET_GATEWAY: &str = "ip neigh flush nud permanent";

/// The ring's secret, and how far it has come.
fn ring(agent: &Agent) -> Result<(String, u64)> {
    let text = agent.sh_text("cat /tmp/ring")?;
    let (secret, count) = text.trim().split_once(' ').context("two words")?;
    Ok((secret.to_owned(), count.parse()?))
}

fn goes_on(agent: &Agent, secret: &str, beyond: u64) -> Result<u64> {
    harness::eventually("the ring goes round", || {
        let (now, count) = ring(agent)?;
        ensure!(now == secret, "it is another process");
        Ok((count > beyond + 2).then_some(count))
    })
}

fn a_machine_has_a_kernel_of_its_own_and_what_containers_deny() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = machine(&server, "machine")?;
    let host = rustix::system::uname();
    let own = agent.sh_text("uname -v")?;
    ensure!(own.trim() != host.version().to_string_lossy(), "it has the host's kernel");
    ensure!(agent.show()?["isolation"] == "vm", "{}", agent.show()?);
    let shown = server.dorm(&["show", &agent.name])?.text()?;
    let says = ["QEMU ", "a disk in its home", "a file beside the disk"].iter().all(|words| shown.contains(words));
    ensure!(says && (shown.contains("emulation (tcg): slow") || shown.contains("(kvm)")), "{shown}");

    agent.until("modules are loaded", "test -e /dev/loop-control -a -e /dev/fuse -a -e /dev/net/tun")?;
    let mounted = agent.root_text(
        "truncate -s 16M /root/image && mke2fs -q /root/image && mkdir -p /mnt/image && mount -o loop /root/image /mnt/image \
         && echo inside > /mnt/image/file && umount /mnt/image && mount -o loop /root/image /mnt/image && cat /mnt/image/file",
    )?;
    ensure!(mounted.trim() == "inside", "{mounted}");
    ensure!(agent.python(TUN)?.text()? == "there and back");
    ensure!(agent.python(FUSE)?.text()? == "1234567");
    // The kernel asks for what it misses: here for what stands behind packet filters.
    let asked = agent.python("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)")?;
    ensure!(asked.code == 0, "{asked}");
    let modules = agent.root_text("grep -o '^nfnetlink ' /proc/modules; ls /lib/modules/$(uname -r)/modules.dep")?;
    ensure!(modules.starts_with("nfnetlink"), "{modules}");

    // What goes in and out: files, ports, the network under the same rules as everybody's.
    agent.sh("echo given > ~/given")?.succeeded()?;
    agent.exec_with(&["-d"], &["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1", "--directory", "/home/user"])?.succeeded()?;
    harness::eventually("the box listens", || {
        let ports = server.json(&["ports", &agent.name])?;
        let open = ports.as_array().context("a list")?.iter().any(|one| one["port"] == 8123);
        Ok(open.then_some(()))
    })?;
    let url = server.json(&["url", &agent.name, "8123"])?;
    let token = url["token"].as_str().context("a token")?.to_owned();
    let name = format!("8123-{}.localhost", agent.id);
    let headers = [("Host", name.as_str()), ("e2b-traffic-access-token", token.as_str())];
    let reply = server.http_with("GET", "/given", &headers, b"")?;
    ensure!(reply.status == 200 && reply.text() == "given\n", "{} {}", reply.status, reply.text());
    let outside = Outside::get()?;
    let there = outside.listen(outside.public)?;
    harness::eventually("the outside sees the host's address", || {
        Ok((connect(&agent, there)? == outside.host.to_string()).then_some(()))
    })?;
    let host = answers_peer_address(TcpListener::bind("0.0.0.0:0")?)?;
    let seen = connect(&agent, (outside.host, host.port()).into())?;
    ensure!(is_error(&seen), "the host was reached: {seen}");

    agent.pause()?;
    ensure!(agent.sh_text("cat ~/given")?.trim() == "given");
    agent.stop()?;
    let left = server.remains.of_box(&agent.id);
    ensure!(left.is_empty(), "{left:?}");
    ensure!(agent.sh_text("cat ~/given")?.trim() == "given", "the next command starts it, with its files");
    Ok(())
}

fn a_ring_of_io_uring_goes_on_over_the_disk_and_the_end_of_network_and_daemon() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    let agent = machine(&server, "ring")?;
    agent.exec_with(&["-d"], &["python3", "-c", RING])?.succeeded()?;
    agent.until("the ring goes round", "test -s /tmp/ring")?;
    let (secret, mut count) = ring(&agent)?;
    for (cut_off, is_there) in [
        ("true", "ip route show default"),
        (CUT_OFF, "ip route show default"),
        (FORGET_GATEWAY, "ip neigh show nud permanent"),
    ] {
        agent.root(cut_off)?.succeeded()?;
        let there = agent.sh_text(is_there)?;
        ensure!(there.is_empty() == (cut_off != "true"), "after {cut_off}: {there}");
        count = goes_on(&agent, &secret, count)?;
        agent.hibernate()?;
        let left = server.remains.of_box(&agent.id);
        ensure!(left.is_empty(), "{left:?}");
        agent.wake()?;
        count = goes_on(&agent, &secret, count)?;
        ensure!(!agent.sh_text(is_there)?.is_empty(), "it is cut off still, after {cut_off}");
    }
    // Its network is there again, at the same device, whatever that is called.
    let address = agent.sh_text("test -e /sys/class/net/uplink && hostname -I")?;
    ensure!(address.trim() == agent.address()?, "{address}");
    let pid = agent.pid()?;
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.pid()? == pid, "it is another box: {}", agent.show()?);
    goes_on(&agent, &secret, count)?;
    for asleep in [Agent::pause as fn(&Agent) -> Result<()>, Agent::hibernate] {
        let begun = Instant::now();
        asleep(&agent)?;
        tells_the_time(&agent)?;
        let took = begun.elapsed();
        asleep(&agent)?;
        // Far longer than an answer takes: a clock that was not set is behind by as much.
        std::thread::sleep(2 * took);
        tells_the_time(&agent)?;
    }
    Ok(())
}

fn now() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

/// It is told after it was asked for, and before this moment, however long that took.
fn tells_the_time(agent: &Agent) -> Result<()> {
    let asked = now()?;
    let told: f64 = agent.sh_text("date +%s.%N")?.trim().parse()?;
    let heard = now()?;
    ensure!(asked <= told && told <= heard, "its clock is at {told}, asked at {asked} and heard at {heard}");
    Ok(())
}

/// Answers, when asked, with random numbers of the kernel's and with what it has in memory.
const TELLER: &str = r#"
import os, time
secret = os.urandom(8).hex()
while True:
    if os.path.exists('/tmp/tell') and not os.path.exists('/tmp/told'):
        with open('/tmp/told.new', 'w') as f: f.write(secret + ' ' + os.urandom(16).hex())
        os.rename('/tmp/told.new', '/tmp/told')
    time.sleep(0.05)
"#;

/// The secret, and a number drawn now.
fn told(agent: &Agent) -> Result<(String, String)> {
    agent.sh("rm -f /tmp/told; touch /tmp/tell")?.succeeded()?;
    agent.until("the teller tells", "test -e /tmp/told")?;
    let text = agent.sh_text("cat /tmp/told; rm /tmp/tell")?;
    let (secret, drawn) = text.trim().split_once(' ').context("two words")?;
    Ok((secret.to_owned(), drawn.to_owned()))
}

/// Draws numbers all the time, and keeps each with the time and the name of the machine then, in this order.
const RESTLESS: &str = r#"
import os, signal, socket, time
seen = []
def tell(*_):
    with open('/tmp/seen.new', 'w') as f: f.writelines(f'{number} {now} {name}\n' for number, now, name in seen)
    os.rename('/tmp/seen.new', '/tmp/seen')
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    seen.append((os.urandom(8).hex(), time.time_ns(), socket.gethostname()))
    time.sleep(0.0005)
"#;

fn seen(agent: &Agent) -> Result<HashSet<String>> {
    agent.sh("rm -f /tmp/seen; pkill -USR1 -f [S]IGUSR1")?.succeeded()?;
    agent.until("it has told", "test -e /tmp/seen")?;
    Ok(agent.sh_text("cat /tmp/seen")?.lines().map(str::to_owned).collect())
}

fn forks_of_a_machine_are_nobody_but_themselves_and_a_rollback_is_whole() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    let agent = machine(&server, "whole")?;
    agent.exec_with(&["-d"], &["python3", "-c", TELLER])?.succeeded()?;
    agent.exec_with(&["-d"], &["python3", "-c", RESTLESS])?.succeeded()?;
    agent.until("it draws numbers", "test -e /tmp/seen && pkill -USR1 -f [S]IGUSR1 && test -s /tmp/seen")?;
    agent.sh("echo before > ~/when; echo before > /dev/shm/when")?.succeeded()?;
    let (secret, _) = told(&agent)?;
    let snapshot = server.dorm(&["snapshot", &agent.name])?.text()?;
    agent.sh("echo after > ~/when; echo after > /dev/shm/when")?.succeeded()?;

    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name, "--from", snapshot.trim(), "--count", "2"])?.succeeded()?;
    let hardware_address = "cat /sys/class/net/eth0/address";
    let mut addresses = HashSet::from([agent.sh_text(hardware_address)?]);
    let (mut drawn, mut forks) = (Vec::new(), Vec::new());
    for number in 1..=2 {
        let fork = server.adopt(&format!("{name}-{number}"))?;
        ensure!(fork.sh_text("cat ~/when /dev/shm/when")? == "before\nbefore", "it is not of the snapshot");
        ensure!(fork.sh_text("hostname; hostname -I")?.split_whitespace().eq([&fork.name, &fork.address()?]));
        ensure!(fork.sh_text("cat /run/dorm/agent-id")?.trim() == fork.id);
        ensure!(addresses.insert(fork.sh_text(hardware_address)?), "it has the hardware address of another: {addresses:?}");
        let (kept, number) = told(&fork)?;
        ensure!(kept == secret, "its memory is another's");
        drawn.push(number);
        forks.push(fork);
    }
    ensure!(drawn[0] != drawn[1], "both drew {}", drawn[0]);
    // Nothing has run in a fork before it knew who it is: what was seen under the source's name was seen in the source.
    let of_source = seen(&agent)?;
    for fork in forks {
        let (own, earlier): (Vec<_>, Vec<_>) = seen(&fork)?.into_iter().partition(|line| line.ends_with(&fork.name));
        ensure!(!own.is_empty() && !earlier.is_empty(), "{} and {} were seen", own.len(), earlier.len());
        let strange = earlier.iter().filter(|line| !of_source.contains(*line)).count();
        ensure!(strange == 0, "{strange} were seen in a fork that took itself for its source");
    }

    server.dorm(&["rollback", &agent.name, snapshot.trim()])?.succeeded()?;
    ensure!(agent.sh_text("cat ~/when /dev/shm/when")? == "before\nbefore", "the rollback is not whole");
    ensure!(told(&agent)?.0 == secret);
    Ok(())
}

/// Hurts a file that a hibernated machine is brought back from, each in another way.
fn damage(file: &Path) -> Result<()> {
    match file.file_name().and_then(|name| name.to_str()) {
        Some("state" | "manifest.json") => {
            let mut bytes = std::fs::read(file)?;
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            Ok(std::fs::write(file, bytes)?)
        }
        Some("memory") => Ok(std::fs::File::options().write(true).open(file)?.set_len(128 << 20)?),
        _ => Ok(std::fs::remove_file(file)?),
    }
}

fn a_damaged_state_of_a_machine_costs_its_memory_and_never_its_files() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = machine(&server, "damaged")?;
    agent.sh("echo kept > ~/file")?.succeeded()?;
    for name in ["state", "manifest.json", "hardware.json", "memory"] {
        agent.sh("echo lost > /dev/shm/memory")?.succeeded()?;
        agent.hibernate()?;
        let images = std::fs::read_dir(server.data.join("images").join(&agent.id))?;
        let images: Vec<_> = images.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        let image = images.iter().find(|path| path.extension().is_none()).context("there is no image")?;
        let home = server.data.join("pool/homes").join(&agent.id);
        damage(&if name == "memory" { &home } else { image }.join(name))?;
        let found = agent.sh_text("cat ~/file; test ! -e /dev/shm/memory || echo its memory is there")?;
        ensure!(found == "kept", "{name}: {found}");
        let shown = agent.show()?;
        let told = shown["reason"].as_str().is_some_and(|why| why.contains("memory is lost"));
        ensure!(shown["state"] == "running" && told, "{name}: {shown}");
        let aside = image.with_extension("bad").is_dir() && home.join("memory.bad").is_file();
        ensure!(aside, "{name}: what could not be used is not kept: {:?}", server.remains.images());
    }
    Ok(())
}

fn a_fork_of_a_machines_damaged_snapshot_is_refused_and_the_machine_goes_on() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = machine(&server, "hurt")?;
    agent.sh("echo kept > /dev/shm/memory")?.succeeded()?;
    let copy = format!("{}-copy", agent.name);
    for (name, why) in [("state", "the checksum of state is wrong"), ("manifest.json", "the checksum of its manifest is wrong")] {
        let snapshot = server.dorm(&["snapshot", &agent.name])?.text()?;
        damage(&server.data.join("images").join(&agent.id).join(snapshot.trim()).join(name))?;
        let forked = server.dorm(&["fork", &agent.name, &copy, "--from", snapshot.trim()])?;
        ensure!(forked.code != 0 && forked.stderr.contains(why), "{name}: {forked}");
        ensure!(!server.names()?.contains(&copy), "a fork without its memory is there");
    }
    ensure!(agent.sh_text("cat /dev/shm/memory")? == "kept");
    Ok(())
}

fn the_end_of_a_machine_is_noticed_and_told_as_what_it_is() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = machine(&server, "ending")?;
    let ends = |how: &str| -> Result<()> {
        let reason = harness::eventually("the end is noticed", || {
            let shown = agent.show()?;
            let noticed = shown["state"] == "failed" || shown["state"] == "stopped";
            Ok(noticed.then(|| shown["reason"].to_string()))
        })?;
        ensure!(reason.contains("the virtual machine of the box ended") && reason.contains(how), "{reason}");
        harness::eventually("nothing of it is left", || Ok(server.remains.of_box(&agent.id).is_empty().then_some(())))
    };
    let qemu = rustix::process::Pid::from_raw(agent.pid()?).context("a pid")?;
    rustix::process::kill_process(qemu, rustix::process::Signal::KILL)?;
    ends("QEMU was killed by signal 9")?;
    agent.sh("echo kept > ~/file; sync")?.succeeded()?;
    // Any fault of its kernel is its end, and not a machine in which programs hang.
    ensure!(agent.sh_text("cat /proc/sys/kernel/panic_on_oops")? == "1");
    // Nobody waits for it, who would start the machine again.
    let panic = "sleep 10; echo c > /proc/sysrq-trigger";
    agent.exec_with(&["-d", "-u", "root"], &["sh", "-c", panic])?.succeeded()?;
    ends("its kernel failed")?;
    ensure!(agent.sh_text("cat ~/file")? == "kept");
    Ok(())
}

const PODMAN: &str = "from = \"base\"\napt = [\"podman\", \"crun\", \"iptables\", \"netavark\", \"busybox-static\"]\n";

/// An image of one static program, so that no registry is needed; and a container that counts.
const CONTAINER: &str = "mkdir -p /srv/image/bin && cp /bin/busybox /srv/image/bin && ln -sf busybox /srv/image/bin/sh \
    && tar -C /srv/image -c . | podman import -q - local/box >/dev/null \
    && podman run -d --name counter local/box /bin/sh -c \
       'i=0; while :; do i=$((i+1)); echo $i > /count; /bin/busybox sleep 0.2; done'";

fn a_container_engine_of_the_boxs_own_goes_on_over_the_disk() -> Result<()> {
    needs_machines()?;
    if std::env::var_os("DORM_E2E_ALL").is_none() {
        return Err(Skip("it takes a minute or two; ./scripts/test --all-engines has it".to_owned()).into());
    }
    let server = Server::start_with(&harness::Options { builds: true, ..Default::default() })?;
    let folder = tempfile::tempdir()?;
    let recipe = folder.path().join("recipe.toml");
    std::fs::write(&recipe, PODMAN)?;
    server.dorm(&["template", "build", "podman", "-f", &recipe.display().to_string()])?.succeeded()?;
    let agent = server.agent_with("podman", &["-T", "podman", "--isolation", "vm", "--memory", "1G", "--cpus", "2"])?;
    let id = agent.root_text(CONTAINER)?;
    let count = || -> Result<u64> { Ok(agent.root_text("podman exec counter /bin/busybox cat /count")?.trim().parse()?) };
    let before = count()?;
    let inside = agent.root_text("podman exec counter /bin/busybox ip -4 -o addr show dev eth0")?;
    ensure!(inside.contains("inet 10."), "it is not on a bridge of its own: {inside}");

    agent.hibernate()?;
    agent.wake()?;
    harness::eventually("the container goes on", || Ok((count()? > before + 2).then_some(())))?;
    let now = agent.root_text("podman ps -q --no-trunc")?;
    ensure!(now.trim() == id.trim(), "{now} is another than {id}");
    Ok(())
}
