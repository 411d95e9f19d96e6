"""Many clients of one server at once, each with a sandbox that it creates, runs in, writes to, reads from, pauses, resumes and
kills. Arguments: how many, and in how many processes."""

import asyncio
import os
import sys
import time
import traceback

from e2b import AsyncSandbox

count, processes = int(sys.argv[1]), int(sys.argv[2])


async def client(number, times):
    async def timed(step, work):
        began = time.monotonic()
        result = await work
        times.setdefault(step, []).append(time.monotonic() - began)
        return result

    options = {"request_timeout": 600}
    box = await timed("create", AsyncSandbox.create(timeout=3600, metadata={"number": str(number)}, **options))
    ran = await timed("run", box.commands.run(f"echo $(({number} + 1))", timeout=600, **options))
    assert ran.stdout == f"{number + 1}\n", ran
    await timed("write", box.files.write("file", f"of {number}", **options))
    assert await timed("read", box.files.read("file", **options)) == f"of {number}"
    await box.commands.run("sleep 100000", background=True, timeout=0, **options)
    assert await timed("pause", box.pause(**options))
    box = await timed("resume", AsyncSandbox.connect(box.sandbox_id, timeout=3600, **options))
    assert any("sleep 100000" in " ".join(one.args) for one in await box.commands.list(**options))
    assert await box.files.read("file", **options) == f"of {number}"
    assert await timed("kill", box.kill(**options))


async def main(numbers):
    times = {}
    done = await asyncio.gather(*(client(number, times) for number in numbers), return_exceptions=True)
    for error in done:
        if error is not None:
            traceback.print_exception(error)
    for step, all_of_it in times.items():
        all_of_it.sort()
        print(f"{step}: {len(all_of_it)}, median {all_of_it[len(all_of_it) // 2]:.2f} s, longest {all_of_it[-1]:.2f} s", flush=True)
    return sum(error is not None for error in done)


began = time.monotonic()
children = []
for part in range(processes):
    pid = os.fork()
    if pid == 0:
        os._exit(min(asyncio.run(main(range(part, count, processes))), 255))
    children.append(pid)
errors = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)
print(f"{count} clients, {time.monotonic() - began:.1f} s")
sys.exit(errors)
