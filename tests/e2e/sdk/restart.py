"""Three parts, between which the daemon is killed, and then the whole machine."""

import json
import sys

from e2b import Sandbox, SandboxNotFoundException, SandboxState

from support import ask_keeper, fails, start_keeper, until

part, kept = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}

if part == "begin":
    running = Sandbox.create(timeout=3000, metadata={"is": "running"})
    kept["secret"], kept["pid"] = start_keeper(running)
    paused = Sandbox.create(timeout=3000)
    paused.files.write("file", "paused")
    assert paused.pause()
    short = Sandbox.create(timeout=3000)
    source = Sandbox.create()
    source.files.write("file", "in the snapshot")
    snapshot = source.create_snapshot()
    assert source.kill()
    short.set_timeout(2)
    kept.update(
        running=running.sandbox_id, paused=paused.sandbox_id, short=short.sandbox_id, snapshot=snapshot.snapshot_id
    )
elif part == "after":
    running = Sandbox.connect(kept["running"])
    assert running.get_info().metadata == {"is": "running"}
    assert ask_keeper(running, kept["pid"]) == kept["secret"]
    assert Sandbox.get_info(kept["paused"]).state == SandboxState.PAUSED
    assert running.pause()
else:
    running = Sandbox.connect(kept["running"])
    assert ask_keeper(running, kept["pid"]) == kept["secret"]
    paused = Sandbox.connect(kept["paused"])
    assert paused.files.read("file") == "paused"
    copy = Sandbox.create(kept["snapshot"])
    assert copy.files.read("file") == "in the snapshot"
    with fails(SandboxNotFoundException):
        until("what is over ends", lambda: Sandbox.get_info(kept["short"]) is None)
    for one in (running, paused, copy):
        one.kill()
    Sandbox.delete_snapshot(kept["snapshot"])

print(json.dumps(kept))
