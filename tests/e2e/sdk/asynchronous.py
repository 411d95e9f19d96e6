"""The asynchronous half of the Python SDK."""

import asyncio
import uuid

from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, PtySize, SandboxQuery, SandboxState


async def main():
    mark = uuid.uuid4().hex
    box = await AsyncSandbox.create(timeout=300, metadata={"mark": mark}, envs={"A": "b"})
    assert await box.is_running()
    assert (await box.commands.run("echo $A")).stdout == "b\n"

    # Many at once.
    results = await asyncio.gather(*(box.commands.run(f"sleep 0.1; echo {n}") for n in range(20)))
    assert [one.stdout for one in results] == [f"{n}\n" for n in range(20)]
    try:
        await box.commands.run("exit 4")
        raise AssertionError("no error")
    except CommandExitException as error:
        assert error.exit_code == 4

    seen = []
    handle = await box.commands.run("cat", background=True, stdin=True, on_stdout=seen.append, timeout=0)
    await box.commands.send_stdin(handle.pid, "typed\n")
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "typed\n" and "".join(seen) == "typed\n"

    sleeper = await box.commands.run("sleep 600", background=True, timeout=0)
    await sleeper.disconnect()
    assert any(one.pid == sleeper.pid for one in await box.commands.list())
    again = await box.commands.connect(sleeper.pid)
    assert await again.kill()

    output = bytearray()
    terminal = await box.pty.create(PtySize(24, 80), on_data=output.extend, timeout=0)
    await box.pty.resize(terminal.pid, PtySize(30, 90))
    await box.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await terminal.wait()
    assert b"30 90" in bytes(output), bytes(output)

    await box.files.write("a/file", "text")
    assert await box.files.read("a/file") == "text"
    stream = await box.files.read("a/file", format="stream")
    assert b"".join([chunk async for chunk in stream]) == b"text"
    assert await box.files.exists("a") and await box.files.make_dir("b")
    events = asyncio.Queue()
    watching = await box.files.watch_dir("b", on_event=events.put_nowait)
    await box.files.write("b/new", "1")
    event = await asyncio.wait_for(events.get(), 30)
    assert (event.name, event.type) == ("new", FilesystemEventType.CREATE), event
    await watching.stop()
    await box.files.rename("b/new", "b/old")
    assert [one.name for one in await box.files.list("b")] == ["old"]
    await box.files.remove("b")

    await box.git.init("/home/user/repo", initial_branch="main")
    assert (await box.git.status("/home/user/repo")).is_clean

    listed = await AsyncSandbox.list(query=SandboxQuery(metadata={"mark": mark})).next_items()
    assert [one.sandbox_id for one in listed] == [box.sandbox_id]
    assert await box.pause()
    assert (await box.get_info()).state == SandboxState.PAUSED
    await box.connect(timeout=200)
    await box.set_timeout(100)
    assert await box.files.read("a/file") == "text"
    assert await box.get_metrics()

    snapshot = await box.create_snapshot()
    [fork] = await box.fork()
    assert await fork.files.read("a/file") == "text"
    copy = await AsyncSandbox.create(snapshot.snapshot_id)
    assert await copy.files.read("a/file") == "text"
    assert (await box.list_snapshots().next_items())[0].snapshot_id == snapshot.snapshot_id
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    await asyncio.gather(*(one.kill() for one in (box, fork, copy)))
    assert not await box.is_running()


asyncio.run(main())
