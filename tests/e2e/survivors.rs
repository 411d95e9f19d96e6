//! What the kernel keeps for the processes of a box comes back from disk with them. Each program makes
//! something, says that it is ready, is put to disk and woken twice, and then looks for what it made.

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Server};

harness::tests![
    an_inotify_watch_goes_on,
    threads_pipes_and_unix_sockets_go_on,
    memfds_eventfds_and_timers_go_on,
    deleted_files_that_are_open_go_on,
    file_locks_are_still_held,
    two_hundred_processes_come_back,
    sessions_groups_and_stopped_processes_come_back,
    files_of_the_memory_file_systems_come_back,
    a_process_that_is_starting_another_comes_back,
];

/// Waits, after `ready()`, until it has been woken for the second time.
const PRELUDE: &str = r#"
import ctypes, os, select, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    got = getattr(libc, name)(*args)
    assert got >= 0, (name, os.strerror(ctypes.get_errno()))
    return got
def ready():
    open('/tmp/ready', 'w').close()
    while not os.path.exists('/tmp/go'):
        time.sleep(0.02)
"#;

/// Runs the program in a box of its own across two sleeps on disk. It must end well by itself.
fn survives(label: &str, program: &str) -> Result<()> {
    let agent = Server::shared()?.agent(label)?;
    let run = begin(&agent, program)?;
    agent.hibernate()?;
    agent.wake()?;
    agent.hibernate()?;
    agent.sh("touch /tmp/go")?.succeeded()?;
    let ended = agent.server.dorm(&["logs", "-f", &agent.name, &run])?;
    ensure!(ended.text()? == "survived", "{ended}");
    Ok(())
}

fn begin(agent: &Agent, program: &str) -> Result<String> {
    let program = format!("{PRELUDE}{program}\nprint('survived')");
    let run = agent.exec_with(&["-d", "-u", "root"], &["python3", "-c", &program])?.text()?;
    let ready = agent.until("the program is ready", "test -e /tmp/ready");
    ready.with_context(|| match agent.server.dorm(&["logs", &agent.name, &run]) {
        Ok(said) => said.to_string(),
        Err(error) => format!("{error:#}"),
    })?;
    Ok(run)
}

fn an_inotify_watch_goes_on() -> Result<()> {
    survives(
        "inotify",
        r#"
IN_CREATE, IN_DELETE = 0x100, 0x200
for folder in ['/home/user/watched', '/dev/shm/watched']:
    os.mkdir(folder)
fd = call('inotify_init1', 0)
home = call('inotify_add_watch', fd, b'/home/user/watched', IN_CREATE | IN_DELETE)
shm = call('inotify_add_watch', fd, b'/dev/shm/watched', IN_CREATE)
poll = select.poll()
poll.register(fd, select.POLLIN)
ready()
assert poll.poll(0) == [], 'there is news of nothing'
seen = []
def news():
    data = os.read(fd, 4096)
    while data:
        watch, mask, _, length = struct.unpack_from('iIII', data)
        seen.append((watch, mask, data[16:16 + length].rstrip(b'\0')))
        data = data[16 + length:]
open('/home/user/watched/new', 'w').close()
os.unlink('/home/user/watched/new')
open('/dev/shm/watched/other', 'w').close()
while len(seen) < 3:
    assert poll.poll(30000), ('waited in vain', seen)
    news()
assert seen == [(home, IN_CREATE, b'new'), (home, IN_DELETE, b'new'), (shm, IN_CREATE, b'other')], seen
"#,
    )
}

