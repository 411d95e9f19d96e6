"""Snapshots and forks of the Python SDK."""

import uuid

from e2b import Sandbox, SandboxNotFoundException

from support import ask_keeper, fails, start_keeper

box = Sandbox.create(timeout=300, envs={"FROM": "the first"})
secret, pid = start_keeper(box)
box.files.write("file", "at the snapshot")

name = f"gold-{uuid.uuid4().hex[:8]}"
snapshot = box.create_snapshot(name=name)
assert any(name in one for one in snapshot.names), snapshot
plain = box.create_snapshot()
assert plain.snapshot_id != snapshot.snapshot_id
files_only = box.create_snapshot(mode="filesystem")
box.files.write("file", "later")

pages = Sandbox.list_snapshots(sandbox_id=box.sandbox_id, limit=2)
listed = []
while pages.has_next:
    page = pages.next_items()
    assert len(page) <= 2
    listed += [one.snapshot_id for one in page]
assert listed == [files_only.snapshot_id, plain.snapshot_id, snapshot.snapshot_id], listed
assert len(box.list_snapshots().next_items()) == 3

# Forks go on with the memory, each for itself.
forks = box.fork(count=3, timeout=120)
assert len(forks) == 3 and not any(isinstance(one, Exception) for one in forks), forks
assert len({one.sandbox_id for one in [box, *forks]}) == 4
for n, fork in enumerate(forks):
    assert ask_keeper(fork, pid) == secret
    assert fork.files.read("file") == "later"
    fork.files.write("file", str(n))
assert [one.files.read("file") for one in forks] == ["0", "1", "2"]
assert box.files.read("file") == "later"
assert ask_keeper(box, pid) == secret
for fork in forks:
    fork.kill()

# A snapshot outlives its sandbox, and is a template.
assert box.kill()
for template in (snapshot.snapshot_id, name):
    copy = Sandbox.create(template, timeout=120, envs={"NEW": "env"})
    assert copy.files.read("file") == "at the snapshot"
    assert ask_keeper(copy, pid) == secret
    assert copy.commands.run("echo $FROM, $NEW").stdout == "the first, env\n"
    assert copy.get_info().template_id == snapshot.snapshot_id
    copy.kill()
fresh = Sandbox.create(files_only.snapshot_id, timeout=120)
assert fresh.files.read("file") == "at the snapshot"
assert fresh.commands.run("pgrep -f [k]eeper.py || true").stdout == ""
fresh.kill()
assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
assert Sandbox.delete_snapshot(plain.snapshot_id) and Sandbox.delete_snapshot(files_only.snapshot_id)
with fails(SandboxNotFoundException):
    Sandbox.create_snapshot(box.sandbox_id)
with fails(SandboxNotFoundException):
    Sandbox.fork(box.sandbox_id)
