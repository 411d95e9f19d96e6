"""Three dev servers that sleep, and whose previews are opened all at once: each wakes by its own visitor."""

import asyncio
import os
import urllib.error
import urllib.request

from e2b import AsyncSandbox

PORT = 8000
NAMES = ["shop", "blog", "docs"]


def get(sandbox_id, path):
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    url = os.environ["E2B_SANDBOX_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as page:
        return page.read().decode()


async def preview(box, path="/"):
    return await asyncio.to_thread(get, box.sandbox_id, path)


async def site(name):
    box = await AsyncSandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    await box.files.write("/home/user/site/index.html", f"welcome to the {name}")
    await box.commands.run(f"exec python3 -m http.server {PORT} --directory site", background=True, timeout=0)
    for _ in range(300):
        try:
            await preview(box)
            print(f"the {name} is served by {box.sandbox_id}")
            return box
        except urllib.error.HTTPError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"the server of the {name} never listened")


async def main():
    boxes = await asyncio.gather(*map(site, NAMES))
    try:
        await asyncio.gather(*(box.pause() for box in boxes))
        print("all of them sleep")
        pages = await asyncio.gather(*map(preview, boxes))
        for name, page in zip(NAMES, pages):
            print(f"woken by a visitor: {page}")
            assert page == f"welcome to the {name}", page
        await boxes[0].files.write("/home/user/site/news.html", "written after the wake")
        assert await preview(boxes[0], "/news.html") == "written after the wake"
        print("and the shop has news")
    finally:
        await asyncio.gather(*(box.kill() for box in boxes))


asyncio.run(main())
