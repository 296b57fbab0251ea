"""Whoever is asked and does not answer is named after ten seconds, long before anything gives up on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 10.0
"""Seconds without an answer after which a person is told; then twice as many, and so on."""


class Silence:
    """Of one who is asked many things at a time: any answer ends it."""

    def __init__(self, who: str, say: Callable[[str], None]) -> None:
        self.who, self.say = who, say
        self.asked, self.since, self.told = 0, 0.0, 0.0
        """Questions that are open, when the silence began, and after how long it was last told."""
        self.timer: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While an answer is awaited."""
        if not self.asked:
            self._begin()
        self.asked += 1
        try:
            yield
            if self.told:
                seconds = asyncio.get_running_loop().time() - self.since
                self.say(f"{self.who} is no longer silent, after {seconds:.0f} s")
        finally:
            self.asked -= 1
            self._ended()

    def _begin(self) -> None:
        self.since, self.told = asyncio.get_running_loop().time(), 0.0
        self._wake(FIRST)

    def _wake(self, seconds: float) -> None:
        self.timer = asyncio.get_running_loop().call_later(seconds, self._tell)

    def _tell(self) -> None:
        self.told = asyncio.get_running_loop().time() - self.since
        self.say(f"{self.who} has not answered for {self.told:.0f} s ({self.asked} asked and waiting)")
        self._wake(self.told)

    def _ended(self) -> None:
        self.told = 0.0
        if self.timer is not None:
            self.timer.cancel()
        if self.asked:
            self._begin()
