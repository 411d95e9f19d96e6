"""The asynchronous half, with executions beside each other in several contexts, and in one behind each other."""

import asyncio

from e2b_code_interpreter import AsyncSandbox


async def main():
    box = await AsyncSandbox.create(timeout=3000)
    heard = []

    async def hear(message):
        heard.append(message.line)

    execution = await box.run_code("x = 1\nprint('heard')\nx", on_stdout=hear)
    assert execution.text == "1" and heard == ["heard\n"], (execution, heard)

    # They can only end if they run at the same time: each waits for a file of the other.
    contexts = [await box.create_code_context() for _ in range(2)]
    meet = "import os, time\nopen('{mine}', 'w').close()\nwhile not os.path.exists('{other}'): time.sleep(0.01)\n'met'"
    met = await asyncio.gather(
        box.run_code(meet.format(mine="a", other="b"), context=contexts[0]),
        box.run_code(meet.format(mine="b", other="a"), context=contexts[1]),
    )
    assert [execution.text for execution in met] == ["met", "met"], met

    # In one context all of them have their turn, and none is lost.
    await box.run_code("turns = []")
    await asyncio.gather(*(box.run_code(f"turns.append({turn})") for turn in range(8)))
    assert (await box.run_code("sorted(turns)")).text == "[0, 1, 2, 3, 4, 5, 6, 7]"

    failed = await box.run_code("throw new RangeError('far')", language="javascript")
    assert (failed.error.name, failed.error.value) == ("RangeError", "far"), failed
    assert len(await box.list_code_contexts()) == 4
    await box.restart_code_context(contexts[0])
    await box.remove_code_context(contexts[1])
    assert len(await box.list_code_contexts()) == 3
    assert await box.kill()


asyncio.run(main())
