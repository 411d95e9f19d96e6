"""Git of the Python SDK, with repositories inside of the sandbox."""

from e2b import CommandExitException, GitUpstreamException, Sandbox

from support import fails

box = Sandbox.create(timeout=300)
git = box.git

git.configure_user("Tester", "tester@example.com")
assert git.get_config("user.name", scope="global") == "Tester"
git.set_config("init.defaultBranch", "main", scope="global")
git.init("/home/user/origin.git", bare=True)
git.init("/home/user/work", initial_branch="main")
box.files.write("work/file", "one\n")
status = git.status("/home/user/work")
assert status.has_untracked and not status.is_clean, status
git.add("/home/user/work", files=["file"])
git.commit("/home/user/work", "First")
assert git.status("/home/user/work").is_clean
git.create_branch("/home/user/work", "side")
branches = git.branches("/home/user/work")
assert branches.current_branch == "side" and set(branches.branches) == {"main", "side"}, branches
git.checkout_branch("/home/user/work", "main")
git.delete_branch("/home/user/work", "side")
assert git.branches("/home/user/work").branches == ["main"]

git.remote_add("/home/user/work", "origin", "/home/user/origin.git")
assert git.remote_get("/home/user/work", "origin") == "/home/user/origin.git"
with fails(GitUpstreamException):
    git.push("/home/user/work")
git.push("/home/user/work", remote="origin", branch="main", set_upstream=True)
git.clone("/home/user/origin.git", path="/home/user/copy", branch="main")
assert box.files.read("copy/file") == "one\n"
box.files.write("work/file", "two\n")
git.add("/home/user/work")
git.commit("/home/user/work", "Second")
git.push("/home/user/work")
git.pull("/home/user/copy")
assert box.files.read("copy/file") == "two\n"

box.files.write("work/file", "three\n")
git.add("/home/user/work")
git.reset("/home/user/work")
git.restore("/home/user/work", paths=["file"])
assert box.files.read("work/file") == "two\n"
git.dangerously_authenticate("someone", "a-token")
with fails(CommandExitException):
    git.clone("/home/user/none.git", path="/home/user/other")
assert box.kill()
