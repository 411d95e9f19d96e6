"""The daemon is killed while a command streams and a file is on its way: both calls fail, and the next daemon has everything."""

import pathlib
import sys
import threading

from e2b import CommandExitException, Sandbox

from support import ask_keeper, fails, start_keeper, until

box = Sandbox.create(timeout=3000)
secret, keeper = start_keeper(box)
box.files.write("before", "acknowledged")
failed = []


def call(what):
    try:
        what()
        failed.append(None)
    except Exception as error:
        failed.append(error)


def endless():
    while not failed:
        yield b"x" * 65536


streaming = threading.Event()
command = "echo begun; exec sleep 1000"
calls = [
    lambda: box.commands.run(command, on_stdout=lambda _: streaming.set(), timeout=0),
    lambda: box.files.write("half", endless(), request_timeout=300),
]
threads = [threading.Thread(target=call, args=[one]) for one in calls]
for thread in threads:
    thread.start()
streaming.wait(60)
until("the file grows", lambda: box.files.get_info("half").size > 0 if box.files.exists("half") else False)
pathlib.Path(sys.argv[1]).touch()
for thread in threads:
    thread.join(120)
assert len(failed) == 2 and all(failed), failed
assert not any(isinstance(error, CommandExitException) for error in failed), failed


def again():
    try:
        return Sandbox.connect(box.sandbox_id)
    except Exception:
        return None


box = until("another daemon answers", again, 120)
assert ask_keeper(box, keeper) == secret
assert box.files.read("before") == "acknowledged"
(pid,) = [process.pid for process in box.commands.list() if command in process.args]
handle = box.commands.connect(pid)
assert box.commands.kill(pid)
with fails(CommandExitException):
    handle.wait()
assert box.kill()
