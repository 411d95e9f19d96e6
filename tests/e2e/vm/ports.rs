//! What root of a machine can say on its serial ports, on which the guest alone should speak: it hurts nobody else.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::needs_machines;
use crate::harness::{self, Agent, Server};
use crate::limits::others_are_well;
use crate::volumes::Volume;

/// A port has one holder, the guest, whose descriptors root takes. Each kind is said once somebody hears it: whoever was at the other end may
/// have had enough of what came before. Two do not end the conversation, and are said for so long that it would show if they were kept.
/// The last of each port ends it, however it stands: nobody waits for an answer then that something else was taken for. Tells how many bytes
/// of each kind were written.
const ATTACK: &str = r#"
import ctypes, json, os, random, select, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    got = libc.syscall(number, *arguments)
    assert got >= 0, os.strerror(ctypes.get_errno())
    return got
guest, ports = call(434, 1, 0), {}
for fd in os.listdir('/proc/1/fd'):
    try: device = os.readlink(f'/proc/1/fd/{fd}')
    except FileNotFoundError: continue
    if device.startswith('/dev/vport'):
        name = open(f'/sys/class/virtio-ports/{os.path.basename(device)}/name').read().strip()
        ports[name] = call(438, guest, int(fd), 0)
assert set(ports) == {'dorm', 'dorm-volumes'}, ports

def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end: return False
        time.sleep(0.01)
    return True
def is_heard(port):
    poll = select.poll()
    poll.register(port, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))
def say(port, data):
    said = 0
    while said < len(data) and within(1, lambda: is_heard(port)):
        said += os.write(port, data[said:said + (32 << 10)])
    return said

def literal(data): return data.replace(b'\xff', b'\xff\0')
def beginning(): return b'\xff\x01' + bytes(random.choices(b'abcdefghijklmnop', k=16))
def frame(kind, flags, stream, length, content=b''):
    return literal(struct.pack('>BBHII', 0, kind, flags, stream, length) + content)
def on_streams(kind, length, content=b''):
    return b''.join(frame(kind, 0, stream, length, content) for stream in range(1, 40, 2))
def request(content): return literal(struct.pack('<I', len(content)) + content)
DATA, WINDOW, PING, FAREWELL = range(4)
MUCH = 64 << 20
KINDS = {
    'dorm': [
        ('half a frame', frame(DATA, 0, 1, 64 << 10), 1),
        ('half a beginning', b'\xff\x01abc', 1),
        ('noise', os.urandom(256 << 10), 1),
        ('noise without marks', literal(os.urandom(256 << 10)), 1),
        ('beginnings', b''.join(beginning() for _ in range(20_000)), MUCH),
        ('answers', on_streams(DATA, 100, os.urandom(100)), 1),
        ('answers that are too long', on_streams(DATA, 300 << 10, bytes(300 << 10)), 1),
        ('answers that never end', frame(DATA, 0, 1, 0xffffffff, bytes(256 << 10)), 1),
        ('answers on streams that are not', frame(DATA, 0, 0x7fffffff, 1000, bytes(1000)) * 1000, MUCH),
        ('credit', on_streams(WINDOW, 0xffffffff) * 100, 1),
        ('credit on streams that are not', frame(WINDOW, 0, 0x7fffffff, 0xffffffff) * 50_000, 1),
        ('pings', frame(PING, 1, 0, 7) * 50_000, 1),
        ('streams of its own', b''.join(frame(DATA, 1, stream, 0) for stream in range(2, 40_000, 2)), 1),
        ('farewells', frame(FAREWELL, 0, 0, 0) * 1000, 1),
        ('much noise', literal(os.urandom(2 << 20)), 1),
    ],
    'dorm-volumes': [
        ('half a beginning', b'\xff\x01abc', 1),
        ('noise', os.urandom(256 << 10), 1),
        ('beginnings', b''.join(beginning() for _ in range(20_000)), 1),
        ('requests that make no sense', request(b'\x80' * 1000) * 1000, MUCH),
        ('requests for nothing', b''.join(request(bytes([1, 0, kind]) + os.urandom(40)) for kind in range(26, 128)), 1),
        ('requests that are as long as they may be', request(b'\x80' * (1 << 20)) * 8, 1),
        ('half a request', struct.pack('<I', 1 << 20), 1),
        ('much noise', literal(os.urandom(2 << 20)), 1),
        ('requests that are too long', request(bytes(2 << 20)), 1),
    ],
}
written = {}
for name, kinds in KINDS.items():
    for kind, data, least in kinds:
        within(30, lambda: is_heard(ports[name]))
        said = more = say(ports[name], data)
        while more and said < least:
            more = say(ports[name], data)
            said += more
        written[f'{name}: {kind}'] = said
        # Whoever would hear no more of it has hung up by then.
        within(0.5, lambda: not is_heard(ports[name]))
