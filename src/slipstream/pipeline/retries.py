"""Retries of failed calls. If all tries fail, the group is dropped; many failed tries in a row stop the run.

This layer retries the calls of whole groups, with pauses of seconds. An engine may retry a request at once by itself,
for example after a lost connection. The engine must raise soon, so that this layer can report the problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slipstream.errors import EndpointError, EngineError, SlipstreamError, first_line

T = TypeVar("T")
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries of a failing call."""
TRIES = len(PAUSES) + 1
DOWN = 3 * TRIES
"""Number of failed tries without a success after which the run stops: three groups with five tries each."""
DEFECTS = (TypeError, AttributeError, NameError, AssertionError)
"""Errors in the program itself: a retry cannot help, and the traceback is needed."""


def is_final(error: Exception) -> bool:
    """Return True if a repeated call cannot help. An engine may raise anything else for a failure that passes."""
    return isinstance(error, (SlipstreamError, *DEFECTS)) and not isinstance(error, EndpointError)


class GivenUp(Exception):
    """Raised for a call that failed at every try, or whose error a retry cannot fix."""


class Retries:
    """Retries, with growing pauses, of the calls to one stage or one teacher."""

    def __init__(self, stage: str, *, say: Callable[[str], None] = print) -> None:
        self.stage, self.say, self.in_vain = stage, say, 0
        """Number of failed tries of groups that were given up since the last success."""
        self.successes = 0
        self.failures, self.cause = 0, ""
        """Number of failed tries since the last success, and the cause of the last failure."""
        self.since = 0.0
        self.recovered = False
        """True if a call succeeded after a failed one; the code that reads this value sets it back to False."""

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        for pause in (*PAUSES, None):
            before = self.successes
            try:
                result = await work()
            except GivenUp as error:
                self._note(str(error))
                raise self._failed(1, str(error), before) from error
            except Exception as error:
                if is_final(error):
                    raise
                self._note(f"{type(error).__name__}: {first_line(error)}")
                if pause is None:
                    raise self._failed(TRIES, self.cause, before) from error
                await asyncio.sleep(pause)
            else:
                self._fine()
                return result
        raise AssertionError("the last try returns or raises")

    def report(self) -> list[str]:
        if not self.failures:
            return []
        seconds = asyncio.get_running_loop().time() - self.since
        return [f"{self.stage} has failed at the last {self.failures} tries, for {seconds:.1f} s: {self.cause}"]

    def _note(self, cause: str) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if self.failures == TRIES:
            self.say(f"{self.stage} has failed at the last {TRIES} tries, and will be retried: {cause}")

    def _fine(self) -> None:
        if self.failures >= TRIES:
            self.say(f"{self.stage} works again after {self.failures} failed tries")
        self.recovered = self.recovered or self.failures > 0
        self.in_vain = self.failures = 0
        self.successes += 1

    def _failed(self, tries: int, cause: str, before: int) -> Exception:
        self.in_vain += tries if before == self.successes else 0
        if self.in_vain < DOWN:
            return GivenUp(cause)
        return EngineError(f"{self.stage} failed at the last {self.in_vain} tries, and none succeeded: {cause}")
