"""Two questions at the same time, in contexts of their own, to data that were loaded before the pause.

Needs the template of the code interpreter: dorm template build code-interpreter-v1
"""

import asyncio

from e2b_code_interpreter import AsyncSandbox

# Numbers that can only be known by whoever has the same array: it is random, and saved nowhere.
LOAD = "import numpy as np\nmeasured = np.random.default_rng().normal({mean}, 1, 1_000_000)\nprint(repr(measured.sum()))"
ASK = "print(repr(measured.sum()))\nmeasured.mean().round(1)"
MEANS = [5, 50]


async def run(box, code, context):
    async def hear(message):
        print(f"  {context.cwd}: {message.line.strip()}")

    execution = await box.run_code(code, context=context, on_stdout=hear)
    if execution.error:
        raise SystemExit(execution.error.traceback)
    return execution


async def main():
    box = await AsyncSandbox.create(timeout=600)
    print(f"{box.sandbox_id} is made")
    try:
        await asyncio.gather(*(box.files.make_dir(f"/home/user/{mean}") for mean in MEANS))
        contexts = [await box.create_code_context(cwd=f"/home/user/{mean}") for mean in MEANS]
        loaded = await asyncio.gather(*(run(box, LOAD.format(mean=mean), context) for mean, context in zip(MEANS, contexts)))
        print("both data sets are loaded")
        await box.pause()
        print("the sandbox is paused")

        box = await AsyncSandbox.connect(box.sandbox_id)
        asked = await asyncio.gather(*(run(box, ASK, context) for context in contexts))
        assert [one.logs.stdout for one in asked] == [one.logs.stdout for one in loaded], "these are other data"
        print(f"the means are {[one.text for one in asked]}, of the very same data")
        assert [f"{mean}.0" in one.text for mean, one in zip(MEANS, asked)] == [True, True], asked
    finally:
        await box.kill()


asyncio.run(main())
