"""A virtual clock for running the real pipeline without waiting.

The selector of this asyncio loop moves the loop's clock to the next timer and does not sleep. Thousands of seconds pass
in milliseconds, in a reproducible order. If nothing is left to wait for, a real loop would hang; this loop
raises Deadlock.

On a `ModelledLoop`, engines may compute: calls in threads are finished at once, in no virtual time, and answers of
other processes are awaited while the clock stands still. The engine sleeps for the time that its work should take.
"""

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


ANSWER_TIMEOUT = 60.0
"""Real seconds without an answer of another process after which the virtual clock runs on."""


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
    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.virtual = clock or VirtualClock()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("real work in threads takes real time: use engines that only sleep on a virtual clock")


class WaitingClock(VirtualClock):
    """Virtual clock that stands still while another process works, and delivers calls of other threads when idle."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = SimpleQueue[Callable[[], object]]()
        """Functions that put a callback of another thread or of a signal handler into the loop."""
        self.outside = False
        """True while the answer of another process is awaited."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []
        if self.outside or not self.calls.empty():
            try:
                self.calls.get(timeout=ANSWER_TIMEOUT)()
            except Empty:
                self.outside = False
            else:
                return []
        return super().select(timeout)


class ModelledLoop(VirtualLoop):
    """Virtual loop for real engines: everything happens in the same order in every run.

    Guarantees: a call in a thread ends before anything else happens. Answers of other processes arrive one by one, and
    only when every task of this loop waits.
    """

    def __init__(self) -> None:
        self.clock = WaitingClock()
        self.turn = asyncio.Lock()
        super().__init__(self.clock)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()
        try:
            found = func(*args) if executor is None else executor.submit(func, *args).result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(found)
        return future

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self.clock.calls.put(partial(self.call_soon, callback, *args, context=context))
        return asyncio.Handle(callback, args, self, context)

    @asynccontextmanager
    async def clock_stopped(self) -> AsyncIterator[None]:
        """Stop the clock while the body waits for another process; one task at a time may wait."""
        async with self.turn:
            self.clock.outside = True
            try:
                yield
            finally:
                self.clock.outside = False


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run `main`, and return its result and the virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main), runner.get_loop().time()
