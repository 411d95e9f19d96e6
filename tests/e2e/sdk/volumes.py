"""Volumes of the Python SDK: their life, their files, and sandboxes that mount them."""

import io
import uuid

from e2b import Sandbox, Volume
from e2b.exceptions import VolumeNotFoundException, VolumePathNotFoundException

from support import fails

name = f"v-{uuid.uuid4().hex[:12]}"
volume = Volume.create(name)
assert volume.name == name and volume.token
assert any(one.volume_id == volume.volume_id for one in Volume.list())
assert Volume.get_info(volume.volume_id).name == name
with fails(VolumeNotFoundException):
    Volume.get_info("nosuchvolumeanywhere")

again = Volume.connect(volume.volume_id)
written = again.write_file("/hello.txt", "hello ü")
assert (written.name, written.path, written.size, written.type.value) == ("hello.txt", "/hello.txt", 8, "file")
assert volume.read_file("/hello.txt") == "hello ü"
assert volume.read_file("/hello.txt", format="bytes") == "hello ü".encode()
big = bytes(range(256)) * 40_000
volume.write_file("big", io.BytesIO(big))
assert b"".join(volume.read_file("big", format="stream")) == big

folder = volume.make_dir("/a", mode=0o700)
assert folder.type.value == "directory" and folder.mode & 0o777 == 0o700
with fails(VolumePathNotFoundException):
    volume.make_dir("/x/y")
volume.make_dir("/x/y", force=True)
volume.write_file("/x/y/z", b"z", uid=0, gid=0, mode=0o600)
info = volume.get_info("/x/y/z")
assert (info.uid, info.gid, info.mode & 0o777) == (0, 0, 0o600)
assert volume.update_metadata("/x/y/z", uid=1000, mode=0o640).mode & 0o777 == 0o640
assert [one.path for one in volume.list("/")] == ["/a", "/big", "/hello.txt", "/x"]
assert "/x/y/z" in [one.path for one in volume.list("/", depth=3)]
assert volume.exists("/a") and not volume.exists("/b")
volume.remove("/x")
assert not volume.exists("/x/y/z")
with fails(VolumePathNotFoundException):
    volume.read_file("/x/y/z")

box = Sandbox.create(timeout=300, volume_mounts={"/data": volume})
assert box.commands.run("cat /data/hello.txt").stdout == "hello ü"
box.commands.run("echo from the box > /data/box.txt; ln -s /etc/passwd /data/link")
assert volume.read_file("/box.txt") == "from the box\n"
assert volume.get_info("/link").target == "/etc/passwd"
try:
    volume.read_file("/link")
    raise AssertionError("a link was followed")
except VolumePathNotFoundException:
    raise
except Exception:
    pass
box.pause()
volume.write_file("/meanwhile", "written while it slept")
box.connect()
assert box.commands.run("cat /data/meanwhile").stdout == "written while it slept"
box.kill()
assert volume.read_file("/box.txt") == "from the box\n"
assert Volume.destroy(volume.volume_id)
assert not Volume.destroy(volume.volume_id)
