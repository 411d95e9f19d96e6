"""Code that runs goes on whatever becomes of the memory it runs in: over a live snapshot, in a fork, and over a sleep on disk."""

import threading

from e2b_code_interpreter import Sandbox

from support import until

WAIT = """
import os, time
print("begun")
open("/tmp/begun", "w").close()
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
waited = globals().get("waited", 0) + 1
print("done")
"""

box = Sandbox.create(timeout=3000)


def begin():
    """Gives what becomes of it, once it is over."""
    box.commands.run("rm -f /tmp/begun /tmp/go")
    outcome = []

    def run():
        try:
            outcome.append(box.run_code(WAIT, timeout=300))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until("it runs", lambda: box.files.exists("/tmp/begun"))

    def join():
        thread.join(300)
        return outcome[0]

    return join


# Who listens notices nothing of a live snapshot, and the fork has nobody who listens.
over = begin()
box.create_snapshot()
(fork,) = box.fork(timeout=300)
fork = Sandbox.connect(fork.sandbox_id)
for one in (fork, box):
    one.files.write("/tmp/go", "")
execution = over()
assert "".join(execution.logs.stdout) == "begun\ndone\n" and execution.error is None, execution
for one in (fork, box):
    assert one.run_code("waited").text == "1"
fork.kill()

# A pause ends the call, and not the code.
over = begin()
box.pause()
assert isinstance(over(), Exception), "it ended before the sandbox slept"
box.connect()
box.files.write("/tmp/go", "")
assert box.run_code("waited").text == "2"
assert box.kill()
