"""A virtual clock for running the real pipeline without waiting.

The selector of this asyncio loop moves the loop's clock to the next timer and does not sleep. Thousands of seconds pass
in milliseconds, in a reproducible order. If nothing is left to wait for, a real loop would hang; this loop
raises Deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Error: every task waits for another task, and no timer is set."""


class VirtualClock(selectors.DefaultSelector):
    """Selector that selects nothing and returns at once, after adding the timeout to its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} virtual seconds every task waits for another")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = VirtualClock()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("real work in threads takes real time: use engines that only sleep on a virtual clock")


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run `main`, and return its result and the virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main), runner.get_loop().time()
