"""Contexts: each a kernel with a language and a working directory, in which one piece of code runs at a time."""

import asyncio
import os
import sys
import uuid
from contextlib import aclosing

import languages
import outputs

HOME = os.path.expanduser("~")


class Context:
    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self.kernel = None
        self.turn = asyncio.Lock()
        self.starting = asyncio.Lock()
        self.removed = False

    def view(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def ready(self):
        """The kernel, which is started anew if it is gone."""
        async with self.starting:
            if self.kernel is None or self.kernel.ended():
                if self.kernel is not None:
                    await self.kernel.end()
                self.kernel = await languages.start(self.language, self.cwd)
            return self.kernel

    async def execute(self, code, env):
        async with self.turn:
            if self.removed:
                yield outputs.failure("ContextRemoved", "the context was removed before its turn came")
                return
            kernel = await self.ready()
            async with aclosing(kernel.execute(code, env)) as said:
                async for output in said:
                    yield output

    async def restart(self):
        """Whatever runs is told that its kernel ended."""
        async with self.starting:
            if self.kernel is not None:
                await self.kernel.end()
                self.kernel = None
        await self.ready()

    async def end(self):
        self.removed = True
        async with self.starting:
            if self.kernel is not None:
                await self.kernel.end()


class Contexts:
    def __init__(self, refused):
        self.refused = refused
        self.by_id = {}
        self.defaults = {}
        self.background = set()

    def warm_up(self):
        """Most clients want Python first, and its kernel takes a second to start."""
        task = asyncio.create_task(self.default("python").ready())
        self.background.add(task)
        task.add_done_callback(self.warmed_up)

    def warmed_up(self, task):
        self.background.discard(task)
        if not task.cancelled() and task.exception():
            print(f"the default kernel does not start: {task.exception()!r}", file=sys.stderr, flush=True)

    def all(self):
        return list(self.by_id.values())

    def find(self, id):
        if context := self.by_id.get(id):
            return context
        raise self.refused(404, f"there is no context {id}")

    def add(self, language, cwd):
        context = Context(language, cwd)
        self.by_id[context.id] = context
        return context

    def default(self, language):
        language = self.known(language)
        if language not in self.defaults:
            self.defaults[language] = self.add(language, HOME).id
        return self.by_id[self.defaults[language]]

    async def create(self, language, cwd):
        language, cwd = self.known(language), cwd or HOME
        if not isinstance(cwd, str) or not os.path.isdir(cwd):
            raise self.refused(400, f"there is no directory {cwd}")
        context = self.add(language, cwd)
        try:
            await context.ready()
        except BaseException:
            await self.remove(context.id)
            raise
        return context

    async def remove(self, id):
        context = self.find(id)
        del self.by_id[id]
        if self.defaults.get(context.language) == id:
            del self.defaults[context.language]
        await context.end()

    def known(self, language):
        name = languages.named(language or "python")
        if name is None:
            raise self.refused(400, f"{language!r} is none of the languages here: {', '.join(languages.NAMES)}")
        return name
