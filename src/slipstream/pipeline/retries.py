"""Calls that fail are tried again; one that fails for good costs its group, and several in a row stop the run.

This is the layer of whole groups and of seconds. An engine may try a request of its own again at once where that often
helps, as with a connection that was cut; it raises soon, so that what is wrong is known and told here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slipstream.errors import EngineError, SlipstreamError, first_line

T = TypeVar("T")
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries of a call that fails."""
TRIES = len(PAUSES) + 1
DOWN = 3 * TRIES
"""A stage is down after so many vain tries that began since its last success: three groups, each tried five times."""
DEFECTS = (TypeError, AttributeError, NameError, AssertionError)
"""Mistakes in a program: trying again cannot help, and the traceback matters."""


class GivenUp(Exception):
    """A call failed at every try, or says itself that another would not help."""


class Tries:
    """Calls of one stage, or of one of its teachers, tried again with growing pauses.

    A call that fails at every try is given up, and its group with it. When several in a row are, the stage is down, and
    with it the run.
    """

    def __init__(self, stage: str, *, say: Callable[[str], None] = print) -> None:
        self.stage, self.say, self.in_vain = stage, say, 0
        """How many tries of groups that were given up, since the last that was not in vain."""
        self.successes = 0
        self.failures, self.cause = 0, ""
        """Tries that failed since the last that did not, and why the last did."""
        self.since = 0.0
        self.recovered = False
        """A call succeeded after one that failed; whoever looks sets it back."""

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        for pause in (*PAUSES, None):
            before = self.successes
            try:
                result = await work()
            except (SlipstreamError, *DEFECTS):
                raise
            except GivenUp as error:
                self._note(str(error))
                raise self._failed(1, str(error), before) from error
            except Exception as error:
                self._note(f"{type(error).__name__}: {first_line(error)}")
                if pause is None:
                    raise self._failed(TRIES, self.cause, before) from error
                await asyncio.sleep(pause)
            else:
                self._fine()
                return result
        raise AssertionError("the last try returns or raises")

    def report(self) -> list[str]:
        """What is wrong, if the last try failed."""
        if not self.failures:
            return []
        seconds = asyncio.get_running_loop().time() - self.since
        return [f"{self.stage} has failed at the last {self.failures} tries, for {seconds:.1f} s: {self.cause}"]

    def _note(self, cause: str) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if self.failures == TRIES:
            self.say(f"{self.stage} has failed at the last {TRIES} tries, and is tried again: {cause}")

    def _fine(self) -> None:
        if self.failures >= TRIES:
            self.say(f"{self.stage} goes on after {self.failures} tries in vain")
        self.recovered = self.recovered or self.failures > 0
        self.in_vain = self.failures = 0
        self.successes += 1

    def _failed(self, tries: int, cause: str, before: int) -> Exception:
        self.in_vain += tries if before == self.successes else 0
        if self.in_vain < DOWN:
            return GivenUp(cause)
        return EngineError(f"{self.stage} failed at the last {self.in_vain} tries, and none succeeded: {cause}")
