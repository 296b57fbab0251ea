"""Warnings about an endpoint that does not answer, from ten seconds on, long before any request times out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 10.0
"""Seconds without an answer until the first warning; the time doubles with each further warning."""


class ResponseWatch:
    """Timer of an endpoint's silence: runs while requests are open, and starts again after each answer."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.open_requests, self.since, self.warned = 0, 0.0, 0.0
        """Number of open requests, start of the silence, and seconds of silence at the last warning (0: none yet)."""
        self.timer: asyncio.TimerHandle

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if not self.open_requests:
            self._start_timer()
        self.open_requests += 1
        try:
            yield
            if self.warned:
                seconds = asyncio.get_running_loop().time() - self.since
                self.say(f"{self.name} answers again after {seconds:.0f} s")
        finally:
            self.open_requests -= 1
            self.timer.cancel()
            if self.open_requests:
                self._start_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self.since, self.warned = loop.time(), 0.0
        self.timer = loop.call_later(FIRST, self._warn)

    def _warn(self) -> None:
        loop = asyncio.get_running_loop()
        self.warned = loop.time() - self.since
        self.say(f"{self.name} has not answered for {self.warned:.0f} s ({self.open_requests} requests are open)")
        self.timer = loop.call_later(self.warned, self._warn)
