"""The shipped table, whose tools take their time: log-normal, σ = 1, around SECONDS."""

import asyncio
import os
import random

from slipstream.environments.builtin import Table

SECONDS = float(os.environ.get("SECONDS", "0.1"))


class SlowTable(Table):
    def start(self, meta: dict[str, object], seed: int) -> None:  # type: ignore[override]
        super().start(meta)  # type: ignore[arg-type]
        self._random = random.Random(seed)

    async def _wait(self) -> None:
        await asyncio.sleep(SECONDS * self._random.lognormvariate(0, 1))

    async def get(self, key: str) -> str:  # type: ignore[override]
        """The number behind a key."""
        await self._wait()
        return super().get(key)

    async def add(self, a: int, b: int) -> str:  # type: ignore[override]
        """a + b."""
        await self._wait()
        return super().add(a, b)

    async def subtract(self, a: int, b: int) -> str:  # type: ignore[override]
        """a - b."""
        await self._wait()
        return super().subtract(a, b)
