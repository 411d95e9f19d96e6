"""Commands and terminals of the Python SDK."""

from e2b import CommandExitException, PtySize, Sandbox, SandboxException, TimeoutException

from support import SUDO, fails, until

box = Sandbox.create(timeout=300)

result = box.commands.run("echo out; echo err >&2")
assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
try:
    box.commands.run("echo gone; exit 7")
    raise AssertionError("no error")
except CommandExitException as error:
    assert (error.exit_code, error.stdout) == (7, "gone\n")

assert box.commands.run("echo $A-$B", envs={"A": "1", "B": "ü"}).stdout == "1-ü\n"
assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
assert box.commands.run("id -un", user="root").stdout == "root\n"
if SUDO:
    assert box.commands.run("sudo id -un").stdout == "root\n"
with fails(SandboxException):
    box.commands.run("pwd", cwd="/no/such/folder")

seen = []
box.commands.run("for i in 1 2 3; do echo $i; sleep 0.1; done", on_stdout=seen.append)
assert "".join(seen) == "1\n2\n3\n", seen
assert box.commands.run("echo x", retain_output=False).stdout is None
big = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout
assert len(big) == 3_000_000

with fails(TimeoutException):
    box.commands.run("sleep 30", timeout=1)

# In the background, with input.
cat = box.commands.run("cat", background=True, stdin=True, timeout=0)
assert any(one.pid == cat.pid for one in box.commands.list())
box.commands.send_stdin(cat.pid, "one\n")
cat.send_stdin("two\n")
box.commands.close_stdin(cat.pid)
assert cat.wait().stdout == "one\ntwo\n"
until("it is off the list", lambda: all(one.pid != cat.pid for one in box.commands.list()))

# Left, found again, ended.
sleeper = box.commands.run("echo begun; sleep 600", background=True, timeout=0)
sleeper.disconnect()
assert any(one.pid == sleeper.pid for one in box.commands.list()), "it ended with its client"
again = box.commands.connect(sleeper.pid, timeout=0)
assert again.pid == sleeper.pid
assert again.kill() is True
with fails(CommandExitException):
    again.wait()
assert box.commands.kill(sleeper.pid) is False

# Input as it comes.
head = box.commands.run("head -n 2", background=True, stdin=True, timeout=0)
box.commands.stream_input(head.pid, iter(["one\n", b"two\n"]))
assert head.wait().stdout == "one\ntwo\n"

# A terminal.
terminal = box.pty.create(PtySize(rows=24, cols=80), envs={"MARK": "here"}, cwd="/tmp", timeout=0)
box.pty.resize(terminal.pid, PtySize(rows=40, cols=100))
box.pty.send_stdin(terminal.pid, b"echo $MARK-$((20+3)); stty size; pwd; exit 3\n")
output = b""
try:
    terminal.wait(on_pty=lambda data: globals().__setitem__("output", output + data))
    raise AssertionError("it ended with 0")
except CommandExitException as error:
    assert error.exit_code == 3
text = output.decode()
assert "here-23" in text and "40 100" in text and "/tmp" in text, text

terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=0)
terminal.disconnect()
again = box.pty.connect(terminal.pid)
assert again.pid == terminal.pid
box.pty.stream_input(terminal.pid, iter([b"touch /tmp/", b"streamed\n"]))
until("what was streamed is typed", lambda: box.files.exists("/tmp/streamed"))
assert box.pty.kill(terminal.pid) is True
until("the terminal is gone", lambda: box.pty.kill(terminal.pid) is False)

assert box.kill()
