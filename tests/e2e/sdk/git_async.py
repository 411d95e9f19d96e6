"""Git of the asynchronous Python SDK, with repositories inside of the sandbox."""

import asyncio

from e2b import AsyncSandbox

WORK, ORIGIN, COPY = "/home/user/work", "/home/user/origin.git", "/home/user/copy"


async def main():
    box = await AsyncSandbox.create(timeout=300)
    git = box.git
    await git.configure_user("Tester", "tester@example.com")
    await git.set_config("init.defaultBranch", "main", scope="global")
    assert await git.get_config("user.name", scope="global") == "Tester"
    await git.init(ORIGIN, bare=True)
    await git.init(WORK, initial_branch="main")
    await box.files.write_files([{"path": f"{WORK}/file", "data": "one\n"}])
    assert (await git.status(WORK)).has_untracked
    await git.add(WORK, files=["file"])
    await git.commit(WORK, "First")
    await git.create_branch(WORK, "side")
    assert (await git.branches(WORK)).current_branch == "side"
    await git.checkout_branch(WORK, "main")
    await git.delete_branch(WORK, "side")
    await git.remote_add(WORK, "origin", ORIGIN)
    assert await git.remote_get(WORK, "origin") == ORIGIN
    await git.push(WORK, remote="origin", branch="main", set_upstream=True)
    await git.clone(ORIGIN, path=COPY, branch="main")
    await box.files.write(f"{WORK}/file", "two\n")
    await git.add(WORK)
    await git.commit(WORK, "Second")
    await git.push(WORK)
    await git.pull(COPY)
    assert await box.files.read(f"{COPY}/file") == "two\n"
    await box.files.write(f"{WORK}/file", "three\n")
    await git.add(WORK)
    await git.reset(WORK)
    await git.restore(WORK, paths=["file"])
    assert await box.files.read(f"{WORK}/file") == "two\n"
    await git.dangerously_authenticate("someone", "a-token")

    # Input as it comes.
    head = await box.commands.run("head -n 2", background=True, stdin=True, timeout=0)
    words = box.commands.stream_input(head.pid)
    await words.send("one\n")
    await words.send(b"two\n")
    await words.close()
    assert (await head.wait()).stdout == "one\ntwo\n"
    await box.update_network({"deny_out": ["203.0.113.0/24"]})
    assert (await box.get_info()).network["deny_out"] == ["203.0.113.0/24"]
    await box.kill()


asyncio.run(main())
