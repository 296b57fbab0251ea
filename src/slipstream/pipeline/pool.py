"""The workers of one stage, or of one teacher. A group goes as a whole to the one with least to do.

One that died is buried: its groups go to the others at once, and another is started in its place, on the same track of
the trace. Others may be added while a run goes on, and may leave. Calls wait while there is nobody, as long as somebody
is to come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from slipstream.errors import AllDied, EngineError, ModelError, WorkerDied, first_line
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.retries import DEFECTS, Tries
from slipstream.pipeline.trace import Trace, Track
from slipstream.protocols import Engines

E = TypeVar("E")
T = TypeVar("T")


class Worker(Generic[E]):
    def __init__(self, engine: E, track: Track) -> None:
        self.engine, self.track = engine, track
        self.load = 0
        self.since: dict[int, int] = {}
        """The groups that it answered since it was last found good, each with the update made of it; 0 for none yet."""
        self.good, self.unproven = 0, True
        """The update after which that was, and whether it is to be asked at the next chance."""
        self.free = asyncio.Event()
        """Nothing is left to do for one that leaves."""

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
        workers: Sequence[E],
        trace: Trace,
        *,
        kind: str,
        stage: str,
        name: str,
        say: Callable[[str], None],
        tasks: asyncio.TaskGroup,
        work: str | None = None,
        engines: Engines,
        restarts: Restarts,
    ) -> None:
        """`work` is what errors call the stage, and `kind` is what `engines` start more of. Where they replace none,
        nobody takes the place of who died."""
        self.kind, self.stage, self.name = kind, stage, name
        self.trace, self.say, self.tasks = trace, say, tasks
        self.engines, self.restarts = engines, restarts
        self.tries = Tries(work or stage, say=say)
        self.workers = dict.fromkeys(
            Worker(engine, trace.track(stage, name))
            for engine, name in zip(workers, names(name, len(workers)), strict=True)
        )
        self.named = len(workers)
        """How many have had a name, which nobody else gets."""
        self.coming: dict[Worker[E], asyncio.Task[None]] = {}
        """Workers whose engines are started, for the first time or again."""
        self.retired: set[Worker[E]] = set()
        """Workers whose answers cannot be trusted."""
        self.leaving: dict[Worker[E], asyncio.Task[None]] = {}
        """Workers that get no more work."""
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
                result = await work(worker)
                if worker not in self.retired:
                    if isinstance(name, int):
                        worker.since[name] = 0
                    return result
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
        missing = [f"{worker.name} is being started" for worker in self.coming]
        missing += [f"{worker.name} is about to leave" for worker in self.leaving]
        waiting = [f"{self.waiting} calls wait for a {self.name}"] if self.waiting else []
        return [*self.tries.report(), *missing, *waiting]

    # --- who dies, and who comes -----------------------------------------------------------------------------

    def bury(self, worker: Worker[E], error: WorkerDied) -> None:
        """Go on without a worker, and have another take its place, if it may."""
        if worker not in self.workers:
            return
        self._strike(worker)
        pause = self._granted(worker)
        if pause is None:
            self._without(worker, str(error))
        elif self._expect(Worker(worker.engine, worker.track), pause):
            self.say(f"{worker.name} died and is started again: {error}")

    def retire(self, worker: Worker[E]) -> None:
        """Give a worker no more work, and what it is about to answer to others."""
        self.retired.add(worker)
        self._strike(worker)
        if self.engines.dismiss is not None:
            self._see_off(worker)

    def close(self) -> None:
        """Nobody need come any more, or be waited for."""
        for task in (*self.coming.values(), *self.leaving.values()):
            task.cancel()

    async def welcome(self, worker: Worker[E]) -> None:
        """What a new one must hear before it gets work."""

    async def relieve(self, worker: Worker[E]) -> None:
        """Of what one that leaves need not do to its end."""

    def _granted(self, worker: Worker[E]) -> float | None:
        if self.engines.replace is None:
            return None
        return self.restarts.granted(worker.name, asyncio.get_running_loop().time())

    def _without(self, worker: Worker[E], why: str) -> None:
        often = self.restarts.often(worker.name)
        if not self.workers and not self.coming:
            raise EngineError(f"the last {self.name} died{often}: {why}")
        self.say(f"{worker.name} died{often} and its groups go to others: {why}")
        if self.engines.dismiss is not None:
            self._see_off(worker)

    def _expect(self, worker: Worker[E], pause: float) -> bool:
        """After a pause, one whose engine is still to be started; not where the whole run is being cancelled."""
        task = self._begin(self._come(worker, pause))
        if task:
            self.coming[worker] = task
        return task is not None

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        try:
            return self.tasks.create_task(work)
        except RuntimeError:  # all that the run does is being cancelled, and only those who are there hand over
            work.close()
            return None

    async def _come(self, worker: Worker[E], pause: float) -> None:
        began = self.trace.now()
        while True:
            await asyncio.sleep(pause)
            failure = await self._try_to_start(worker)
            if not failure:
                break
            granted = self._granted(worker)
            if granted is None:
                del self.coming[worker]
                self._without(worker, failure)
                return
            self.say(f"{worker.name} could not be started and is tried once more: {failure}")
            pause = granted
        del self.coming[worker]
        now = self.trace.now()
        self.trace.slice(worker.track, "gone" if worker.track.there else "starting", began, now)
        self._join(worker)
        self.say(f"{worker.name} is at work after {now - began:.1f} s")

    async def _try_to_start(self, worker: Worker[E]) -> str:
        """In place of its engine, which died; returns why it could not."""
        assert self.engines.replace is not None
        try:
            worker.engine = await self.engines.replace(worker.engine)
            await self.welcome(worker)
        except (ModelError, AllDied, *DEFECTS):  # it is not what it should be, or nobody is left to wait for
            raise
        except Exception as error:  # whatever loading raises: no memory, a file that is gone; or it died once more
            return first_line(error)
        return ""

    # --- more of them, and fewer -----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """With those who are to come."""
        return len(self.workers) + len(self.coming)

    @property
    def standing(self) -> dict[str, list[str]]:
        """Who is here, by name."""
        found: dict[str, Collection[Worker[E]]] = {
            "working": self.workers,
            "starting": self.coming,
            "leaving": self.leaving,
        }
        return {what: [worker.name for worker in workers] for what, workers in found.items()}

    def resize(self, size: int) -> None:
        """So many of them: who is hired begins when it is loaded; who leaves ends, or hands over, what it has."""
        for _ in range(size - self.size):
            self._hire()
        for _ in range(self.size - size):
            self._dismiss()

    def _hire(self) -> None:
        assert self.engines.hire is not None
        name = f"{self.name}-{self.named}"
        self.named += 1
        self._expect(Worker(self.engines.hire(self.kind, name), self.trace.track(self.stage, name, there=False)), 0.0)

    def _dismiss(self) -> None:
        """Whoever is to come does not; else the one that came last leaves."""
        if self.coming:
            worker, coming = self.coming.popitem()
            coming.cancel()
            self._see_off(worker, coming)
        else:
            assert len(self.workers) > 1, f"the last {self.name} cannot leave"
            worker = next(reversed(self.workers))
            self._strike(worker)
            self._see_off(worker)

    def _see_off(self, worker: Worker[E], *coming: asyncio.Task[None]) -> None:
        worker.track.there = False
        if task := self._begin(self._leave(worker, *coming)):
            self.leaving[worker] = task

    async def _leave(self, worker: Worker[E], *coming: asyncio.Task[None]) -> None:
        assert self.engines.dismiss is not None
        if coming:
            await asyncio.wait(coming)
        if worker.load:
            await self.relieve(worker)
            await worker.free.wait()
        await self.engines.dismiss(worker.engine)
        del self.leaving[worker]
        self.say(f"{worker.name} has left")

    # --- who has how much to do ------------------------------------------------------------------------------

    def _join(self, worker: Worker[E]) -> None:
        self.workers[worker] = self._by_load[0][worker] = None
        self._least, worker.track.there = 0, True
        self.came.set()

    def _strike(self, worker: Worker[E]) -> None:
        """Off the list: it gets no more work."""
        del self.workers[worker], self._by_load[worker.load][worker]

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
        if not worker.load and worker not in self.workers:
            worker.free.set()
