"""Calls that fail are tried again; one that fails for good costs its group, and several in a row stop the run."""

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
"""A stage is down when so many tries in a row were in vain: three groups, each tried again and again."""
DEFECTS = (TypeError, AttributeError, NameError, AssertionError)
"""Mistakes in a program: trying again cannot help, and the traceback matters."""


class GivenUp(Exception):
    """A call failed at every try, or says itself that another would not help."""


class Tries:
    """Calls of one stage, tried again with growing pauses.

    A call that fails at every try is given up, and its group with it. When several in a row are, the stage is down, and
    with it the run.
    """

    def __init__(self, stage: str) -> None:
        self.stage, self.in_vain = stage, 0

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        for pause in (*PAUSES, None):
            try:
                result = await work()
            except (SlipstreamError, *DEFECTS):
                raise
            except GivenUp as error:
                raise self._failed(1, str(error)) from error
            except Exception as error:
                if pause is None:
                    raise self._failed(TRIES, f"{type(error).__name__}: {first_line(error)}") from error
                await asyncio.sleep(pause)
            else:
                self.in_vain = 0
                return result
        raise AssertionError("the last try returns or raises")

    def _failed(self, tries: int, cause: str) -> Exception:
        self.in_vain += tries
        if self.in_vain < DOWN:
            return GivenUp(cause)
        return EngineError(f"{self.stage} failed at the last {self.in_vain} tries, and none succeeded: {cause}")
