"""Templates of the asynchronous Python SDK. Its builder is the synchronous one's."""

import asyncio
import pathlib
import tempfile

from e2b import AsyncSandbox, AsyncTemplate, BuildException

context = pathlib.Path(tempfile.mkdtemp())
(context / "hello.txt").write_text("hello\n")


async def main():
    logs = []
    builder = AsyncTemplate(file_context_path=str(context)).from_base_image().copy("hello.txt", "/srv/")
    builder = builder.run_cmd("echo in the log; cat /srv/hello.txt >/tmp/read")
    built = await AsyncTemplate.build(builder, "aio:v1", tags=["v2"], on_build_logs=lambda entry: logs.append(entry.message))
    assert built.tags == ["v1", "v2"] and "in the log" in logs, (built, logs)
    box = await AsyncSandbox.create("aio:v2", timeout=300)
    assert (await box.commands.run("cat /tmp/read")).stdout == "hello\n"
    await box.kill()

    assert await AsyncTemplate.exists("aio:v1") and not await AsyncTemplate.alias_exists("aio:v3")
    assert (await AsyncTemplate.assign_tags("aio:v1", "v3")).build_id == built.build_id
    await AsyncTemplate.remove_tags("aio", ["v1"])
    assert sorted(one.tag for one in await AsyncTemplate.get_tags("aio")) == ["v2", "v3"]

    # Several at once, of which one fails.
    def making(command):
        return AsyncTemplate(file_context_path=str(context)).from_template("aio:v2").run_cmd(command)

    begun = await asyncio.gather(
        AsyncTemplate.build_in_background(making("true"), "fine"),
        AsyncTemplate.build_in_background(making("exit 3"), "failing"),
    )
    ends = []
    for one in begun:
        while (status := await AsyncTemplate.get_build_status(one)).status.value not in ("ready", "error"):
            await asyncio.sleep(0.1)
        ends.append(status)
    assert [one.status.value for one in ends] == ["ready", "error"]
    assert "exit code 3" in ends[1].reason.message and ends[1].reason.step == "1", ends[1].reason
    try:
        await AsyncTemplate.build(making("exit 3"), "failing")
        raise AssertionError("no error")
    except BuildException as error:
        assert "exit code 3" in str(error)


asyncio.run(main())
