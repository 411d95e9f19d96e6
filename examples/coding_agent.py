"""A coding agent that has one computer for all of its sessions.

It clones a repository and installs it once. In each of ten sessions it takes the next task, writes a test and code, corrects itself until
the tests pass, and commits; then its computer sleeps until the next session. What it left running still runs in the last one.
The decisions are a list here (project/tasks.json), where a model would make them.
"""

import json
import pathlib
import subprocess
import tempfile

from e2b import CommandExitException, Sandbox

PROJECT = pathlib.Path(__file__).resolve().parent / "project"
REPOSITORY = "/home/user/textkit"
RUN_TESTS = ".venv/bin/python -m unittest"


def bundle():
    """The project as a Git repository in one file, as `git bundle` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder, "--work-tree", str(PROJECT), "-c", "user.name=Example", "-c", "user.email=example@localhost"]
        subprocess.run(["git", "init", "--quiet", "--initial-branch=main", folder], check=True)
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message=Begin"], check=True)
        return subprocess.run([*git, "bundle", "create", "-", "main"], check=True, capture_output=True).stdout


def set_up():
    box = Sandbox.create(timeout=1800)
    print(f"{box.sandbox_id} is made")
    box.files.write("/tmp/textkit.bundle", bundle())
    box.git.clone("/tmp/textkit.bundle", path=REPOSITORY, branch="main")
    box.git.configure_user("Agent", "agent@localhost")
    install = "python3 -m venv --system-site-packages .venv && .venv/bin/pip install --quiet --no-build-isolation --editable ."
    box.commands.run(install, cwd=REPOSITORY, timeout=900)
    print("the project is cloned and installed, once and for all")
    # Something that runs on from session to session, as a watcher or a dev server would.
    watcher = box.commands.run("exec sleep infinity", background=True, timeout=0)
    return box, watcher.pid


def work(box, task):
    """Writes the test first, and then code until it passes."""
    name = task["name"]
    test = f"\n    def test_{name}(self):\n        self.assertTrue({task['test']})\n"
    box.commands.run(f"sed -i '/^    pass$/d' tests/test_textkit.py && cat >> tests/test_textkit.py <<'END'{test}END", cwd=REPOSITORY)
    before = box.files.read(f"{REPOSITORY}/textkit/__init__.py")
    for attempt, expression in enumerate(task["attempts"], 1):
        box.files.write(f"{REPOSITORY}/textkit/__init__.py", f"{before}\n\ndef {name}(text):\n    return {expression}\n")
        try:
            box.commands.run(RUN_TESTS, cwd=REPOSITORY)
            break
        except CommandExitException as failed:
            print(f"  attempt {attempt} fails: {failed.stderr.strip().splitlines()[-1]}")
    else:
        raise SystemExit(f"no attempt at {name} passes its test")
    box.git.add(REPOSITORY)
    box.git.commit(REPOSITORY, f"Add {name}")


def main():
    tasks = json.loads((PROJECT / "tasks.json").read_text())
    box, watcher = set_up()
    try:
        for session, task in enumerate(tasks, 1):
            work(box, task)
            print(f"session {session}: {task['name']} is done and committed")
            box.pause()
            box = Sandbox.connect(box.sandbox_id)
        history = box.commands.run("git log --format=%s", cwd=REPOSITORY).stdout.splitlines()
        assert len(history) == 1 + len(tasks) and history[-1] == "Begin", history
        assert box.commands.run(".venv/bin/textkit slug 'Ten Sessions'", cwd=REPOSITORY).stdout == "ten-sessions\n"
        assert watcher in [process.pid for process in box.commands.list()], "what ran in the background is gone"
        print(f"{len(tasks)} sessions, {len(history)} commits, and the background process {watcher} still runs")
    finally:
        box.kill()


main()
