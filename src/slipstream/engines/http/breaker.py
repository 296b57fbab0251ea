"""When an endpoint may be asked: it is not hammered while it is down, nor before the time that it has named.

    closed ──LIMIT failures in a row──▶ open ──a pause──▶ one call goes, to see ──success──▶ closed
                                         ▲                          │
                                         └─── a longer pause ◀──failure

Calls that come meanwhile wait, but not for ever: after OUTAGE they hear what is wrong. Whoever asked may come back, so
an outage costs time and no group, until the tries of the pipeline have an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from slipstream.errors import EndpointError

LIMIT = 5
"""Failures in a row that are an outage."""
PAUSES = (1.0, 30.0)
"""Seconds before the first look whether it is over, and at most between two."""
OUTAGE = 120.0
"""Seconds that one call waits for the end of an outage."""
SPREAD = 0.2
"""Seconds over which those who waited for the same moment come."""


class Unavailable(Exception):
    """One request was not answered. `down`: that speaks for an outage. `again`: the next may well be."""

    def __init__(self, what: str, *, down: bool = True, again: bool = True, after: float = 0.0) -> None:
        super().__init__(what)
        self.down, self.again, self.after = down, again, after


class Breaker:
    def __init__(self, where: str) -> None:
        self.where = where
        self.failures, self.cause, self.since = 0, "", 0.0
        """In a row, why the last, and when the first."""
        self.probing, self.pause = False, PAUSES[0]
        self.earliest = 0.0
        """Nothing is asked before."""
        self.changed = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.failures >= LIMIT

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait until a request may go, and watch how it ends."""
        probe = await self._admitted()
        try:
            yield
        except Unavailable as error:
            self._hold(error.after)
            if error.down:
                self._failed(str(error), probe)
            else:
                self._fine()
            raise
        except EndpointError:  # it has answered, whatever it was
            self._fine()
            raise
        else:
            self._fine()
        finally:
            if probe:
                self.probing = False
                self.changed.set()

    async def _admitted(self) -> bool:
        """Whether this request is the one that goes to see."""
        now = asyncio.get_running_loop().time
        began = now()
        while self.open or now() < self.earliest:
            if self.open and not self.probing and now() >= self.earliest:
                self.probing = True
                return True
            if now() - began >= OUTAGE:
                down = f"has been down for {now() - self.since:.0f} s: it {self.cause}"
                busy = f"asks to wait for another {self.earliest - now():.0f} s"
                raise EndpointError(f"{self.where} {down if self.open else busy}")
            until = began + OUTAGE
            if now() < self.earliest:
                until = min(until, self.earliest + random.uniform(0, SPREAD))
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), until - now())
        return False

    def _hold(self, seconds: float) -> None:
        if seconds > 0:
            self.earliest = max(self.earliest, asyncio.get_running_loop().time() + seconds)

    def _failed(self, cause: str, probe: bool) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if probe:
            self.pause = min(2 * self.pause, PAUSES[1])
        if probe or self.failures == LIMIT:
            self._hold(self.pause)

    def _fine(self) -> None:
        self.failures, self.pause = 0, PAUSES[0]
        self.changed.set()
