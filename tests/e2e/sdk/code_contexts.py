"""Contexts: kept apart, each with its language and its directory; made, listed, restarted and removed."""

from e2b_code_interpreter import NotFoundException, Sandbox, SandboxException

from support import fails

box = Sandbox.create(timeout=3000)
box.files.write("/home/user/project/data.txt", "in the project")

box.run_code("where = 'default'")
one = box.create_code_context(cwd="/home/user/project")
assert (one.language, one.cwd) == ("python", "/home/user/project"), one
two = box.create_code_context(language="python")
box.run_code("where = 'one'", context=one)
box.run_code("where = 'two'", context=two)
assert [box.run_code("where").text, box.run_code("where", context=one).text, box.run_code("where", context=two).text] == ["default", "one", "two"]
assert box.run_code("open('data.txt').read()", context=one).text == "in the project"

script = box.create_code_context(language="javascript", cwd="/home/user/project")
assert box.run_code("require('fs').readFileSync('data.txt', 'utf8')", context=script).text == "in the project"
shell = box.create_code_context(language="bash", cwd="/home/user/project")
assert "".join(box.run_code("cat data.txt", context=shell).logs.stdout) == "in the project"

listed = {context.id: context.language for context in box.list_code_contexts()}
assert {one.id, two.id, script.id, shell.id} < set(listed) and len(listed) == 5, listed
assert listed[shell.id] == "bash" and sorted(listed.values()) == ["bash", "javascript", "python", "python", "python"], listed

box.restart_code_context(one)
assert box.run_code("where", context=one).error.name == "NameError"
assert box.run_code("open('data.txt').read()", context=one).text == "in the project"
assert box.run_code("where", context=two).text == "two"
box.remove_code_context(two.id)
with fails(NotFoundException, two.id):
    box.run_code("where", context=two)
with fails(NotFoundException):
    box.remove_code_context(two)
with fails(NotFoundException):
    box.restart_code_context(two)
assert two.id not in [context.id for context in box.list_code_contexts()]

with fails(SandboxException, "400", "cobol"):
    box.run_code("DISPLAY 'HI'.", language="cobol")
with fails(SandboxException, "400", "/nowhere"):
    box.create_code_context(cwd="/nowhere")

# One after the other in one context, each with a turn of its own.
counted = box.run_code("import time\ntime.sleep(0.1)\ncount = 1\ncount")
assert counted.text == "1"
assert box.kill()
