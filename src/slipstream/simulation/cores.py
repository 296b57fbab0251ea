"""Work that shares cores, on the clock of the event loop: as many pieces as there are cores go at full speed, more of
them share evenly.

Because all who work are served at the same rate, one clock of service is enough: it goes as fast as each of them does,
and a piece of work ends when that clock has advanced by its seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

ROUNDING = 1e-9
"""Seconds that are none."""


@dataclass(order=True)
class Work:
    end: float
    """On the clock of service."""
    number: int
    done: Callable[[], None] = field(compare=False)
    wide: float = field(compare=False)
    """How many cores it would keep busy."""
    began: float = field(compare=False)
    over: bool = field(default=False, compare=False)


class Cores:
    def __init__(self, count: float = math.inf, *, others: float = 0.0) -> None:
        """`others` is how many strangers work on the same cores all the time."""
        self.count, self.others = count, others
        self.wide = 0.0
        """Cores that are asked for now."""
        self.done = 0.0
        """Seconds of work, of every core that it kept busy, that have ended."""
        self.served = self.at = 0.0
        """What the clock of service showed at some time of the loop."""
        self.works: list[Work] = []
        self.number = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float:
        """Seconds of work that each does in a second."""
        return min(1.0, self.count / (self.wide + self.others)) if self.wide else 1.0

    def time(self) -> float:
        """The clock of service."""
        now = asyncio.get_running_loop().time()
        self.served = now if math.isinf(self.count) else self.served + (now - self.at) * self.rate
        self.at = now
        return self.served

    def begin(self, seconds: float, done: Callable[[], None], *, wide: float = 1.0) -> Work:
        """`done` is called when so many seconds of work are done."""
        now = self.time()
        work = Work(now + seconds, self.number, done, wide, now)
        self.number += 1
        self.wide += wide
        heapq.heappush(self.works, work)
        self._set()
        return work

    def cancel(self, work: Work) -> None:
        if not work.over:
            self.time()
            self._over(work)
            self._set()

    async def work(self, seconds: float, *, wide: float = 1.0) -> None:
        done = asyncio.Event()
        work = self.begin(seconds, done.set, wide=wide)
        try:
            await done.wait()
        finally:
            self.cancel(work)

    def _over(self, work: Work) -> None:
        work.over = True
        self.wide -= work.wide
        self.done += work.wide * (self.served - work.began)

    def _set(self) -> None:
        """Wake up when the next work ends."""
        if self.timer:
            self.timer.cancel()
            self.timer = None
        while self.works and self.works[0].over:
            heapq.heappop(self.works)
        if self.works:
            seconds = max(0.0, self.works[0].end - self.served) / self.rate
            self.timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        served, ended = self.time() + ROUNDING, list[Work]()
        while self.works and (self.works[0].over or self.works[0].end <= served):
            work = heapq.heappop(self.works)
            if not work.over:
                self._over(work)
                ended.append(work)
        self.timer = None
        self._set()
        for work in ended:
            work.done()