fn threads_pipes_and_unix_sockets_go_on() -> Result<()> {
    survives(
        "shared",
        r#"
# Bytes under way in a pipe, a socket pair and a connection, whose other ends are in a child.
read, write = os.pipe()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener = socket.socket(socket.AF_UNIX)
listener.bind('/tmp/listener')
listener.listen()
abstract = socket.socket(socket.AF_UNIX)
abstract.bind('\0abstract')
abstract.listen()
# Names by way of a link, and from a folder.
os.chdir('/home/user')
named = []
for name in ['/var/run/linked', 'relative']:
    named.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    named[-1].bind(name)
    os.chown(name, 1000, 1000)
fifo = '/home/user/fifo'
os.mkfifo(fifo)
both = os.open(fifo, os.O_RDWR)
child = os.fork()
if child == 0:
    os.close(read)
    ours.close()
    listener.close()
    call('prctl', 15, b'the child', 0, 0, 0)
    stream = socket.socket(socket.AF_UNIX)
    stream.connect('/tmp/listener')
    os.write(write, b'piped ')
    theirs.send(b'one')
    theirs.send(b'two')
    stream.sendall(b'streamed')
    os.write(both, b'fifo')
    assert theirs.recv(9) == b'go on'
    os.write(write, b'to the end')
    os.close(write)
    stream.shutdown(socket.SHUT_WR)
    assert stream.recv(9) == b'answer'
    os._exit(7)
os.close(write)
theirs.close()
stream, _ = listener.accept()
# A thread that waits for a lock, one for a condition, one in a system call.
lock, condition, done, told = threading.Lock(), threading.Condition(), [], threading.Event()
lock.acquire()
woken = os.eventfd(0)
def locked():
    with lock:
        done.append('lock')
def conditional():
    with condition:
        told.set()
        condition.wait()
        done.append('condition')
def calling():
    os.eventfd_read(woken)
    done.append('call')
threads = [threading.Thread(target=target) for target in (locked, conditional, calling)]
for thread in threads:
    thread.start()
told.wait()
ready()
lock.release()
with condition:
    condition.notify()
os.eventfd_write(woken, 1)
for thread in threads:
    thread.join()
assert sorted(done) == ['call', 'condition', 'lock'], done
assert ours.recv(9) == b'one' and ours.recv(9) == b'two'
assert open(f'/proc/{child}/comm').read() == 'the child\n'
ours.send(b'go on')
got = b''
while data := os.read(read, 99):
    got += data
assert got == b'piped to the end', got
got = b''
while data := stream.recv(99):
    got += data
assert got == b'streamed', got
assert os.read(both, 9) == b'fifo'
stream.sendall(b'answer')
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for address in ['/tmp/listener', '\0abstract']:
    socket.socket(socket.AF_UNIX).connect(address)
for address in ['/run/linked', '/home/user/relative']:
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect(address)
    assert os.stat(address).st_uid == 1000, os.stat(address)
"#,
    )
}

fn memfds_eventfds_and_timers_go_on() -> Result<()> {
    survives(
        "descriptors",
        r#"
import signal, fcntl, mmap
memfd = os.memfd_create('kept', os.MFD_ALLOW_SEALING)
os.write(memfd, b'in memory alone')
fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
shared = mmap.mmap(-1, 1 << 20)
shared[:6] = b'shared'
event = os.eventfd(41, os.EFD_NONBLOCK)
os.eventfd_write(event, 1)
far = call('timerfd_create', time.CLOCK_MONOTONIC, 0)
near = call('timerfd_create', time.CLOCK_MONOTONIC, 0)
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ('every', 'every_ns', 'first', 'first_ns')]
call('timerfd_settime', far, 0, ctypes.byref(Spec(0, 0, 5000, 0)), None)
call('timerfd_settime', near, 0, ctypes.byref(Spec(0, 20000000, 1, 0)), None)
rung = []
signal.signal(signal.SIGALRM, lambda *_: rung.append('alarm'))
signal.setitimer(signal.ITIMER_REAL, 2, 0.05)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
mask = struct.pack('Q', 1 << (signal.SIGUSR2 - 1))
signals = call('signalfd', -1, mask, 0)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
epoll = select.epoll()
epoll.register(near, select.EPOLLIN)
epoll.register(event, select.EPOLLIN)
ready()
os.lseek(memfd, 0, 0)
assert os.read(memfd, 99) == b'in memory alone'
try:
    os.ftruncate(memfd, 1)
    assert False, 'the seal is broken'
except PermissionError:
    pass
assert shared[:6] == b'shared'
assert os.eventfd_read(event) == 42
left = Spec()
call('timerfd_gettime', far, ctypes.byref(left))
assert 1000 < left.first <= 5000, left.first
assert any(fd == near for fd, _ in epoll.poll(30))
while len(rung) < 2:
    signal.pause()
signal.setitimer(signal.ITIMER_REAL, 0)
assert signal.sigpending() == {signal.SIGUSR1, signal.SIGUSR2}, signal.sigpending()
assert struct.unpack_from('I', os.read(signals, 128))[0] == signal.SIGUSR2
"#,
    )
}

