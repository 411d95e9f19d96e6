"""A dev server whose preview wakes it: the sandbox sleeps, somebody opens the page, and the server goes on with what it had in memory."""

import os
import time
import urllib.error
import urllib.request

from e2b import Sandbox

PORT = 3000
SERVER = """
import http.server, pathlib

visits = 0

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global visits
        visits += 1
        body = f"{pathlib.Path('page.html').read_text().strip()} visit {visits}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Page).serve_forever()
"""


def preview(box):
    """The page, as somebody sees it who opens the preview. A browser would open the URL itself."""
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    with urllib.request.urlopen(urllib.request.Request(os.environ["E2B_SANDBOX_URL"], headers=headers), timeout=60) as page:
        return page.read().decode()


def wait_for_server(box):
    for _ in range(300):
        try:
            return preview(box)
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise SystemExit("the server never listened")


def main():
    box = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    print(f"{box.sandbox_id} is made; its preview is http://{box.get_host(PORT)}")
    try:
        box.files.write("/home/user/server.py", SERVER)
        box.files.write("/home/user/page.html", "first")
        box.commands.run("exec python3 server.py", background=True, timeout=0)
        print("the page:", wait_for_server(box))
        seen = preview(box)
        visits = int(seen.split()[-1])

        for text in ("second", "third"):
            box.pause()
            print("the sandbox sleeps")
            seen = preview(box)
            visits += 1
            print("opening the page wakes it:", seen)
            assert seen.endswith(f"visit {visits}"), "the server is another one"
            box.files.write("/home/user/page.html", text)
            seen = preview(box)
            visits += 1
            print("after an edit:", seen)
            assert seen == f"{text} visit {visits}", seen
    finally:
        box.kill()


main()
