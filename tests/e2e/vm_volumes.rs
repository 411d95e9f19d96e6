//! Volumes in virtual machines: the same files as in containers, through a file server on the host.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Server};
use crate::vm::{self, needs_machines};
use crate::volumes::Volume;

harness::tests![
    a_machine_and_a_container_share_a_volume_as_two_containers_do,
    what_a_machine_has_open_in_a_volume_sleeps_and_wakes_with_it,
    a_file_server_that_ends_is_replaced_and_nothing_is_lost,
    who_plays_tricks_in_a_shared_volume_tricks_nobody,
    an_agent_keeps_its_volumes_when_it_becomes_a_machine,
];

fn machine(server: &Arc<Server>, label: &str, mounts: &[String]) -> Result<Agent> {
    let mut arguments = vec!["--isolation", "vm", "--memory", "256M", "--cpus", "1"];
    for mount in mounts {
        arguments.extend(["--volume", mount]);
    }
    server.agent_with(label, &arguments)
}

/// Everything that programs do with files, done in a machine. Says nothing if all is well.
const EVERYTHING: &str = r#"
import errno, fcntl, mmap, os, stat, subprocess
os.chdir('/data')
os.umask(0o022)
def fails(number, call, *arguments):
    try: call(*arguments)
    except OSError as e: assert e.errno == number, e
    else: raise AssertionError(f'{call} does not fail')

# Contents: holes, ends, places, mappings.
with open('big', 'wb') as f:
    f.seek(5 << 30); f.write(b'end'); f.flush(); os.fsync(f.fileno())
found = os.stat('big')
assert found.st_size == (5 << 30) + 3 and found.st_blocks < 1000, found
with open('big', 'rb') as f:
    assert os.lseek(f.fileno(), 0, os.SEEK_DATA) > 1 << 30
    assert os.pread(f.fileno(), 5, 0) == bytes(5)
    f.seek(-4, 2); assert f.read() == b'\0end'
os.truncate('big', 7); assert open('big', 'rb').read() == bytes(7)
with open('log', 'a') as f:
    for line in range(3): f.write(f'{line}\n'); f.flush()
    open('log', 'a').write('other\n')
    f.write('3\n')
assert open('log').read() == '0\n1\n2\nother\n3\n', open('log').read()
blob = os.urandom(3 << 20)
open('blob', 'wb').write(blob)
assert open('blob', 'rb').read() == blob
with open('blob', 'r+b') as f:
    with mmap.mmap(f.fileno(), 0) as m:
        assert m[:] == blob
        m[1000:1003] = b'abc'; m.flush()
        os.pwrite(f.fileno(), b'xyz', 2000)
    f.seek(1000); assert f.read(3) == b'abc'
fd = os.open('room', os.O_RDWR | os.O_CREAT, 0o644)
os.posix_fallocate(fd, 0, 1 << 20)
assert os.fstat(fd).st_size == 1 << 20
fcntl.flock(fd, fcntl.LOCK_EX)
other = os.open('room', os.O_RDWR)
fails(errno.EWOULDBLOCK, fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(other)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.close(fd)

# Names: of bytes, links, pipes, folders, one in the place of another.
open(b'\xff\xfe\n', 'w').write('odd')
assert b'\xff\xfe\n' in os.listdir(b'.')
open('one', 'w').write('one'); os.link('one', 'two')
assert os.stat('two').st_nlink == 2 and os.stat('one').st_ino == os.stat('two').st_ino
os.symlink('one', 'link'); assert open('link').read() == 'one'
os.symlink('/etc/hostname', 'away'); assert os.readlink('away') == '/etc/hostname'
os.mkfifo('pipe'); assert stat.S_ISFIFO(os.stat('pipe').st_mode)
writer = subprocess.Popen(['sh', '-c', 'echo through > pipe']); assert open('pipe').read() == 'through\n'; writer.wait()
fails(errno.EEXIST, os.open, 'one', os.O_CREAT | os.O_EXCL | os.O_WRONLY)
os.makedirs('deep/er'); fails(errno.ENOTEMPTY, os.rmdir, 'deep'); open('deep/er/file', 'w').write('deep')
os.rename('deep', 'moved'); assert open('moved/er/file').read() == 'deep'
fails(errno.ENOENT, open, 'deep/er/file')
open('new', 'w').write('new'); keep = open('one'); os.rename('new', 'one')
assert open('one').read() == 'new' and keep.read() == 'one' and open('two').read() == 'one'
keep.close()
gone = open('gone', 'w+'); gone.write('gone'); gone.flush(); os.unlink('gone')
fails(errno.ENOENT, os.stat, 'gone')
gone.seek(0); assert gone.read() == 'gone' and os.fstat(gone.fileno()).st_size == 4; gone.close()
assert not any(name.startswith('.dorm') for name in os.listdir('.'))

# What is known of them.
os.chmod('two', 0o6751); os.chown('two', 1234, 4321)
found = os.stat('two'); assert (found.st_uid, found.st_gid) == (1234, 4321), found
os.chmod('two', 0o640)
os.utime('two', ns=(1_000_000_007, 1234567890_000000009))
found = os.stat('two'); assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_007, 1234567890_000000009), found
os.setxattr('two', 'user.note', b'a\0note'); assert os.getxattr('two', 'user.note') == b'a\0note'
assert os.listxattr('two') == ['user.note']; os.removexattr('two', 'user.note')
fails(errno.ENODATA, os.getxattr, 'two', 'user.note')
os.setxattr('two', 'user.kept', b'kept')
space = os.statvfs('.'); assert space.f_blocks > 0 and space.f_bavail > 0
os.mkdir('own'); os.chown('own', 1000, 1000)
user = ['setpriv', '--reuid=1000', '--regid=1000', '--clear-groups', 'sh', '-c']
subprocess.run(user + ['umask 027; echo mine > own/file; mkdir own/sub; ln -s x own/link'], check=True)
assert subprocess.run(user + ['cat /data/two'], stderr=subprocess.DEVNULL).returncode != 0
for name, mode in (('own/file', 0o640), ('own/sub', 0o750), ('own/link', 0o777)):
    found = os.lstat(name); assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1000, 1000, mode), (name, found)
