"""A template of an image that was imported, and that has next to nothing."""

import pathlib
import tempfile

from e2b import Sandbox, Template

context = pathlib.Path(tempfile.mkdtemp())
(context / "hello.txt").write_text("hello\n")
builder = Template(file_context_path=str(context)).from_alpine_image().copy("hello.txt", "greeting/", mode=0o600)
Template.build(builder.run_cmd("id -un >who; cat greeting/hello.txt >>who"), "small")
box = Sandbox.create("small")
assert box.commands.run("pwd; cat who; stat -c '%U %a' greeting/hello.txt").stdout == "/home/user\nuser\nhello\nuser 600\n"
box.kill()
