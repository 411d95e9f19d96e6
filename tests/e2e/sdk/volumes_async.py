"""Volumes of the asynchronous Python SDK."""

import asyncio
import uuid

from e2b import AsyncSandbox, AsyncVolume
from e2b.exceptions import VolumeNotFoundException

from support import SUDO


async def main():
    name = f"v-{uuid.uuid4().hex[:12]}"
    volume = await AsyncVolume.create(name)
    assert any(one.volume_id == volume.volume_id for one in await AsyncVolume.list())
    assert (await AsyncVolume.get_info(volume.volume_id)).name == name
    again = await AsyncVolume.connect(volume.volume_id)
    await again.write_file("/file", "text")
    assert await volume.read_file("/file") == "text"
    assert b"".join([chunk async for chunk in await volume.read_file("/file", format="stream")]) == b"text"
    await volume.make_dir("/folder")
    assert (await volume.get_info("/folder")).type.value == "directory"
    assert (await volume.update_metadata("/file", mode=0o600)).mode & 0o777 == 0o600
    assert [one.path for one in await volume.list("/")] == ["/file", "/folder"]
    box = await AsyncSandbox.create(volume_mounts={"/data": volume})
    reading = box.commands.run("sudo cat /data/file") if SUDO else box.commands.run("cat /data/file", user="root")
    assert (await reading).stdout == "text"
    await box.kill()
    await volume.remove("/file")
    assert not await volume.exists("/file")
    assert await AsyncVolume.destroy(volume.volume_id)
    try:
        await AsyncVolume.connect(volume.volume_id)
        raise AssertionError("no error")
    except VolumeNotFoundException:
        pass


asyncio.run(main())