fails(errno.EPERM, os.mknod, 'device', stat.S_IFCHR | 0o600, os.makedev(1, 3))
os.sync()
"#;

/// What a container sees of that.
const SEEN: &str = r#"
import os
os.chdir('/shared')
found = os.stat('two'); assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (1234, 4321, 0o640), found
assert found.st_mtime_ns == 1234567890_000000009 and os.getxattr('two', 'user.kept') == b'kept'
found = os.stat('own/file'); assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (1000, 1000, 0o640), found
assert open('own/file').read() == 'mine\n' and open(b'\xff\xfe\n').read() == 'odd'
data = open('blob', 'rb').read(); assert data[1000:1003] == b'abc' and data[2000:2003] == b'xyz' and len(data) == 3 << 20
assert open('log').read() == '0\n1\n2\nother\n3\n' and os.readlink('away') == '/etc/hostname'
left = [name for name in os.listdir('.') if name.startswith('.dorm')]; assert not left, left
os.mkdir('many')
for number in range(10_000): open(f'many/{number}', 'w').close()
open('log', 'a').write('container\n')
"#;

fn a_machine_and_a_container_share_a_volume_as_two_containers_do() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let (volume, other) = (Volume::new(&server, "vm-shared")?, Volume::new(&server, "vm-below")?);
    let container = server.agent_with("vm-share-c", &["--isolation", "container", "--volume", &volume.at("/shared")])?;
    // One below the other, and the same twice.
    let mounts = [volume.at("/data"), other.at("/data/below"), volume.at("/srv/again")];
    let agent = machine(&server, "vm-share", &mounts)?;
    agent.python(EVERYTHING)?.succeeded()?;
    container.python(SEEN)?.succeeded()?;
    ensure!(agent.root_text("ls /data/many | sort -u | wc -l; tail -n 1 /data/log")? == "10000\ncontainer");
    ensure!(agent.root_text("rm -r /data/many/1*; ls /srv/again/many | wc -l")? == "8889");
    agent.root("echo below > /data/below/file && test ! -e /srv/again/below/file && umount /data/below && ! ls /data/below | grep .")?.succeeded()?;
    ensure!(container.root_text("ls /shared/many | wc -l; ls /shared/below")?.trim() == "8889");
    Ok(())
}

/// Has a folder, a file and a file that was removed open, and writes to both files again and again.
const HOLDER: &str = r#"
import os, time
os.chdir('/data/folder')
kept, gone = open('kept', 'w+'), open('gone', 'w+')
os.unlink('gone')
stale = open('stale')
count = 0
while True:
    count += 1
    for file in (kept, gone):
        file.seek(0); file.write(f'{count:08}'); file.flush()
        file.seek(0); assert len(file.read()) == 8
    try: stale.seek(0); said = stale.read() or 'empty'
    except OSError as e: said = os.strerror(e.errno)
    with open('/tmp/said.new', 'w') as out: out.write(f'{count}\n{said}\n{os.getcwd()}\n')
    os.rename('/tmp/said.new', '/tmp/said')
    time.sleep(0.05)
