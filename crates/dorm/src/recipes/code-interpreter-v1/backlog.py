"""What a kernel has said and its client has not taken yet. A kernel that says more than that has to wait: nobody could hold it all."""

import asyncio

MOST = 4 << 20


class Backlog:
    def __init__(self, hold, let_go):
        self.said = asyncio.Queue()
        self.size = 0
        self.held = False
        self.hold = hold
        self.let_go = let_go

    def put(self, message, size=0):
        self.said.put_nowait((message, size))
        self.size += size
        if self.size > MOST and not self.held:
            self.held = True
            self.hold()

    async def get(self):
        message, size = await self.said.get()
        self.size -= size
        if self.size <= MOST // 2:
            self.release()
        return message

    def release(self):
        if self.held:
            self.held = False
            self.let_go()
