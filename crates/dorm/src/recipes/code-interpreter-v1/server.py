"""The code interpreter of a box: runs code in kernels, one for each context, and streams what they say.

    POST   /execute                 {code, context_id?, language?, env_vars?} -> lines of JSON
    POST   /contexts                {language?, cwd?} -> {id, language, cwd}
    GET    /contexts                -> [{id, language, cwd}]
    DELETE /contexts/ID
    POST   /contexts/ID/restart
    GET    /health

It listens before anything else is loaded, so that a box is reachable at once. Whoever goes away while his code runs has it interrupted,
and the context is free for the next one. Code whose client was cut off by a sleep on disk goes on.
"""

import asyncio
import json
import os
import signal
import socket
import sys

PORT = 49999
MOST_HEADERS = 64 << 10
MOST_BODY = 64 << 20
# Proxies and clients give up on a stream that says nothing for long.
KEEPALIVE = 15
REASONS = {200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
           413: "Content Too Large", 500: "Internal Server Error"}


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Exchange:
    """One request and its answer. A connection has no second one."""

    def __init__(self, reader, writer, incarnation):
        self.reader = reader
        self.writer = writer
        self.incarnation = incarnation
        self.born = incarnation()
        self.begun = False

    def cut_off(self):
        """Whether the connection went with the memory of before a sleep on disk, and not by its client."""
        return self.incarnation() != self.born

    async def read(self):
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(413, "the headers are too long") from None
        lines = head.decode("latin-1").split("\r\n")
        try:
            method, target, _ = lines[0].split(" ")
            headers = {name.strip().lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:] if line)}
        except ValueError:
            raise Refused(400, "this is not HTTP") from None
        return method, target.split("?", 1)[0], await self.body(headers)

    async def body(self, headers):
        if "chunked" in headers.get("transfer-encoding", "").lower():
            parts, total = [], 0
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                total = self.bounded(total + size)
                parts.append(await self.reader.readexactly(size))
                await self.reader.readline()
            while (await self.reader.readline()).strip():
                pass
            return b"".join(parts)
        return await self.reader.readexactly(self.bounded(int(headers.get("content-length") or 0)))

    @staticmethod
    def bounded(size):
        if not 0 <= size <= MOST_BODY:
            raise Refused(413, f"a request may have {MOST_BODY >> 20} MiB")
        return size

    def answer(self, status, value=None):
        body = b"" if value is None else json.dumps(value).encode()
        self.head(status, "application/json", f"Content-Length: {len(body)}\r\n")
        self.writer.write(body)

    def head(self, status, kind, more):
        self.begun = True
        self.writer.write(f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n{more}Connection: close\r\n\r\n".encode())

    async def line(self, value):
        if not self.begun:
            self.head(200, "application/x-ndjson", "Transfer-Encoding: chunked\r\n")
        # ASCII, as there are clients that decode piece by piece.
        line = json.dumps(value).encode() + b"\n"
        if self.cut_off():
            return
        try:
            self.writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await self.writer.drain()
        except OSError:
            if not self.cut_off():
                raise

    def end(self):
        self.writer.write(b"0\r\n\r\n")

    async def gone(self):
        """Returns when the connection has ended."""
        try:
            while await self.reader.read(4096):
                pass
        except OSError:
            pass


class Server:
    def __init__(self, listener):
        self.listener = listener
        self.contexts = None
        self.loaded = asyncio.Event()

    def load(self):
        """The rest of the program, which takes longer to import than a client likes to wait for a port."""
        from contexts import Contexts

        self.contexts = Contexts(Refused)
        self.loaded.set()
        self.contexts.warm_up()

    def incarnation(self):
        """Another one after each sleep on disk, from which sockets come back as new ones."""
        return os.fstat(self.listener.fileno()).st_ino

    async def serve(self, reader, writer):
        exchange = Exchange(reader, writer, self.incarnation)
        try:
            method, path, body = await exchange.read()
            await self.loaded.wait()
            await self.route(exchange, method, path, body)
            await writer.drain()
        except Refused as refused:
            if not exchange.begun:
                exchange.answer(refused.status, {"code": refused.status, "message": str(refused)})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as error:
            print(f"a request failed: {error!r}", file=sys.stderr, flush=True)
            if not exchange.begun:
                exchange.answer(500, {"code": 500, "message": str(error) or repr(error)})
        finally:
            writer.close()

    async def route(self, exchange, method, path, body):
        parts = [part for part in path.split("/") if part]
        match method, parts:
            case "GET", ["health"]:
                exchange.answer(200, "OK")
            case "POST", ["execute"]:
                await self.execute(exchange, parse(body))
            case "GET", ["contexts"]:
                exchange.answer(200, [context.view() for context in self.contexts.all()])
            case "POST", ["contexts"]:
                wanted = parse(body)
                context = await self.contexts.create(wanted.get("language"), wanted.get("cwd"))
                exchange.answer(201, context.view())
            case "DELETE", ["contexts", id]:
                await self.contexts.remove(id)
                exchange.answer(204)
            case "POST", ["contexts", id, "restart"]:
                await self.contexts.find(id).restart()
                exchange.answer(200, self.contexts.find(id).view())
            case _, ["health"] | ["execute"] | ["contexts"] | ["contexts", _] | ["contexts", _, "restart"]:
                raise Refused(405, f"{method} is not for {path}")
            case _:
                raise Refused(404, f"there is nothing at {path}")

    async def execute(self, exchange, wanted):
        code, env = wanted.get("code"), wanted.get("env_vars") or {}
        if not isinstance(code, str):
            raise Refused(400, "`code` is missing")
        if not isinstance(env, dict) or not all(isinstance(part, str) for pair in env.items() for part in pair):
            raise Refused(400, "`env_vars` must be an object of strings")
        if wanted.get("context_id") and wanted.get("language"):
            raise Refused(400, "give either `context_id` or `language`")
        if wanted.get("context_id"):
            context = self.contexts.find(wanted["context_id"])
        else:
            context = self.contexts.default(wanted.get("language"))
        running = asyncio.create_task(self.stream(exchange, context.execute(code, env)))
        gone = asyncio.create_task(exchange.gone())
        await asyncio.wait([running, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not running.done() and not exchange.cut_off():
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            raise ConnectionError("the client has gone") from None

    async def stream(self, exchange, outputs):
        following = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(outputs, None))
                done, _ = await asyncio.wait([following], timeout=KEEPALIVE)
                if not done:
                    await exchange.line({"type": "keepalive"})
                    continue
                output, following = following.result(), None
                if output is None:
                    break
                await exchange.line(output)
            await exchange.line({"type": "end_of_execution"})
            exchange.end()
        finally:
            if following:
                following.cancel()
                await asyncio.wait([following])
            await outputs.aclose()


def parse(body):
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is not an object")
    return value


def listener():
    try:
        both = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    except OSError:
        both = socket.create_server(("0.0.0.0", PORT), backlog=256)
    return both


async def main():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # Kernels are interrupted by it, also if whoever started this program ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sock = listener()
    server = Server(sock)
    listening = await asyncio.start_server(server.serve, sock=sock, limit=MOST_HEADERS)
    server.load()
    async with listening:
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
