"""The workers of one stage, or of one teacher. A group goes as a whole to the one with least to do.

One that died is buried: its groups go to the others at once, and another is started in its place, on the same track of
the trace. Calls wait while there is nobody, as long as somebody is to come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from slipstream.errors import AllDied, EngineError, ModelError, WorkerDied, first_line
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.trace import Trace, Track
from slipstream.pipeline.tries import DEFECTS, Tries

E = TypeVar("E")
T = TypeVar("T")
Replace = Callable[[Any], Awaitable[Any]]


class Worker(Generic[E]):
    def __init__(self, engine: E, track: Track) -> None:
        self.engine, self.track = engine, track
        self.load = 0

    @property
    def name(self) -> str:
        return self.track.name


def names(kind: str, number: int) -> list[str]:
    """What so many workers of a kind are called."""
    return [kind] if number == 1 else [f"{kind}-{index}" for index in range(number)]


def scorer_name(teacher: str, teachers: Collection[str]) -> str:
    """What the scorers of one of the teachers are called."""
    return f"scorer-{teacher}" if len(teachers) > 1 else "scorer"


class Pool(Generic[E]):
    """Workers by load: taking the least loaded costs the same for two of them and for ten thousand."""

    def __init__(
        self,
        engines: Sequence[E],
        trace: Trace,
        *,
        stage: str,
        name: str,
        say: Callable[[str], None],
        tasks: asyncio.TaskGroup,
        work: str | None = None,
        replace: Replace | None = None,
        restarts: Restarts,
    ) -> None:
        """`work` is what errors call the stage. Without `replace` nobody takes the place of who died."""
        self.name, self.trace, self.say, self.tasks = name, trace, say, tasks
        self.replace, self.restarts = replace, restarts
        self.tries = Tries(work or stage, say=say)
        self.workers = dict.fromkeys(
            Worker(engine, trace.track(stage, name))
            for engine, name in zip(engines, names(name, len(engines)), strict=True)
        )
        self.coming: dict[str, asyncio.Task[None]] = {}
        """Workers that are started again."""
        self.waiting, self.came = 0, asyncio.Event()
        """Calls for which nobody is there, and what they wait for."""
        self._by_load: list[OrderedDict[Worker[E], None]] = [OrderedDict(self.workers)]
        self._least = 0

    async def call(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """Give a group, by its number, or something else to a worker, and again if that fails, until there is no sense
        in it (GivenUp)."""
        return await self.tries.call(lambda: self._once(name, work))

    async def _once(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """To the least loaded worker; to another one if that dies of it."""
        while True:
            if not self.workers:
                await self._somebody()
            worker = self._take()
            worker.track.begin(name, "stage" if isinstance(name, int) else "other")
            try:
                return await work(worker)
            except WorkerDied as error:
                self.bury(worker, error)
            finally:
                worker.track.end(name)
                self._shift(worker, -1)

    async def _somebody(self) -> None:
        """Wait until a worker is there."""
        if not self.coming:
            raise EngineError(f"no {self.name} is left")
        self.waiting += 1
        try:
            while not self.workers:
                self.came.clear()
                await self.came.wait()
        finally:
            self.waiting -= 1

    def report(self) -> list[str]:
        """What is wrong."""
        missing = [f"{name} is being started again" for name in self.coming]
        waiting = [f"{self.waiting} calls wait for a {self.name}"] if self.waiting else []
        return [*self.tries.report(), *missing, *waiting]

    # --- who dies, and who comes -----------------------------------------------------------------------------

    def bury(self, worker: Worker[E], error: WorkerDied) -> None:
        """Go on without a worker, and have another take its place, if it may."""
        if worker not in self.workers:
            return
        del self.workers[worker], self._by_load[worker.load][worker]
        pause = self._granted(worker)
        if pause is None:
            self._without(worker, str(error))
        else:
            again = self._start_again(worker, pause)
            try:
                self.coming[worker.name] = self.tasks.create_task(again)
            except RuntimeError:  # all that the run does is being cancelled, and only the others hand over
                again.close()
            else:
                self.say(f"{worker.name} died and is started again: {error}")

    def close(self) -> None:
        """Nobody need come any more."""
        for task in self.coming.values():
            task.cancel()

    async def welcome(self, worker: Worker[E]) -> None:
        """What a new one must hear before it gets work."""

    def _granted(self, worker: Worker[E]) -> float | None:
        return self.restarts.granted(worker.name, asyncio.get_running_loop().time()) if self.replace else None

    def _without(self, worker: Worker[E], why: str) -> None:
        often = self.restarts.often(worker.name)
        if not self.workers and not self.coming:
            raise EngineError(f"the last {self.name} died{often}: {why}")
        self.say(f"{worker.name} died{often} and its groups go to others: {why}")

    async def _start_again(self, gone: Worker[E], pause: float) -> None:
        died = self.trace.now()
        while True:
            await asyncio.sleep(pause)
            worker = Worker(gone.engine, gone.track)
            failure = await self._try_to_start(worker)
            if not failure:
                break
            granted = self._granted(worker)
            if granted is None:
                del self.coming[gone.name]
                self._without(worker, failure)
                return
            self.say(f"{gone.name} could not be started again and is tried once more: {failure}")
            gone, pause = worker, granted
        del self.coming[gone.name]
        self._join(worker)
        now = self.trace.now()
        self.trace.slice(worker.track, "gone", died, now)
        self.say(f"{worker.name} is back after {now - died:.1f} s")

    async def _try_to_start(self, worker: Worker[E]) -> str:
        """In place of its engine, which died; returns why it could not."""
        assert self.replace is not None
        try:
            worker.engine = await self.replace(worker.engine)
            await self.welcome(worker)
        except (ModelError, AllDied, *DEFECTS):  # it is not what it should be, or nobody is left to wait for
            raise
        except Exception as error:  # whatever loading raises: no memory, a file that is gone; or it died once more
            return first_line(error)
        return ""

    # --- who has how much to do ------------------------------------------------------------------------------

    def _join(self, worker: Worker[E]) -> None:
        self.workers[worker] = self._by_load[0][worker] = None
        self._least = 0
        self.came.set()

    def _take(self) -> Worker[E]:
        while not self._by_load[self._least]:
            self._least += 1
        worker = next(iter(self._by_load[self._least]))
        self._shift(worker, +1)
        return worker

    def _shift(self, worker: Worker[E], change: int) -> None:
        if worker in self.workers:
            del self._by_load[worker.load][worker]
            if worker.load + change == len(self._by_load):
                self._by_load.append(OrderedDict())
            self._by_load[worker.load + change][worker] = None
            self._least = min(self._least, worker.load + change)
        worker.load += change
