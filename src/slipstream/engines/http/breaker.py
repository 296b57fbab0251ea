"""Circuit breaker of an endpoint: no requests during an outage, or before the time in a Retry-After header.

    closed ──LIMIT failures in a row──▶ open ──pause──▶ one probe request ──success──▶ closed
                                         ▲                      │
                                         └─ longer pause ◀───failure

Other calls wait during an outage. After OUTAGE seconds they raise the error. The pipeline then retries the group, so an
outage costs time but no group, until the retries of the pipeline are used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from slipstream.errors import EndpointError

LIMIT = 5
"""Number of failures in a row that counts as an outage."""
PAUSES = (1.0, 30.0)
"""Seconds before the first probe request, and maximum seconds between two probe requests."""
OUTAGE = 120.0
"""Maximum seconds that a call waits for the end of an outage."""
SPREAD = 0.2
"""Seconds over which all calls that wait for `Breaker.earliest` are randomly spread."""


class Unavailable(Exception):
    """Failure of one request: `down` counts towards an outage, `again` permits a retry after `after` seconds."""

    def __init__(self, what: str, *, down: bool = True, again: bool = True, after: float = 0.0) -> None:
        super().__init__(what)
        self.down, self.again, self.after = down, again, after


class Breaker:
    def __init__(self, where: str) -> None:
        self.where = where
        self.failures, self.cause, self.since = 0, "", 0.0
        """Number of failures in a row, cause of the latest failure, and time of the first."""
        self.probing, self.pause = False, PAUSES[0]
        self.earliest = 0.0
        """Time before which no request is sent."""
        self.changed = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.failures >= LIMIT

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait until a request may be sent, and record its success or failure."""
        probe = await self._admitted()
        try:
            yield
        except Unavailable as error:
            self._delay(error.after)
            if error.down:
                self._count_failure(str(error), probe)
            else:
                self._reset()
            raise
        except EndpointError:  # the endpoint has answered, so there is no outage
            self._reset()
            raise
        else:
            self._reset()
        finally:
            if probe:
                self.probing = False
                self.changed.set()

    async def _admitted(self) -> bool:
        """Wait until a request may be sent; return true if it is the probe request of an outage."""
        now = asyncio.get_running_loop().time
        began = now()
        while self.open or now() < self.earliest:
            if self.open and not self.probing and now() >= self.earliest:
                self.probing = True
                return True
            if now() - began >= OUTAGE:
                down = f"has been down for {now() - self.since:.0f} s: it {self.cause}"
                busy = f"asks to wait another {self.earliest - now():.0f} s"
                raise EndpointError(f"{self.where} {down if self.open else busy}")
            until = began + OUTAGE
            if now() < self.earliest:
                until = min(until, self.earliest + random.uniform(0, SPREAD))
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), until - now())
        return False

    def _delay(self, seconds: float) -> None:
        if seconds > 0:
            self.earliest = max(self.earliest, asyncio.get_running_loop().time() + seconds)

    def _count_failure(self, cause: str, probe: bool) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if probe:
            self.pause = min(2 * self.pause, PAUSES[1])
        if probe or self.failures == LIMIT:
            self._delay(self.pause)

    def _reset(self) -> None:
        self.failures, self.pause = 0, PAUSES[0]
        self.changed.set()
