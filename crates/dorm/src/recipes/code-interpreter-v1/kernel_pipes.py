"""Kernels that are programs of their own, spoken to over pipes: Node with `kernel.js`, and bash."""

import asyncio
import codecs
import json
import os
import shlex
import signal
import subprocess
from contextlib import aclosing

import outputs
from backlog import Backlog

START_LIMIT = 60
STOP_TRIES = 20
STOP_WAIT = 0.5
PIECE = 64 << 10


class PipeKernel:
    """What it prints comes by its own pipes, and its answers by another; they end with one that says so."""

    def __init__(self):
        self.process = None
        self.open = False
        self.readers = {}
        self.rest = b""
        # Where what is said goes. While nothing runs, nobody hears it.
        self.said = None
        self.executions = 0

    @classmethod
    async def start(cls, cwd, **how):
        kernel = cls()
        try:
            kernel.spawn(cwd, **how)
            async with asyncio.timeout(START_LIMIT):
                async for output in kernel.run("", {}):
                    if output["type"] == "error":
                        raise RuntimeError(output["value"])
        except BaseException:
            await kernel.end()
            raise
        return kernel

    def spawn(self, cwd, **how):
        commands, self.commands = os.pipe()
        self.answers, answering = os.pipe()
        try:
            self.process = subprocess.Popen(cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(commands, answering),
                                            start_new_session=True, **self.program(commands, answering, **how))
        finally:
            os.close(commands)
            os.close(answering)
        os.set_blocking(self.commands, False)
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        self.readers = {out: self.stream_reader("stdout"), err: self.stream_reader("stderr"), self.answers: self.read_answer}
        for descriptor in self.readers:
            os.set_blocking(descriptor, False)
        self.open = True
        self.listen()

    def listen(self):
        for descriptor in self.readers:
            asyncio.get_running_loop().add_reader(descriptor, self.read, descriptor)

    def hold(self):
        """The pipes fill, and the kernel waits."""
        for descriptor in self.readers:
            asyncio.get_running_loop().remove_reader(descriptor)

    def ended(self):
        return self.process.poll() is not None

    async def end(self):
        if self.process is None:
            return
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.open:
            self.open = False
            self.hold()
            self.readers = {}
            self.process.stdout.close()
            self.process.stderr.close()
            os.close(self.answers)
            os.close(self.commands)
        self.say(None)

    def say(self, output):
        if self.said is not None:
            texts = output.values() if isinstance(output, dict) else []
            self.said.put(output, sum(len(text) for text in texts if isinstance(text, str)))

    def read(self, descriptor):
        """One piece at a time: there are others to serve, and what fills the pipe may never end."""
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return
        if data:
            self.readers[descriptor](data)
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        del self.readers[descriptor]
        if descriptor == self.answers:
            self.process.wait()
            self.say(None)

    def stream_reader(self, name):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def take(data):
            if text := decoder.decode(data):
                self.say(outputs.stream(name, text))

        return take

    def read_answer(self, data):
        *answers, self.rest = (self.rest + data).split(self.separator)
        for answer in answers:
            self.take(answer)

    def finish(self):
        """What was printed is in the pipes by now, and a piece is as much as one holds."""
        for descriptor in list(self.readers):
            if descriptor != self.answers:
                self.read(descriptor)
        self.say("finished")

    async def send(self, data):
        while data:
            try:
                data = data[os.write(self.commands, data):]
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except BrokenPipeError:
                return

    async def execute(self, code, env):
        self.executions += 1
        yield outputs.count(self.executions)
        async with aclosing(self.run(code, env)) as said:
            async for output in said:
                yield output

    async def run(self, code, env):
        said = self.said = Backlog(self.hold, self.listen)
        output = None
        try:
            await self.command(code, env)
            if self.ended():
                said.put(None)
            while (output := await said.get()) not in (None, "finished"):
                yield output
            if output is None:
                yield outputs.kernel_ended(self.process.poll())
        except (asyncio.CancelledError, GeneratorExit):
            await self.stop(said)
            raise
        finally:
            self.said = None
            said.release()

    async def stop(self, said):
        """Interrupts what runs, and makes an end of a kernel that does not care."""
        for _ in range(STOP_TRIES):
            if self.ended():
                return
            # Again and again: what has not begun yet does not notice.
            os.killpg(self.process.pid, signal.SIGINT)
            await self.interrupted()
            try:
                async with asyncio.timeout(STOP_WAIT):
                    while await said.get() not in (None, "finished"):
                        pass
                    return
            except TimeoutError:
                pass
        await self.end()


class NodeKernel(PipeKernel):
    separator = b"\n"

    def program(self, commands, answers, script, language):
        command = ["node", "--disable-warning=ExperimentalWarning", "--no-memory-protection-keys", script, language, str(commands), str(answers)]
        return {"args": command, "stdin": subprocess.DEVNULL}

    async def command(self, code, env):
        await self.send(json.dumps({"type": "execute", "code": code, "env": env, "number": self.executions}).encode() + b"\n")

    async def interrupted(self):
        await self.send(json.dumps({"type": "interrupt", "number": self.executions}).encode() + b"\n")

    def take(self, answer):
        answer = json.loads(answer)
        match answer["type"]:
            case "result":
                self.say(outputs.result(answer["data"], answer["main"]))
            case "error":
                self.say(outputs.failure(answer["name"], answer["value"], answer["traceback"]))
            case "end":
                self.finish()


class BashKernel(PipeKernel):
    """An interactive bash, since that one comes back to its prompt when it is interrupted."""

    separator = b"\0"

    def program(self, commands, answers):
        self.answering = answers
        quiet = {**os.environ, "PS1": "", "PS2": "", "PROMPT_COMMAND": ""}
        return {"args": ["bash", "--norc", "--noprofile", "--noediting", "-i"], "stdin": commands, "env": quiet}

    async def command(self, code, env):
        names = [name for name in env if name.isidentifier()]
        before = "".join(f"export {name}={shlex.quote(env[name])}; " for name in names)
        kept = [f"export {name}={shlex.quote(os.environ[name])}" if name in os.environ else f"unset {name}" for name in names]
        self.after = "".join(f"; {line}" for line in [*kept, f"printf '%s %s\\0' {self.executions} $status >&{self.answering}"])
        line = f"{before}eval {shlex.quote(code)} </dev/null; status=$?{self.after}\n"
        await self.send(line.encode())

    async def interrupted(self):
        await self.send(f"status=130{self.after}\n".encode())

    def take(self, answer):
        number, status = answer.decode().split()
        if int(number) != self.executions:
            return
        if status != "0":
            self.say(outputs.failure("ExitStatus", status))
        self.finish()
