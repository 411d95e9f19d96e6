"""Code that prints more than its client reads waits for it. The server in the box keeps little of it, and loses none."""

import http.client
import json
import os
import shlex
from urllib.parse import urlsplit

from e2b_code_interpreter import Sandbox

from support import until

LINES = 80_000
FLOOD = f"""
line = "x" * 999
for n in range({LINES}):
    print(line)
    if n % 1000 == 0:
        with open("/tmp/progress", "w") as progress:
            progress.write(str(n))
with open("/tmp/progress", "w") as progress:
    progress.write("all")
"""
PEAK = "grep VmHWM /proc/$(pgrep --full '^python3 -I /opt/code-interpreter/server.py$')/status"

box = Sandbox.create(timeout=3000)


def printed():
    return box.files.read("/tmp/progress")


def waits():
    """Whether it has printed everything, or nothing for a second."""
    before = printed()
    return all(printed() == before for _ in range(20))


for language, code in {"python": FLOOD, "bash": f"python3 -c {shlex.quote(FLOOD)}"}.items():
    assert box.run_code("1", language="python").error is None
    box.files.write("/tmp/progress", "-")
    url = urlsplit(os.environ["E2B_SANDBOX_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999", "X-API-Key": os.environ["E2B_API_KEY"]}
    connection.request("POST", "/execute", json.dumps({"code": code, "language": language}), headers)
    answer = connection.getresponse()
    until("it prints", lambda: printed() != "-")
    until("it waits", waits, 120)
    assert printed() != "all", "all of it is somewhere"
    got, ended = 0, False
    for line in answer:
        said = json.loads(line)
        got += len(said["text"]) if said["type"] == "stdout" else 0
        ended = ended or said["type"] == "end_of_execution"
    assert ended and got == LINES * 1000, (language, ended, got)
    peak = int(box.commands.run(PEAK).stdout.split()[1])
    assert peak < 96 << 10, f"{language}: the server had {peak} KiB"
    assert box.run_code("1 + 1").text == "2"
assert box.kill()
