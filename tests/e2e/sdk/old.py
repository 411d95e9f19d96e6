"""The oldest SDK of the second generation: create, run, write, pause, resume."""

from e2b import Sandbox, SandboxQuery, SandboxState

from support import until

box = Sandbox.create(timeout=120, metadata={"by": "the old one"})
assert box.is_running()
assert box.commands.run("echo hi").stdout == "hi\n"
box.files.write("file", "kept")
assert box.files.read("file") == "kept"
assert box.get_info().state == SandboxState.RUNNING
handle = box.commands.run("sleep 600", background=True)
box.set_timeout(100)

box.beta_pause()
until("it is paused", lambda: box.get_info().state == SandboxState.PAUSED)
same = Sandbox.connect(box.sandbox_id)
assert same.sandbox_id == box.sandbox_id
assert same.files.read("file") == "kept"
assert any(one.pid == handle.pid for one in same.commands.list()), "the command did not survive the pause"
found = Sandbox.list(query=SandboxQuery(metadata={"by": "the old one"})).next_items()
assert [one.sandbox_id for one in found] == [box.sandbox_id]
assert box.get_metrics() is not None
assert same.kill() is True
assert not box.is_running()
