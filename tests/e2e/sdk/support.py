"""What the scripts share: waiting, and errors that must come."""

import contextlib
import os
import time

# Whether a program can get rights by a setuid bit.
SUDO = os.environ.get("DORM_E2E_SUDO") != "no"
PATIENCE = 60 * int(os.environ.get("DORM_E2E_SLOWNESS", "1"))


def until(what, condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


@contextlib.contextmanager
def fails(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error!r}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


BOOT_ID = "cat /proc/sys/kernel/random/boot_id"

# A process that holds a number in its memory alone, and writes it down when asked by a signal.
KEEPER = """
import os, signal, time
secret = os.urandom(8).hex()
def tell(*_):
    with open("/tmp/said.new", "w") as f:
        f.write(secret)
    os.rename("/tmp/said.new", "/tmp/said")
signal.signal(signal.SIGUSR1, tell)
open("/tmp/keeps", "w").close()
while True:
    time.sleep(0.05)
"""


def start_keeper(sandbox):
    """Gives its secret, and its pid."""
    sandbox.commands.run("rm -f /tmp/keeps")
    sandbox.files.write("/tmp/keeper.py", KEEPER)
    handle = sandbox.commands.run("exec python3 /tmp/keeper.py", background=True, timeout=0)
    until("the keeper runs", lambda: sandbox.files.exists("/tmp/keeps"))
    return ask_keeper(sandbox, handle.pid), handle.pid


def ask_keeper(sandbox, pid):
    sandbox.commands.run(f"rm -f /tmp/said; kill -USR1 {pid}; until test -e /tmp/said; do sleep 0.02; done")
    return sandbox.files.read("/tmp/said")
