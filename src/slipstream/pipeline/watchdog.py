"""Warnings about an endpoint that does not answer, from ten seconds on, long before any request times out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 10.0
"""Seconds without an answer until the first warning; the time doubles with each further warning."""


class ResponseWatch:
    """Timer of an endpoint's silence: runs while requests are open, and starts again after each answer."""

    def __init__(self, who: str, say: Callable[[str], None]) -> None:
        self.who, self.say = who, say
        self.asked, self.since, self.warned = 0, 0.0, 0.0
        """Number of open requests, start of the silence, and seconds of silence at the last warning (0: none yet)."""
        self.timer: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request as open while its answer is awaited."""
        if not self.asked:
            self._begin()
        self.asked += 1
        try:
            yield
            if self.warned:
                seconds = asyncio.get_running_loop().time() - self.since
                self.say(f"{self.who} answers again after {seconds:.0f} s")
        finally:
            self.asked -= 1
            self._answered()

    def _begin(self) -> None:
        self.since, self.warned = asyncio.get_running_loop().time(), 0.0
        self._warn_after(FIRST)

    def _warn_after(self, seconds: float) -> None:
        self.timer = asyncio.get_running_loop().call_later(seconds, self._warn)

    def _warn(self) -> None:
        self.warned = asyncio.get_running_loop().time() - self.since
        self.say(f"{self.who} has not answered for {self.warned:.0f} s ({self.asked} requests are open)")
        self._warn_after(self.warned)

    def _answered(self) -> None:
        self.warned = 0.0
        if self.timer is not None:
            self.timer.cancel()
        if self.asked:
            self._begin()
