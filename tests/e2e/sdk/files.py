"""Files of the Python SDK: reading and writing, folders, watching, signed URLs."""

import io

import httpx
from e2b import FileNotFoundException, FilesystemEventType, FileType, InvalidArgumentException, Sandbox, SandboxException

from support import fails, until

box = Sandbox.create(timeout=300)
files = box.files

# Text, bytes, streams; with and without gzip, as a form and as a plain body.
written = files.write("hello.txt", "hällo")
assert written.path == "/home/user/hello.txt" and written.name == "hello.txt" and written.type == FileType.FILE
assert files.read("hello.txt") == "hällo"
data = bytes(range(256)) * 4096
for options in ({}, {"gzip": True}, {"use_octet_stream": True}):
    files.write("/tmp/deep/er/data", data, **options)
    assert bytes(files.read("/tmp/deep/er/data", format="bytes")) == data, options
    assert bytes(files.read("/tmp/deep/er/data", format="bytes", gzip=True)) == data, options
assert b"".join(files.read("/tmp/deep/er/data", format="stream")) == data
files.write("/tmp/io", io.BytesIO(data))
assert len(files.read("/tmp/io", format="bytes")) == len(data)
many = files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(3)])
assert [one.path for one in many] == [f"/home/user/many/{n}" for n in range(3)]
assert files.read("many/2") == "2"
files.write("empty", "")
assert files.read("empty") == ""
tagged = files.write("tagged", "x", metadata={"origin": "test"})
assert tagged.metadata == {"origin": "test"} and files.get_info("tagged").metadata == {"origin": "test"}
files.write("/root/secret", "s", user="root")
assert files.read("/root/secret", user="root") == "s"
with fails(SandboxException):
    files.read("/root/secret")
with fails(FileNotFoundException):
    files.read("/no/such/file")
with fails(InvalidArgumentException):
    files.read("/tmp")

# Folders.
assert files.make_dir("one/two") is True
assert files.make_dir("one/two") is False
assert files.exists("one/two") and not files.exists("one/three")
files.write("one/two/file", "12345")
info = files.get_info("one/two/file")
assert (info.type, info.size, info.owner, info.permissions) == (FileType.FILE, 5, "user", "-rw-r--r--"), info
assert files.get_info("one").type == FileType.DIR
assert [one.name for one in files.list("one")] == ["two"]
assert sorted(one.name for one in files.list("one", depth=2)) == ["file", "two"]
box.commands.run("ln -s two one/link")
assert files.get_info("one/link").symlink_target.endswith("two")
moved = files.rename("one/two/file", "one/moved")
assert moved.path == "/home/user/one/moved" and not files.exists("one/two/file")
files.remove("one")
assert not files.exists("one")
with fails(FileNotFoundException):
    files.list("/no/such/folder")
with fails(InvalidArgumentException):
    files.list("/tmp", depth=0)

# Watching.
files.make_dir("watched/inner")
flat = files.watch_dir("watched")
deep = files.watch_dir("watched", recursive=True, include_entry=True)
files.write("watched/new", "1")
files.write("watched/inner/new", "1")
box.commands.run("chmod 600 watched/new; mv watched/new watched/other; rm watched/other")
seen = []


def kinds(handle):
    seen.extend((one.name, one.type) for one in handle.get_new_events())
    return {kind for _, kind in seen} >= set(FilesystemEventType)


until("every kind of event is seen", lambda: kinds(flat))
assert all("/" not in name for name, _ in seen), seen
seen.clear()
until("what is below is seen", lambda: kinds(deep) and any(name == "inner/new" for name, _ in seen))
flat.stop()
deep.stop()
with fails(SandboxException):
    flat.get_new_events()
with fails(FileNotFoundException):
    files.watch_dir("/no/such/folder")

# Signed URLs.
url = box.download_url("hello.txt")
assert "signature=" in url
assert httpx.get(url).text == "hällo"
assert httpx.get(url.replace("hello.txt", "empty")).status_code == 401
assert httpx.get(box.download_url("hello.txt", use_signature_expiration=60)).status_code == 200
late = httpx.get(box.download_url("hello.txt", use_signature_expiration=-60))
assert late.status_code == 401 and "expired" in late.text, late.text
up = box.upload_url("uploaded", use_signature_expiration=60)
answer = httpx.post(up, files={"file": ("uploaded", b"by hand")})
assert answer.status_code == 200, answer.text
assert files.read("uploaded") == "by hand"
assert httpx.post(box.download_url("uploaded"), files={"file": ("x", b"no")}).status_code == 401

assert box.kill()
