"""Four parts, between which the sandbox sleeps on disk: what every kernel holds in its memory is there afterwards."""

import sys

from e2b_code_interpreter import Sandbox

part = sys.argv[1]
HELD = {
    "python": ("import os; secret = os.urandom(8); held = []", "held.append(secret); print(len(held), len(set(held)))"),
    "javascript": ("const secret = Math.random(), held = []", "held.push(secret); console.log(held.length, new Set(held).size)"),
    "typescript": ("const held: number[] = []; const secret = Math.random()", "held.push(secret); console.log(held.length, new Set(held).size)"),
    "bash": ("held=; secret=$RANDOM$RANDOM", "held+=\"$secret \"; echo $(wc -w <<< $held) $(tr ' ' '\\n' <<< $held | sort -u | grep -c .)"),
}


def holds(box, times):
    for language, (_, add) in HELD.items():
        execution = box.run_code(add, language=language)
        assert "".join(execution.logs.stdout) == f"{times} 1\n" and execution.error is None, (language, times, execution)
    assert box.run_code("count", context=context(box)).text == "7"


def context(box):
    (own,) = [context for context in box.list_code_contexts() if context.cwd == "/tmp"]
    return own


if part == "begin":
    box = Sandbox.create(timeout=3000)
    for language, (begin, _) in HELD.items():
        execution = box.run_code(begin, language=language)
        assert execution.error is None, (language, execution)
    box.run_code("count = 7", context=box.create_code_context(cwd="/tmp"))
    holds(box, 1)
    print(box.sandbox_id)
elif part == "go-on":
    box = Sandbox.connect(sys.argv[2])
    box.run_code("rounds = globals().get('rounds', 1) + 1")
    holds(box, int(box.run_code("rounds").text))
elif part == "pause":
    box = Sandbox.connect(sys.argv[2])
    assert box.pause()
else:
    box = Sandbox.connect(sys.argv[2])
    holds(box, 4)
    assert box.kill()
