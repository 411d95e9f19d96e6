"""Secrets of the Python SDK, both halves: kept, never shown, and filled in where a sandbox's environment names them."""

import asyncio
import uuid

from e2b import AsyncSandbox, AsyncSecret, InvalidArgumentException, Sandbox, SandboxException, Secret
from e2b.exceptions import SecretNotFoundException

from support import fails

name = f"a key of {uuid.uuid4().hex[:8]}"
made = Secret.create(name, "hush-1", metadata={"for": "tests"})
assert (made.name, made.version, made.metadata) == (name, 1, {"for": "tests"}), made
assert Secret.exists(name) and not Secret.exists("none")
assert any(one.name == name for one in Secret.list().next_items())
assert Secret.fill(name) == "${e2b.secrets." + name + "}"
with fails(InvalidArgumentException):
    Secret.fill("{}")

box = Sandbox.create(envs={"KEY": Secret.fill(name), "BOTH": f"<{Secret.fill(name)}|{Secret.fill(name)}>"})
assert box.commands.run('echo "$KEY $BOTH"').stdout == "hush-1 <hush-1|hush-1>\n"
assert Secret.update(name, "hush-2", metadata={}).version == 2
assert Secret.get_info(name).version == 2
# What runs keeps what it has; what starts anew has the present value.
box.pause()
box.connect()
assert box.commands.run("echo $KEY").stdout == "hush-1\n"
assert Sandbox.create(envs={"KEY": Secret.fill(name)}).commands.run("echo $KEY").stdout == "hush-2\n"
box.pause(keep_memory=False)
box.connect()
assert box.commands.run("echo $KEY").stdout == "hush-2\n"
with fails(SandboxException, "none"):
    Sandbox.create(envs={"KEY": Secret.fill("none")})
with fails(SandboxException, "iam"):
    token = Secret.iam_token(audience="sts.example.com", token_type="JWT-SVID")
    Sandbox.create(iam={"tokens": {"aws": token}})
assert Secret.destroy(name) and not Secret.destroy(name)
with fails(SecretNotFoundException):
    Secret.get_info(name)
# Its files are worth more than a variable.
box.pause(keep_memory=False)
box.connect()
assert box.commands.run("echo ${KEY-unset}").stdout == "unset\n"


async def main():
    await AsyncSecret.create(name, "hush-3")
    assert await AsyncSecret.exists(name)
    assert (await AsyncSecret.update(name, "hush-4")).version == 2
    assert (await AsyncSecret.get_info(name)).name == name
    assert any(one.name == name for one in await AsyncSecret.list().next_items())
    other = await AsyncSandbox.create(envs={"KEY": AsyncSecret.fill(name)})
    assert (await other.commands.run("echo $KEY")).stdout == "hush-4\n"
    assert await AsyncSecret.destroy(name)


asyncio.run(main())
page = Sandbox.list()
while page.has_next:
    for one in page.next_items():
        Sandbox.kill(one.sandbox_id)