print(json.dumps(written))
"#;

/// What is said is there when all of it has been said, and not in pieces.
const ATTACKER: &str = "python3 -c \"$1\" > /tmp/attacking 2>&1; mv /tmp/attacking /tmp/attacked";
const KINDS: usize = 15 + 9;
/// Most that a process of the host may take for it, in KiB: less than what is said of one kind.
const MOST: u64 = 56 << 10;
const MOST_WORDS: usize = 2 << 20;
const ATTACKED_WITHIN: Duration = Duration::from_secs(900);

/// In KiB, as long as it is there.
fn memory_of(pid: i32) -> Result<Option<u64>> {
    let Some(status) = harness::unless_gone(fs::read_to_string(format!("/proc/{pid}/status")))? else {
        return Ok(None);
    };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    Ok(line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()))
}

/// The most that file servers of the machine take, of which there may be none just now.
fn memory_of_file_servers(agent: &Agent) -> Result<u64> {
    let all = super::jail::processes(agent, "dorm-volumes");
    let taken = all.into_iter().map(memory_of).collect::<Result<Vec<_>>>()?;
    Ok(taken.into_iter().flatten().max().unwrap_or(0))
}

pub(super) fn what_root_of_a_machine_says_on_its_ports_hurts_nobody_else() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    let volume = Volume::new(&server, "vm-ports")?;
    let other = server.agent_with("bystander", &["--isolation", "container", "--volume", &volume.at("/data")])?;
    let machine = ["--isolation", "vm", "--memory", "512M", "--cpus", "1", "--volume", &volume.at("/data")];
    let agent = server.agent_with("attacker", &machine)?;
    agent.root("echo there > /data/file; echo kept > /root/file; sync")?.succeeded()?;
    let daemon = || memory_of(server.pid()?)?.context("the daemon's memory");
    let (daemon_before, files_before, words_before) = (daemon()?, memory_of_file_servers(&agent)?, server.log_text()?.len());

    agent.exec_with(&["-d", "-u", "root"], &["sh", "-c", ATTACKER, "sh", ATTACK])?.succeeded()?;
    harness::eventually_within(ATTACKED_WITHIN, "the attack is over", || {
        // Whoever asks begins another conversation, in the place of the one that the attack has ended. He may wait in vain.
        let is_over = agent.sh("test -e /tmp/attacked").is_ok_and(|asked| asked.code == 0);
        others_are_well(&other)?;
        ensure!(other.root_text("cat /data/file")? == "there");
        let (daemon, files) = (daemon()?, memory_of_file_servers(&agent)?);
        ensure!(daemon < daemon_before + MOST, "the daemon took {daemon_before} KiB and takes {daemon}");
        ensure!(files < files_before + MOST, "the file server took {files_before} KiB and takes {files}");
        Ok(is_over.then_some(()))
    })?;
    let said = harness::eventually("it tells what was written", || {
        let told = agent.root("cat /tmp/attacked")?;
        Ok((told.code == 0).then(|| told.stdout()))
    })?;
    let written: BTreeMap<String, u64> = serde_json::from_str(&said).with_context(|| said.clone())?;
    ensure!(written.len() == KINDS && written.values().all(|bytes| *bytes > 0), "not all was said: {written:?}");
    let log = server.log_text()?;
    let words = log.len() - words_before;
    ensure!(words < MOST_WORDS, "the daemon has written {words} bytes to its log");
    ensure!(log.contains("a machine's guest sends what no guest would"), "the daemon heard nothing of it: {log}");

    agent.stop()?;
    agent.start()?;
    ensure!(agent.root_text("cat /root/file /data/file")? == "kept\nthere");
    agent.root("echo again > /data/file")?.succeeded()?;
    ensure!(other.root_text("cat /data/file")? == "again");
    server.in_order()
}