fn deleted_files_that_are_open_go_on() -> Result<()> {
    survives(
        "deleted",
        r#"
import mmap
opened = []
for number, path in enumerate(['/home/user/gone', '/var/tmp/gone', '/dev/shm/gone', '/run/gone']):
    file = open(path, 'w+b')
    file.write(b'%d before ' % number)
    file.flush()
    os.unlink(path)
    opened.append(file)
nameless = os.open('/home/user', os.O_TMPFILE | os.O_RDWR)
os.write(nameless, b'nameless')
mapped = os.open('/home/user/mapped', os.O_CREAT | os.O_RDWR)
os.ftruncate(mapped, 1 << 20)
memory = mmap.mmap(mapped, 1 << 20)
memory[4096:4102] = b'mapped'
os.close(mapped)
os.unlink('/home/user/mapped')
# One name of two is gone; the file is reached by the other.
linked = open('/home/user/first', 'w+b')
os.link('/home/user/first', '/home/user/second')
os.unlink('/home/user/first')
os.makedirs('/home/user/folder/inner')
folder = os.open('/home/user/folder/inner', os.O_RDONLY)
# Names need not be UTF-8.
strange = open(b'/home/user/.\xff', 'w+b')
lost = open(b'/home/user/.\xfd', 'w+b')
os.link(b'/home/user/.\xfd', b'/home/user/.\xfe')
os.unlink(b'/home/user/.\xfd')
renamed = open('/home/user/folder/old', 'w+b')
os.rename('/home/user/folder/old', '/home/user/folder/new')
ready()
for number, file in enumerate(opened):
    file.write(b'after')
    file.seek(0)
    text = file.read()
    assert text == b'%d before after' % number, text
os.lseek(nameless, 0, 0)
assert os.read(nameless, 99) == b'nameless'
assert memory[4096:4102] == b'mapped'
memory[0] = 1
linked.write(b'linked')
linked.flush()
assert open('/home/user/second', 'rb').read() == b'linked'
for file, name in [(strange, b'/home/user/.\xff'), (lost, b'/home/user/.\xfe')]:
    file.write(name)
    file.flush()
    assert open(name, 'rb').read() == name
os.close(os.open('made', os.O_CREAT | os.O_WRONLY, dir_fd=folder))
assert os.listdir('/home/user/folder/inner') == ['made']
renamed.write(b'renamed')
renamed.flush()
assert open('/home/user/folder/new', 'rb').read() == b'renamed'
left = {name for name in os.listdir('/home/user') if not name.startswith('.')}
assert left == {'second', 'folder'}, left
"#,
    )
}

fn file_locks_are_still_held() -> Result<()> {
    survives(
        "locks",
        r#"
import fcntl
whole = open('/home/user/flocked', 'w+b')
fcntl.flock(whole, fcntl.LOCK_EX)
ranged = open('/home/user/ranged', 'w+b')
fcntl.lockf(ranged, fcntl.LOCK_EX, 10, 100)
owned = open('/home/user/owned', 'w+b')
OFD = struct.pack('hhqqi', fcntl.F_WRLCK, 0, 5, 5, 0)
fcntl.fcntl(owned, 37, OFD)
shared = open('/home/user/shared', 'w+b')
fcntl.flock(shared, fcntl.LOCK_SH)
ready()
def refused(path, lock):
    child = os.fork()
    if child == 0:
        try:
            lock(os.open(path, os.O_RDWR))
            os._exit(0)
        except BlockingIOError:
            os._exit(1)
        except BaseException as error:
            print(path, error)
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
flock = lambda how: lambda fd: fcntl.flock(fd, how | fcntl.LOCK_NB)
posix = lambda length, start: lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
assert refused('/home/user/flocked', flock(fcntl.LOCK_EX)) == 1, 'the flock is lost'
assert refused('/home/user/flocked', flock(fcntl.LOCK_SH)) == 1, 'the flock is lost'
assert refused('/home/user/shared', flock(fcntl.LOCK_EX)) == 1, 'the shared flock is lost'
assert refused('/home/user/shared', flock(fcntl.LOCK_SH)) == 0, 'the shared flock is not shared'
assert refused('/home/user/ranged', posix(1, 105)) == 1, 'the POSIX lock is lost'
assert refused('/home/user/ranged', posix(100, 0)) == 0, 'the POSIX lock has grown'
assert refused('/home/user/owned', posix(1, 7)) == 1, 'the open file lock is lost'
fcntl.flock(whole, fcntl.LOCK_UN)
assert refused('/home/user/flocked', flock(fcntl.LOCK_EX)) == 0, 'nobody can let go of the flock'
"#,
    )
}

fn two_hundred_processes_come_back() -> Result<()> {
    survives(
        "many",
        r#"
children = []
for number in range(200):
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        for stream in [ours] + [stream for _, stream, _ in children]:
            stream.close()
        secret = os.urandom(8)
        theirs.sendall(secret)
        while question := theirs.recv(8):
            theirs.sendall(bytes(a ^ b for a, b in zip(question, secret)) + struct.pack('I', number))
        os._exit(number % 100)
    theirs.close()
    children.append((pid, ours, ours.recv(8)))
ready()
for number, (pid, stream, secret) in enumerate(children):
    question = os.urandom(8)
    stream.sendall(question)
    answer = stream.recv(12)
    assert answer == bytes(a ^ b for a, b in zip(question, secret)) + struct.pack('I', number), (number, answer)
    stream.close()
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == number % 100, (number, status)
"#,
    )
}

