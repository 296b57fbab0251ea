"""Simulated work that shares CPU cores, timed by the clock of the event loop.

Work runs at full speed while there are enough cores. If there are too few, all pieces of work slow down equally. One
service clock is enough: it advances at that common speed. Work ends when the clock has advanced by the work's seconds.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

CLOCK_ROUNDING = 1e-9
"""Rounding error of the clocks in seconds; smaller differences count as 0."""


@dataclass(order=True)
class Work:
    end: float
    """Time on the service clock at which the work ends."""
    number: int
    done: Callable[[], None] = field(compare=False)
    wide: float = field(compare=False)
    """Number of cores that the work keeps busy."""
    began: float = field(compare=False)
    over: bool = field(default=False, compare=False)


class Cores:
    def __init__(self, count: float = math.inf, *, others: float = 0.0) -> None:
        """Create `count` cores; `others` is the number of cores that other programs keep busy all the time."""
        self.count, self.others = count, others
        self.wide = 0.0
        """Number of cores that the running work needs."""
        self.done = 0.0
        """Core-seconds of work that has ended."""
        self.served = self.at = 0.0
        """The service clock showed `served` at the event loop's time `at`."""
        self.works: list[Work] = []
        self.number = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float:
        """Speed of the service clock: seconds by which it advances in one second of the event loop."""
        return min(1.0, self.count / (self.wide + self.others)) if self.wide else 1.0

    def time(self) -> float:
        """Return the time of the service clock, after advancing it to now."""
        now = asyncio.get_running_loop().time()
        self.served = now if math.isinf(self.count) else self.served + (now - self.at) * self.rate
        self.at = now
        return self.served

    def begin(self, seconds: float, done: Callable[[], None], *, wide: float = 1.0) -> Work:
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
        if self.timer:
            self.timer.cancel()
            self.timer = None
        while self.works and self.works[0].over:
            heapq.heappop(self.works)
        if self.works:
            seconds = max(0.0, self.works[0].end - self.served) / self.rate
            self.timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        served, ended = self.time() + CLOCK_ROUNDING, list[Work]()
        while self.works and (self.works[0].over or self.works[0].end <= served):
            work = heapq.heappop(self.works)
            if not work.over:
                self._over(work)
                ended.append(work)
        self.timer = None
        self._set()
        for work in ended:
            work.done()