"#;

/// How far it has come, and what it says of the file that others remove.
fn said(agent: &Agent) -> Result<(u64, String)> {
    let text = agent.sh_text("cat /tmp/said")?;
    let mut lines = text.lines();
    let count = lines.next().context("a number")?.parse()?;
    let stale = lines.next().context("a second line")?.to_owned();
    ensure!(lines.next() == Some("/data/folder"), "{text}");
    Ok((count, stale))
}

fn goes_on(agent: &Agent) -> Result<(u64, String)> {
    let (before, _) = said(agent)?;
    harness::eventually("the process goes on", || {
        let (count, stale) = said(agent)?;
        Ok((count > before + 2).then_some((count, stale)))
    })
}

fn holder(agent: &Agent) -> Result<()> {
    agent.root("mkdir /data/folder && echo -n there > /data/folder/stale")?.succeeded()?;
    agent.exec_with(&["-d", "-u", "root"], &["python3", "-c", HOLDER])?.succeeded()?;
    agent.until("it has begun", "test -e /tmp/said")
}

fn what_a_machine_has_open_in_a_volume_sleeps_and_wakes_with_it() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    let volume = Volume::new(&server, "vm-sleeps")?;
    let container = server.agent_with("vm-sleep-c", &["--isolation", "container", "--volume", &volume.at("/data")])?;
    let agent = machine(&server, "vm-sleep", &[volume.at("/data")])?;
    holder(&agent)?;
    ensure!(goes_on(&agent)?.1 == "there");
    agent.pause()?;
    ensure!(goes_on(&agent)?.1 == "there");
    // A daemon that is killed takes nothing along: the files are there while there is none, and after the next has come.
    let written = || container.root_text("cat /data/folder/kept");
    server.kill9()?;
    server.launch(&[])?;
    goes_on(&agent)?;
    agent.hibernate()?;
    let before = written()?;
    std::thread::sleep(Duration::from_millis(200));
    ensure!(written()? == before, "somebody writes while the machine is on disk");
    container.root("rm /data/folder/stale; echo given > /data/folder/given")?.succeeded()?;
    let (count, stale) = goes_on(&agent)?;
    ensure!(stale.contains("Stale") && count >= before.parse::<u64>()?, "{count} {stale}, on disk was {before}");
    ensure!(agent.root_text("cat /data/folder/given")? == "given");
    // A fork has files of its own open, which are the same.
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    let fork = server.adopt(&name)?;
    goes_on(&fork)?;
    goes_on(&agent)?;
    fork.root("pkill -f [s]aid.new; echo fork > /data/from-fork")?.succeeded()?;
    ensure!(agent.root_text("cat /data/from-fork")? == "fork");
    drop(fork);
    // What was removed while it was open is gone once nobody has it open.
    agent.root("pkill -f [s]aid.new")?.succeeded()?;
    harness::eventually("nothing is left of removed files", || {
        Ok(container.root_text("ls -A /data | grep -c dorm-removed || true")?.starts_with('0').then_some(()))
    })?;
    agent.stop()?;
    agent.start()?;
    ensure!(agent.root_text("ls /data/folder")? == "given\nkept");
    Ok(())
}

fn a_file_server_that_ends_is_replaced_and_nothing_is_lost() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let volume = Volume::new(&server, "vm-served")?;
    let agent = machine(&server, "vm-served", &[volume.at("/data")])?;
    holder(&agent)?;
    let write = "import os\nfor n in range(150):\n open(f'/data/{n}', 'x').write(str(n)); os.rename(f'/data/{n}', f'/data/f{n}')\nprint('done')";
    agent.exec_with(&["-d", "-u", "root"], &["sh", "-c", &format!("python3 -c \"{write}\" > /tmp/wrote 2>&1")])?.succeeded()?;
    let mut ended = 0;
    harness::eventually("all is written", || {
        if let [one] = vm::jail::processes(&agent, "dorm-volumes")[..]
            && ended < 5
        {
            let pid = rustix::process::Pid::from_raw(one).context("a process")?;
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            ended += 1;
        }
        let wrote = agent.sh_text("cat /tmp/wrote 2>/dev/null || true")?;
        ensure!(wrote.is_empty() || wrote.trim() == "done", "{wrote}");
        Ok((!wrote.is_empty()).then_some(()))
    })?;
    ensure!(ended > 0, "no server was ended");
    ensure!(agent.root_text("ls /data | grep -c ^f[0-9]; cat /data/f149")? == "150\n149");
    ensure!(goes_on(&agent)?.1 == "there");
    Ok(())
}

