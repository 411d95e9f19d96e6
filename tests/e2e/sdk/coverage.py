"""Which public methods of the SDKs no script here calls and no line of docs/e2b.md names. Prints them, and fails if there is one."""

import inspect
import pathlib
import re
import sys

import e2b
from e2b.sandbox_async.commands.command import Commands as AsyncCommands
from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle
from e2b.sandbox_async.commands.pty import Pty as AsyncPty
from e2b.sandbox_async.filesystem.filesystem import Filesystem as AsyncFilesystem
from e2b.sandbox_async.filesystem.watch_handle import AsyncWatchHandle
from e2b.sandbox_async.git import Git as AsyncGit
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.command_handle import CommandHandle
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem
from e2b.sandbox_sync.filesystem.watch_handle import WatchHandle
from e2b.sandbox_sync.git import Git
from e2b.template.main import TemplateBuilder

here = pathlib.Path(__file__).parent
sdks, document = pathlib.Path(sys.prefix).parent, here.parents[2] / "docs/e2b.md"


def text(*patterns):
    files = [file for pattern in patterns for file in here.glob(pattern) if file.name != pathlib.Path(__file__).name]
    return "\n".join(file.read_text() for file in files)


def of_python(kind):
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and callable(member):
            yield name, member


def of_javascript(kind, declarations):
    body = re.search(rf"^declare class {kind}\b.*?\{{\n(.*?)^\}}", declarations, re.S | re.M)
    assert body, f"the JavaScript SDK has no class {kind}"
    for line in re.sub(r"/\*\*.*?\*/", "", body.group(1), flags=re.S).splitlines():
        found = re.match(r"  (?!private |protected |constructor\b)(?:static |async )*(\w+)[(<]", line)
        if found:
            yield found.group(1), None


def snake(name):
    return re.sub(r"([a-z])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3_\2\4", name).lower()


prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)
documented = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
everything, asynchronous = text("*.py"), text("*async*.py", "parallel.py", "workspace_secrets.py")
missing, checked = [], []


def check(language, kind, methods, scripts):
    for name, method in methods:
        # What both halves of the Python SDK share is one method.
        if method is not None and any(method is one for one in checked):
            continue
        checked.append(method)
        called = re.search(rf"\.{name}\b", scripts)
        if not called and name not in documented and snake(name) not in documented:
            missing.append(f"{language} {kind}.{name}")


sync = [e2b.Sandbox, Commands, CommandHandle, Pty, Filesystem, WatchHandle, Git, e2b.Template, TemplateBuilder, e2b.Volume, e2b.Secret]
sync += [e2b.SandboxPaginator, e2b.SnapshotPaginator]
for kind in sync:
    check("Python", kind.__name__, of_python(kind), everything)
aio = [e2b.AsyncSandbox, AsyncCommands, AsyncCommandHandle, AsyncPty, AsyncFilesystem, AsyncWatchHandle, AsyncGit]
aio += [e2b.AsyncTemplate, e2b.AsyncVolume, e2b.AsyncSecret, e2b.AsyncSandboxPaginator]
for kind in aio:
    check("asynchronous Python", kind.__name__, of_python(kind), asynchronous)
declarations = (sdks / "node/node_modules/e2b/dist/index.d.ts").read_text()
for kind in ["Sandbox", "Commands", "CommandHandle", "Pty", "Filesystem", "WatchHandle", "Git", "TemplateBase", "Volume", "Secret"]:
    check("JavaScript", kind, of_javascript(kind, declarations), text("*.mjs"))
if missing:
    print("\n".join(missing))
    sys.exit(f"{len(missing)} methods are neither called in {here} nor named in {document}")
