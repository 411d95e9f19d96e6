"""The server in the box is killed: another one takes its place, with new kernels, and none of the old ones is left."""

from e2b_code_interpreter import Sandbox, TimeoutException

from support import until

box = Sandbox.create(timeout=3000)
for language, begin in {"python": "x = 1", "javascript": "let x = 1", "bash": "x=1"}.items():
    assert box.run_code(begin, language=language).error is None
box.commands.run("pkill --signal KILL --full '^python3 -I /opt/code-interpreter/server.py$'")


def answers():
    try:
        return box.run_code("x").error.name == "NameError"
    except TimeoutException:  # The port is closed for a moment.
        return False


until("another server answers", answers)
kernels = "pgrep --full '[i]pykernel_launcher|[k]ernel.js|^bash --norc' | wc -l"
until("only the new kernel is left", lambda: box.commands.run(kernels).stdout.strip() == "1")
assert box.kill()