/// Puts other things in the place of a folder and a file, as fast as it can.
const TRICKS: &str = r#"
import os, itertools
os.chdir('/data')
os.makedirs('real', exist_ok=True); open('real/file', 'w').write('real')
os.symlink('/', 'root'); os.symlink('../../../../..', 'up'); os.mkfifo('fifo')
for n in itertools.count():
    os.rename('real', 'aside')
    os.symlink('/etc', 'real'); os.unlink('real')
    os.mkfifo('real'); os.unlink('real')
    os.symlink('..', 'real'); os.unlink('real')
    os.rename('aside', 'real')
    os.rename('real/file', 'real/kept'); os.symlink('/etc/shadow', 'real/file'); os.unlink('real/file')
    os.mkfifo('real/file'); os.unlink('real/file'); os.rename('real/kept', 'real/file')
    if n == 100: open('/tmp/begun', 'w')
"#;

/// Works on these by paths. Whatever it meets is a file of the volume, or of its own machine.
const WORK: &str = r#"
import errno, os, time
os.chdir('/data')
known = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.EISDIR, errno.EAGAIN, errno.ELOOP, errno.EOPNOTSUPP, errno.EINVAL}
end = time.monotonic() + 4
seen = 0
while time.monotonic() < end or not seen and time.monotonic() < end + 120:
    try:
        fd = os.open('real/file', os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            data = os.read(fd, 100)
            assert data in (b'real', b''), data
            seen += data == b'real'
        finally: os.close(fd)
        with open('real/mine', 'w') as f: f.write('mine')
        os.unlink('real/mine')
    except OSError as e: assert e.errno in known, e
assert seen, 'the file was never read'
"#;

fn who_plays_tricks_in_a_shared_volume_tricks_nobody() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let volume = Volume::new(&server, "vm-tricks")?;
    let container = server.agent_with("vm-trick-c", &["--isolation", "container", "--volume", &volume.at("/data")])?;
    let agent = machine(&server, "vm-trick", &[volume.at("/data")])?;
    container.exec_with(&["-d", "-u", "root"], &["python3", "-c", TRICKS])?.succeeded()?;
    container.until("the tricks are played", "test -e /tmp/begun")?;
    agent.python(WORK)?.succeeded()?;
    // Links lead where the machine's own kernel sees them lead.
    ensure!(agent.root_text("cat /data/root/etc/hostname")?.trim() == agent.name);
    ensure!(agent.root_text("cat /data/up/etc/hostname")?.trim() == agent.name);
    container.root("pkill -f [i]tertools; ln -s /etc /data/.dorm-removed; rm -rf /data/real; mkdir /data/real")?.succeeded()?;
    ensure!(agent.python("import os\nf = open('/data/real/x', 'w+'); f.write('x'); os.unlink('/data/real/x'); f.flush(); f.seek(0); print(f.read())")?.text()? == "x");
    ensure!(container.root_text("ls -A /data/real; ls /etc | grep -c ^$(hostname) || true")? == "0");
    Ok(())
}

fn an_agent_keeps_its_volumes_when_it_becomes_a_machine() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let volume = Volume::new(&server, "vm-becomes")?;
    crate::vm::import_small(&server)?;
    let arguments = ["-T", "small", "--isolation", "container", "--memory", "256M", "--cpus", "1", "--volume"];
    let agent = server.agent_with("vm-becomes", &[&arguments[..], &[&volume.at("/data")]].concat())?;
    let sh = |script: &str| agent.exec_with(&["-u", "root"], &["sh", "-c", script]);
    sh("echo container > /data/file")?.succeeded()?;
    server.dorm(&["set", &agent.name, "--isolation", "vm"])?.succeeded()?;
    let shown = agent.show()?;
    ensure!(shown["isolation"] == "vm" && shown["volumes"][0]["path"] == "/data", "{shown}");
    ensure!(sh("cat /data/file; echo machine > /data/file; ls /lib/modules")?.text()?.starts_with("container\n6."));
    server.dorm(&["set", &agent.name, "--isolation", "container"])?.succeeded()?;
    ensure!(sh("cat /data/file")?.text()? == "machine");
    Ok(())
}
