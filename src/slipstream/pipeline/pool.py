"""The workers of one stage, or of one teacher. A group goes as a whole to the one with least to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar

from slipstream.errors import EngineError, WorkerDied
from slipstream.pipeline.trace import Trace, Track
from slipstream.pipeline.tries import Tries

E = TypeVar("E")
T = TypeVar("T")


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
        work: str | None = None,
    ) -> None:
        """`work` is what errors call the stage."""
        self.name, self.say = name, say
        self.tries = Tries(work or stage, say=say)
        self.workers = dict.fromkeys(
            Worker(engine, trace.track(stage, name))
            for engine, name in zip(engines, names(name, len(engines)), strict=True)
        )
        self._by_load: list[OrderedDict[Worker[E], None]] = [OrderedDict(self.workers)]
        self._least = 0

    async def call(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """Give a group, by its number, or something else to a worker, and again if that fails, until there is no sense
        in it (GivenUp)."""
        return await self.tries.call(lambda: self._once(name, work))

    async def _once(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """To the least loaded worker; to another one if that dies of it."""
        while True:
            worker = self._take()
            worker.track.begin(name, "stage" if isinstance(name, int) else "other")
            try:
                return await work(worker)
            except WorkerDied as error:
                self.bury(worker, error)
            finally:
                worker.track.end(name)
                self._shift(worker, -1)

    def bury(self, worker: Worker[E], error: WorkerDied) -> None:
        """Go on without a worker, if there is another."""
        if worker not in self.workers:
            return
        del self.workers[worker], self._by_load[worker.load][worker]
        if not self.workers:
            raise EngineError(f"the last {self.name} died: {error}") from error
        self.say(f"{worker.name} died and its groups go to others: {error}")

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