fn sessions_groups_and_stopped_processes_come_back() -> Result<()> {
    survives(
        "sessions",
        r#"
import signal, resource
def child(act):
    pid = os.fork()
    if pid == 0:
        act()
        while True:
            signal.pause()
    return pid
leader = child(os.setsid)
stopped = child(lambda: os.kill(os.getpid(), signal.SIGSTOP))
os.waitpid(stopped, os.WUNTRACED)
zombie = os.fork()
if zombie == 0:
    os._exit(3)
state = lambda pid: open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[0]
while state(zombie) != 'Z' or os.getsid(leader) != leader:
    time.sleep(0.01)
def plain():
    os.setgroups([20, 24])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)
    os.chdir('/home/user')
    os.umask(0o137)
    os.nice(7)
    resource.setrlimit(resource.RLIMIT_NOFILE, (99, 100))
    signal.signal(signal.SIGUSR1, lambda *_: os.mknod('made', 0o666))
    os.write(told, b'x')
read, told = os.pipe()
user = child(plain)
os.read(read, 1)
ready()
assert os.getsid(leader) == leader and os.getpgid(leader) == leader
assert state(stopped) == 'T', state(stopped)
assert os.waitstatus_to_exitcode(os.waitpid(zombie, 0)[1]) == 3
status = dict(line.split(':', 1) for line in open(f'/proc/{user}/status').read().splitlines())
assert status['Uid'].split() == ['1000'] * 4 and status['Groups'].split() == ['20', '24'], status
os.kill(user, signal.SIGUSR1)
while not os.path.exists('/home/user/made'):
    time.sleep(0.01)
made = os.stat('/home/user/made')
assert (made.st_mode & 0o777, made.st_uid) == (0o640, 1000), made
assert os.getpriority(os.PRIO_PROCESS, user) == 7
limits = next(line for line in open(f'/proc/{user}/limits') if line.startswith('Max open files'))
assert limits.split()[3:5] == ['99', '100'], limits
os.kill(stopped, signal.SIGCONT)
for pid in (leader, stopped, user):
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
"#,
    )
}

fn files_of_the_memory_file_systems_come_back() -> Result<()> {
    survives(
        "memory-files",
        r#"
before = os.urandom(1 << 20)
for folder in ['/dev/shm', '/run']:
    os.makedirs(f'{folder}/kept/inner')
    open(f'{folder}/kept/inner/file', 'wb').write(before)
    os.chmod(f'{folder}/kept/inner/file', 0o751)
    os.chown(f'{folder}/kept/inner/file', 1000, 1000)
    os.symlink('inner/file', f'{folder}/kept/link')
ready()
for folder in ['/dev/shm', '/run']:
    assert open(f'{folder}/kept/link', 'rb').read() == before
    found = os.stat(f'{folder}/kept/inner/file')
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o751, 1000, 1000), found
"#,
    )
}

fn a_process_that_is_starting_another_comes_back() -> Result<()> {
    let agent = Server::shared()?.agent("lender")?;
    // The child opens the pipe before it executes its program, and its parent waits in the kernel for that.
    let starting = |pipe: &str| {
        let starts = format!(
            "import os; os.mkfifo('{pipe}'); open('/tmp/ready', 'w').close(); \
             os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, '{pipe}', os.O_RDONLY, 0)]); \
             os.wait(); open('{pipe}.done', 'w').close()"
        );
        agent.exec_with(&["-d"], &["python3", "-c", &starts])?.succeeded()?;
        agent.until("it waits for its child", "grep -q kernel_clone /proc/*/task/*/wchan")
    };
    starting("/tmp/pipe")?;
    agent.exec_with(&["-d"], &["sh", "-c", "sleep 1; : > /tmp/pipe"])?.succeeded()?;
    agent.server.dorm(&["pause", &agent.name])?.succeeded()?;
    // When it goes on for a moment, the time of the one who writes to the pipe has come.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    agent.hibernate()?;
    agent.until("the child has run", "test -e /tmp/pipe.done")?;

    starting("/tmp/never")?;
    let hibernate = agent.server.dorm(&["hibernate", &agent.name])?;
    match harness::engines::in_machines() {
        true => hibernate.succeeded().map(drop)?,
        false => hibernate.refused(4, &["process", "has yet to execute its program", "goes on as it was"]).map(drop)?,
    }
    agent.sh(": > /tmp/never")?.succeeded()?;
    agent.until("the child has run", "test -e /tmp/never.done")
}
