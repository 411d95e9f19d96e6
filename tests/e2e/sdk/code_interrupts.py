"""Code that its client does not wait for is interrupted; its context goes on with all that it had."""

from e2b_code_interpreter import Sandbox, TimeoutException

from support import fails

box = Sandbox.create(timeout=3000)
endless = {
    "python": ("kept = 5", ["while True: pass", "import time; time.sleep(1000)", "!sleep 1000"], "print(kept)"),
    "javascript": ("let kept = 5", ["await new Promise(() => {})"], "console.log(kept)"),
    "bash": ("kept=5", ["while true; do :; done", "sleep 1000"], "echo $kept"),
}
for language, (begin, loops, ask) in endless.items():
    assert box.run_code(begin, language=language).error is None
    for loop in loops:
        with fails(TimeoutException, "timed out"):
            box.run_code(loop, language=language, timeout=1)
        after = box.run_code(ask, language=language)
        assert "".join(after.logs.stdout) == "5\n" and after.error is None, (language, loop, after)

# A restart ends what runs, whatever it is.
context = box.create_code_context()
handle = []
stubborn = "import signal\nsignal.signal = print\nwhile True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: pass"
with fails(TimeoutException):
    box.run_code(stubborn, context=context, timeout=1)
box.restart_code_context(context)
assert box.run_code("1 + 1", context=context).text == "2"
assert box.kill()
