"""Engines that use the same devices in turn: whoever waits has its weights and states in host memory.

A turn begins when no call of another holder runs. During a turn further calls of the holder begin at once, so a
schedule must not let stages overlap. In one process every engine is a holder. Among processes all samplers of the
student are one holder, and all ranks of the learner another.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol


class Holder(Protocol):
    """One or several engines whose tensors are on the devices during their turn."""

    async def offload(self) -> None: ...

    async def reload(self) -> None: ...


class TimeShare:
    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.holder: Holder | None = None
        """Holder whose tensors are on the devices; None while tensors move, and after a move that failed."""
        self.calls: set[asyncio.Future[None]] = set()
        """Calls of the holder that run now."""
        self.moving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, holder: Holder) -> AsyncIterator[None]:
        await self._begin(holder)
        call = asyncio.get_running_loop().create_future()
        self.calls.add(call)
        try:
            yield
        finally:
            self.calls.remove(call)
            call.set_result(None)

    async def _begin(self, holder: Holder) -> None:
        """Wait until this holder may work, and its tensors are on the devices."""
        while self.holder is not holder:
            if self.moving is not None and not self.moving.done():
                await asyncio.wait([self.moving])
            elif self.calls:
                await asyncio.wait(self.calls)
            else:
                self.holder, self.moving = None, asyncio.create_task(self._move(holder))
                await asyncio.wait([self.moving])  # if this call is cancelled, the move still ends
                self.moving.result()

    async def _move(self, holder: Holder) -> None:
        for other in self.holders:
            if other is not holder:
                await other.offload()
        await holder.reload()
        self.holder = holder
