"""IPython's kernel, spoken to over unix sockets: unlike TCP connections, they are still there when the box has slept on disk."""

import asyncio
import hashlib
import hmac
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from contextlib import aclosing

import zmq
import zmq.asyncio

import outputs
from backlog import Backlog

START_LIMIT = 120
REPLY_LIMIT = 2
INTERRUPT_AGAIN = 1
DELIMITER = b"<IDS|MSG>"
CONTEXT = zmq.asyncio.Context()


class KernelEnded(Exception):
    pass


class IPythonKernel:
    def __init__(self, folder):
        self.folder = folder
        self.key = uuid.uuid4().hex
        self.session = uuid.uuid4().hex
        self.process = None
        self.sockets = []
        self.tasks = []
        # What has to do with a request goes to whoever made it.
        self.waiting = {}

    @classmethod
    async def start(cls, command, cwd):
        kernel = cls(tempfile.mkdtemp(prefix="kernel-"))
        try:
            kernel.spawn(command, cwd)
            await asyncio.wait_for(kernel.greet(), START_LIMIT)
        except BaseException:
            await kernel.end()
            raise
        return kernel

    def spawn(self, command, cwd):
        ports = {f"{name}_port": number for number, name in enumerate(["shell", "iopub", "stdin", "control", "hb"], 1)}
        prefix = os.path.join(self.folder, "socket")
        connection = {"transport": "ipc", "ip": prefix, "key": self.key, "signature_scheme": "hmac-sha256", **ports}
        path = os.path.join(self.folder, "connection.json")
        with open(path, "w") as file:
            json.dump(connection, file)
        # It ends when the server does.
        env = {**os.environ, "JPY_PARENT_PID": str(os.getpid())}
        self.process = subprocess.Popen([*command, "-f", path], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        start_new_session=True)
        self.shell = self.socket(zmq.DEALER, f"ipc://{prefix}-{ports['shell_port']}")
        self.iopub = self.socket(zmq.SUB, f"ipc://{prefix}-{ports['iopub_port']}")
        self.iopub.subscribe(b"")
        self.tasks = [asyncio.create_task(self.read(self.shell)), asyncio.create_task(self.read(self.iopub)),
                      asyncio.create_task(self.watch())]

    def socket(self, kind, address):
        socket = CONTEXT.socket(kind)
        socket.linger = 0
        # A kernel drops what it cannot send, and with it perhaps the end of what it says: it is slowed down by `hold` instead.
        socket.rcvhwm = socket.sndhwm = 0
        socket.connect(address)
        self.sockets.append(socket)
        return socket

    async def greet(self):
        """Asks until the kernel is heard on both sockets: what is published before somebody has subscribed is lost."""
        replied = published = False
        while not (replied and published):
            id, said = self.request("kernel_info_request", {})
            try:
                async with asyncio.timeout(1):
                    while not (replied and published):
                        kind, _ = await self.next(said)
                        replied = replied or kind == "kernel_info_reply"
                        published = published or kind == "status"
            except TimeoutError:
                pass
            finally:
                self.forget(id)

    async def watch(self):
        """Tells all who wait when the process has ended. By a thread, as gVisor has no descriptors of processes."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wait():
            try:
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                pass
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, daemon=True).start()
        await ended.wait()
        self.process.wait()
        for said in self.waiting.values():
            said.put(None)

    def ended(self):
        return self.process.poll() is not None

    def hold(self):
        self.process.send_signal(signal.SIGSTOP)

    def let_go(self):
        self.process.send_signal(signal.SIGCONT)

    def forget(self, id):
        self.waiting.pop(id).release()

    async def end(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for said in self.waiting.values():
            said.put(None)
        for task in self.tasks:
            task.cancel()
        for socket in self.sockets:
            socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def request(self, kind, content):
        """Gives the id of the request, and what the kernel says to it."""
        id = uuid.uuid4().hex
        header = {"msg_id": id, "session": self.session, "username": "user", "msg_type": kind, "version": "5.3",
                  "date": "1970-01-01T00:00:00Z"}
        parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
        said = self.waiting[id] = Backlog(self.hold, self.let_go)
        self.shell.send_multipart([DELIMITER, self.sign(parts), *parts])
        if self.ended():
            said.put(None)
        return id, said

    def sign(self, parts):
        return hmac.new(self.key.encode(), b"".join(parts), hashlib.sha256).hexdigest().encode()

    async def read(self, socket):
        while True:
            message = await socket.recv_multipart()
            if DELIMITER not in message:
                continue
            signature, *parts = message[message.index(DELIMITER) + 1:][:5]
            if not hmac.compare_digest(signature, self.sign(parts)):
                continue
            header, parent, _, content = (json.loads(part) for part in parts)
            if said := self.waiting.get(parent.get("msg_id")):
                said.put((header["msg_type"], content), sum(map(len, parts)))

    async def next(self, said):
        message = await said.get()
        if message is None:
            raise KernelEnded
        return message

    async def silently(self, code):
        id, said = self.request("execute_request", {"code": code, "silent": True, "store_history": False, "allow_stdin": False})
        try:
            while (await self.next(said))[0] != "execute_reply":
                pass
        finally:
            self.forget(id)

    async def execute(self, code, env):
        try:
            if env:
                await self.silently(f"get_ipython().enter_env({env!r})")
            try:
                async with aclosing(self.say(code)) as said:
                    async for output in said:
                        yield output
            finally:
                if env and not self.ended():
                    await self.silently("get_ipython().leave_env()")
        except KernelEnded:
            yield outputs.kernel_ended(self.process.poll())

    async def say(self, code):
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False, "stop_on_error": False}
        id, said = self.request("execute_request", content)
        progress = Progress()
        try:
            while not progress.finished():
                # The reply is on its way when the kernel is idle again, unless an interrupt has swallowed it.
                async with asyncio.timeout(REPLY_LIMIT if progress.idle else None):
                    message = await self.next(said)
                for output in progress.take(*message):
                    yield output
        except TimeoutError:
            pass
        finally:
            if not progress.idle and not self.ended():
                await self.interrupt(said, progress)
            self.forget(id)

    async def interrupt(self, said, progress):
        """Returns when nothing runs any more. What has not begun yet would not notice."""
        try:
            while not progress.begun and not progress.idle:
                progress.take(*await self.next(said))
            while not progress.idle:
                os.killpg(self.process.pid, signal.SIGINT)
                try:
                    async with asyncio.timeout(INTERRUPT_AGAIN):
                        while not progress.idle:
                            progress.take(*await self.next(said))
                except TimeoutError:
                    pass
        except (KernelEnded, ProcessLookupError):
            pass


class Progress:
    """How far one execution has come."""

    def __init__(self):
        self.begun = self.idle = self.replied = self.failed = False

    def finished(self):
        return self.idle and self.replied

    def take(self, kind, content):
        match kind:
            case "status":
                self.idle = content["execution_state"] == "idle"
            case "execute_input":
                self.begun = True
                return [outputs.count(content["execution_count"])]
            case "stream":
                return [outputs.stream(content["name"], content["text"])]
            case "display_data" | "execute_result":
                return [outputs.result(content["data"], kind == "execute_result")]
            case "error":
                return self.error(content)
            case "execute_reply":
                self.replied = True
                if content["status"] != "ok":
                    return self.error(content)
        return []

    def error(self, content):
        """A kernel may tell it where it publishes, where it replies, or at both."""
        if self.failed:
            return []
        self.failed = True
        traceback = "\n".join(content.get("traceback") or [])
        return [outputs.failure(content.get("ename") or "ExitStatus", content.get("evalue") or "", traceback)]
