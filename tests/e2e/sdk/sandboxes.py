"""Sandboxes of the Python SDK: create, find, connect, pause, time, network, metrics, kill."""

import datetime
import uuid

import httpx
from e2b import (
    AuthenticationException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
)

from support import BOOT_ID, ask_keeper, fails, start_keeper, until

mark = uuid.uuid4().hex


def made_with(**options):
    return Sandbox.create(metadata={"mark": mark, "odd": "a b&c=ü"}, **options)


# Create, and what is known of it.
box = made_with(envs={"GREETING": "hällo"}, timeout=120)
assert box.is_running()
assert box.commands.run("echo $GREETING").stdout == "hällo\n"
assert box.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
info = box.get_info()
assert info.sandbox_id == box.sandbox_id and info.name == "base"
assert info.state == SandboxState.RUNNING and info.metadata["odd"] == "a b&c=ü"
assert info.cpu_count >= 1 and info.memory_mb > 0 and info.envd_version == "0.6.13"
left = (info.end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
assert 60 < left <= 120, left
assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}

# One request, made twice, makes one sandbox.
key = f"once-{uuid.uuid4()}"
twin = made_with(idempotency_key=key)
assert made_with(idempotency_key=key).sandbox_id == twin.sandbox_id

# Lists.
ours = {"mark": mark}


def listed(**query):
    order = query.pop("order", None)
    limit = query.pop("limit", None)
    pages = Sandbox.list(query=SandboxQuery(metadata=ours, **query), order=order, limit=limit)
    found = []
    while pages.has_next:
        page = pages.next_items()
        assert limit is None or len(page) <= limit
        found.extend(one.sandbox_id for one in page)
    return found


assert listed() == [twin.sandbox_id, box.sandbox_id]
assert listed(order="asc", limit=1) == [box.sandbox_id, twin.sandbox_id]
assert listed(state=[SandboxState.PAUSED]) == []
assert listed(template="base") == [twin.sandbox_id, box.sandbox_id]
assert listed(started_after=info.started_at) == [twin.sandbox_id]
assert Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "odd": "a b&c=ü"})).next_items()
assert not Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "odd": "other"})).next_items()

# Pause: memory and files come back, and the time of a paused one stands still.
secret, pid = start_keeper(box)
boot = box.commands.run(BOOT_ID).stdout
assert box.pause() is True
assert box.get_info().state == SandboxState.PAUSED
assert box.pause() is False
assert listed(state=[SandboxState.PAUSED]) == [box.sandbox_id]
with fails(SandboxNotFoundException):
    box.set_timeout(60)
assert not box.is_running()
with fails(SandboxNotRunningException):
    box.commands.run("true")
again = Sandbox.connect(box.sandbox_id, timeout=600)
assert again.sandbox_id == box.sandbox_id
assert ask_keeper(again, pid) == secret
assert again.commands.run(BOOT_ID).stdout == boot
assert box.is_running(), "the first handle works again, too"
for cycle in range(3):
    box.files.write(f"/home/user/cycle-{cycle}", str(cycle))
    assert box.pause()
    box.connect()
    assert ask_keeper(box, pid) == secret
assert [box.files.read(f"/home/user/cycle-{n}") for n in range(3)] == ["0", "1", "2"]

# Connect never shortens the time; set_timeout may.
end = box.get_info().end_at
box.connect(timeout=10)
assert box.get_info().end_at >= end
box.set_timeout(100)
assert box.get_info().end_at < end

# Without memory: the files, and another boot.
assert box.pause(keep_memory=False)
box.connect()
assert box.files.read("/home/user/cycle-2") == "2"
assert box.commands.run("pgrep -f [k]eeper.py || true").stdout == ""
changed = box.commands.run(BOOT_ID).stdout
assert changed != boot, "a pause without memory keeps the boot id"

# A paused memory that is not wanted any more.
secret, pid = start_keeper(box)
assert box.pause(mode="full", strict=True)
box.connect(on_resume="reboot")
assert box.commands.run("pgrep -f [k]eeper.py || true").stdout == ""

# At the end of its time it is paused, and a request wakes it if it may.
auto = made_with(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
assert auto.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
secret, pid = start_keeper(auto)
auto.set_timeout(1)
until("it is paused at the end of its time", lambda: auto.get_info().state == SandboxState.PAUSED)
assert ask_keeper(auto, pid) == secret, "a command did not wake it"
until("it counts as running", lambda: auto.get_info().state == SandboxState.RUNNING)
auto.set_timeout(0)
assert auto.get_info().state == SandboxState.PAUSED
assert auto.kill()

# At the end of its time it is gone.
short = made_with(timeout=1)
until("it ends", lambda: not short.is_running())
with fails(SandboxNotFoundException):
    short.get_info()
now = made_with()
now.set_timeout(0)
assert not now.is_running()

# Ports.
twin.commands.run("python3 -m http.server 8123 --bind 127.0.0.1", background=True, timeout=0)
host = twin.get_host(8123)
assert host.startswith(f"8123-{twin.sandbox_id}."), host


def fetch(host):
    if ":" not in host:
        return httpx.get(f"https://{host}/", timeout=30)
    # Names below localhost are not resolved everywhere.
    return httpx.get(f"http://127.0.0.1:{host.rsplit(':', 1)[1]}/", headers={"Host": host}, timeout=30)


until("the port answers", lambda: fetch(host).status_code == 200)
answer = fetch(twin.get_host(8124))
assert answer.status_code == 502, answer.text

# Network settings are kept and replaced.
twin.update_network({"deny_out": ["203.0.113.0/24"]})
assert twin.get_info().network["deny_out"] == ["203.0.113.0/24"]
twin.update_network({})
assert not twin.get_info().network.get("deny_out")

# Metrics.
metrics = until("there are metrics", twin.get_metrics)
assert metrics[-1].mem_total == twin.get_info().memory_mb * 1024 * 1024 and metrics[-1].mem_used > 0
assert metrics[-1].cpu_count == twin.get_info().cpu_count and metrics[-1].disk_total > 0
hour = datetime.timedelta(hours=1)
at = datetime.datetime.now(datetime.timezone.utc)
assert twin.get_metrics(start=at - hour, end=at + hour)
assert not twin.get_metrics(start=at - 2 * hour, end=at - hour)

# Kill, and what is not there.
assert twin.kill() is True
assert twin.kill() is False
assert not twin.is_running()
with fails(SandboxNotRunningException):
    twin.commands.run("true")
assert Sandbox.kill(box.sandbox_id) is True
with fails(SandboxNotFoundException):
    Sandbox.connect(box.sandbox_id)
with fails(SandboxException, "404"):
    Sandbox.create("no-such-template")
with fails(AuthenticationException):
    Sandbox.create(api_key="e2b_" + "0" * 40)
with Sandbox.create() as passing:
    assert passing.is_running()
assert not passing.is_running()
assert listed() == [], listed()
