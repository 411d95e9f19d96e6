"""Two coding agents at the same time, with a computer each, that come to the same result by ten sessions of their own.

What `coding_agent.py` says holds here too; this one shows the asynchronous SDK.
"""

import asyncio
import json
import pathlib
import tempfile

from e2b import AsyncSandbox, CommandExitException

PROJECT = pathlib.Path(__file__).resolve().parent / "project"
REPOSITORY = "/home/user/textkit"
RUN_TESTS = ".venv/bin/python -m unittest"


async def git(*args):
    """Git on this computer."""
    process = await asyncio.create_subprocess_exec("git", *args, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, f"git {' '.join(args)} fails"
    return output


async def bundle():
    with tempfile.TemporaryDirectory() as folder:
        here = ["-C", folder, "--work-tree", str(PROJECT), "-c", "user.name=Example", "-c", "user.email=example@localhost"]
        await git("init", "--quiet", "--initial-branch=main", folder)
        await git(*here, "add", "--all")
        await git(*here, "commit", "--quiet", "--message=Begin")
        return await git(*here, "bundle", "create", "-", "main")


async def set_up(box, project):
    await box.files.write("/tmp/textkit.bundle", project)
    await box.git.clone("/tmp/textkit.bundle", path=REPOSITORY, branch="main")
    await box.git.configure_user("Agent", "agent@localhost")
    install = "python3 -m venv --system-site-packages .venv && .venv/bin/pip install --quiet --no-build-isolation --editable ."
    await box.commands.run(install, cwd=REPOSITORY, timeout=900)


async def work(box, task):
    name = task["name"]
    test = f"\n    def test_{name}(self):\n        self.assertTrue({task['test']})\n"
    await box.commands.run(f"sed -i '/^    pass$/d' tests/test_textkit.py && cat >> tests/test_textkit.py <<'END'{test}END", cwd=REPOSITORY)
    before = await box.files.read(f"{REPOSITORY}/textkit/__init__.py")
    for expression in task["attempts"]:
        await box.files.write(f"{REPOSITORY}/textkit/__init__.py", f"{before}\n\ndef {name}(text):\n    return {expression}\n")
        try:
            await box.commands.run(RUN_TESTS, cwd=REPOSITORY)
            break
        except CommandExitException:
            continue
    else:
        raise SystemExit(f"no attempt at {name} passes its test")
    await box.git.add(REPOSITORY)
    await box.git.commit(REPOSITORY, f"Add {name}")


async def agent(label, project, tasks):
    box = await AsyncSandbox.create(timeout=1800)
    try:
        await set_up(box, project)
        print(f"{label} has a computer, {box.sandbox_id}, with the project installed")
        for session, task in enumerate(tasks, 1):
            await work(box, task)
            print(f"{label}, session {session}: {task['name']} is committed")
            await box.pause()
            box = await AsyncSandbox.connect(box.sandbox_id)
        history = (await box.commands.run("git log --format=%s", cwd=REPOSITORY)).stdout.splitlines()
        assert len(history) == 1 + len(tasks), history
        return (await box.commands.run("git rev-parse HEAD^{tree}", cwd=REPOSITORY)).stdout.strip()
    finally:
        await box.kill()


async def main():
    tasks = json.loads((PROJECT / "tasks.json").read_text())
    project = await bundle()
    first, second = await asyncio.gather(agent("Ada", project, tasks), agent("Grace", project, tasks))
    assert first == second, "they wrote different code"
    print(f"both came to the tree {first}")


asyncio.run(main())
