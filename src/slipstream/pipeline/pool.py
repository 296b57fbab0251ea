"""A pool of the workers of one stage, or of one teacher. Each group goes as a whole to the least loaded worker.

When a worker dies, its groups go to other workers at once, and a replacement starts on the same track (timeline).
Workers can be added and removed while a run continues. A call waits if no worker is ready but one is starting.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from slipstream.errors import AllDied, EngineError, ModelError, WorkerDied, first_line
from slipstream.pipeline.failures import DEFECTS, Restarts, Retries
from slipstream.pipeline.trace import Trace, Track
from slipstream.protocols import Engines

E = TypeVar("E")
T = TypeVar("T")


class Worker(Generic[E]):
    def __init__(self, engine: E, track: Track) -> None:
        self.engine, self.track = engine, track
        self.load, self.last_change = 0, 0
        """Number of calls that the worker has, and the number of the last change of this value in its pool."""
        self.since: dict[int, int] = {}
        """Update that learned from each group answered since the last passed check, by group number; 0: none yet."""
        self.good, self.unproven = 0, True
        """The update at the last passed check; and True if the worker must be checked at the next opportunity."""
        self.free = asyncio.Event()
        """Set when a removed worker has finished its last call."""

    @property
    def name(self) -> str:
        return self.track.name


def names(kind: str, number: int) -> list[str]:
    return [kind] if number == 1 else [f"{kind}-{index}" for index in range(number)]


def scorer_name(teacher: str, teachers: Collection[str]) -> str:
    return f"scorer-{teacher}" if len(teachers) > 1 else "scorer"


def begin_task(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Start a task in a group; return None if the group is being cancelled, so that no task can start."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        return None


class Pool(Generic[E]):
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
        """Create a pool. `work` names its stage in messages. If `engines.replace` is None, dead workers stay dead."""
        self.kind, self.stage, self.name = kind, stage, name
        self.trace, self.say, self.tasks = trace, say, tasks
        self.engines, self.restarts = engines, restarts
        self.tries = Retries(work or stage, say=say)
        self.workers = dict.fromkeys(
            Worker(engine, trace.track(stage, name))
            for engine, name in zip(workers, names(name, len(workers)), strict=True)
        )
        self.named = len(workers)
        """Number of names given so far; a name is never reused."""
        self.coming: dict[Worker[E], asyncio.Task[None]] = {}
        """Workers whose engines are being started or restarted, each with the task that starts it."""
        self.last_death = ""
        """Reason why no worker is left; every call that still waits reports it."""
        self.retired: set[Worker[E]] = set()
        """Workers whose answers cannot be trusted."""
        self.leaving: dict[Worker[E], asyncio.Task[None]] = {}
        """Removed workers that have not ended yet, each with the task that ends it."""
        self.waiting, self.came = 0, asyncio.Event()
        """Number of calls that wait for a worker, and the event that ends their wait."""
        self._changes = count(1)
        """Numbers of the changes of load."""
        self._loads: list[tuple[int, int, Worker[E]]] = []
        """Heap of loads with their change's number and worker; an entry counts until the next change of its worker."""
        for worker in self.workers:
            self._shift(worker, 0)

    async def call(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """Call a worker, and retry until GivenUp is raised; `name` is a group number, or a text for other work."""
        return await self.tries.call(lambda: self._once(name, work))

    async def _once(self, name: int | str, work: Callable[[Worker[E]], Awaitable[T]]) -> T:
        """Call the least loaded worker; if it dies, call another one."""
        while True:
            if not self.workers:
                await self._wait_for_worker()
            worker = self._take()
            worker.track.begin(name, "stage" if isinstance(name, int) else "other")
            try:
                result = await work(worker)
                if worker not in self.retired:
                    if isinstance(name, int):
                        worker.since[name] = 0
                    return result
            except WorkerDied as error:
                self.handle_death(worker, error)
            finally:
                worker.track.end(name)
                self._shift(worker, -1)

    async def _wait_for_worker(self) -> None:
        if not self.coming:
            raise EngineError(self.last_death or f"no {self.name} is left")
        self.waiting += 1
        try:
            while not self.workers:
                self.came.clear()
                await self.came.wait()
        finally:
            self.waiting -= 1

    def report(self) -> list[str]:
        missing = [f"{worker.name} is being started" for worker in self.coming]
        missing += [f"{worker.name} is about to leave" for worker in self.leaving]
        waiting = [f"{self.waiting} calls wait for a {self.name}"] if self.waiting else []
        return [*self.tries.report(), *missing, *waiting]

    # --- death and replacement -------------------------------------------------------------------------------

    def handle_death(self, worker: Worker[E], error: WorkerDied) -> None:
        """Remove a dead worker, and start a replacement if the limit of restarts allows one."""
        if worker not in self.workers:
            return
        del self.workers[worker]
        pause = self._restart_pause(worker)
        if pause is None:
            self._lose(worker, str(error))
        elif self._launch(Worker(worker.engine, worker.track), pause):
            self.say(f"{worker.name} died and is started again: {error}")

    def retire(self, worker: Worker[E]) -> None:
        """Remove a worker that cannot be trusted; other workers repeat the calls that it has not finished."""
        self.retired.add(worker)
        del self.workers[worker]
        if self.engines.dismiss is not None:
            self._end_later(worker)

    def close(self) -> None:
        """Cancel the pending tasks that start or end workers, because the run ends."""
        for task in (*self.coming.values(), *self.leaving.values()):
            task.cancel()

    async def prepare(self, worker: Worker[E]) -> None:
        """Prepare a new worker before it gets work; a hook for subclasses."""

    async def release_work(self, worker: Worker[E]) -> None:
        """Make a leaving worker return unfinished work that others can continue; a hook for subclasses."""

    def _restart_pause(self, worker: Worker[E]) -> float | None:
        if self.engines.replace is None:
            return None
        return self.restarts.grant(worker.name, asyncio.get_running_loop().time())

    def _lose(self, worker: Worker[E], why: str) -> None:
        often = self.restarts.describe(worker.name)
        if not self.workers and not self.coming:
            self.last_death = f"the last {self.name} died{often}: {why}"
            raise EngineError(self.last_death)
        self.say(f"{worker.name} died{often} and its groups go to others: {why}")
        if self.engines.dismiss is not None:
            self._end_later(worker)

    def _launch(self, worker: Worker[E], pause: float) -> bool:
        """Start a worker's engine after `pause` seconds; return False if the whole run is being cancelled."""
        task = begin_task(self.tasks, self._start(worker, pause))
        if task:
            self.coming[worker] = task
        return task is not None

    async def _start(self, worker: Worker[E], pause: float) -> None:
        began = self.trace.now()
        await asyncio.sleep(pause)
        while failure := await self._try_to_start(worker):
            next_pause = self._restart_pause(worker)
            if next_pause is None:
                del self.coming[worker]
                self._lose(worker, failure)
                return
            self.say(f"{worker.name} could not be started and is tried once more: {failure}")
            await asyncio.sleep(next_pause)
        del self.coming[worker]
        now = self.trace.now()
        self.trace.slice(worker.track, "gone" if worker.track.there else "starting", began, now)
        self.workers[worker], worker.track.there = None, True
        self._shift(worker, 0)
        self.came.set()
        self.say(f"{worker.name} is at work after {now - began:.1f} s")

    async def _try_to_start(self, worker: Worker[E]) -> str:
        """Start an engine in place of the worker's dead one; return the cause of a failure, or an empty string."""
        assert self.engines.replace is not None
        try:
            worker.engine = await self.engines.replace(worker.engine)
            await self.prepare(worker)
        except (ModelError, AllDied, *DEFECTS):  # another try cannot help
            raise
        except Exception as error:  # loading may raise anything: no memory, a missing file, another death
            return first_line(error)
        return ""

    # --- change of size --------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of workers, including those that are starting."""
        return len(self.workers) + len(self.coming)

    @property
    def names_by_state(self) -> dict[str, list[str]]:
        states: dict[str, Collection[Worker[E]]]
        states = {"working": self.workers, "starting": self.coming, "leaving": self.leaving}
        return {state: [worker.name for worker in workers] for state, workers in states.items()}

    def resize(self, size: int) -> None:
        """Start or remove workers until `size` remain; a removed worker first finishes or hands over its work."""
        for _ in range(size - self.size):
            assert self.engines.hire is not None
            name = f"{self.name}-{self.named}"
            self.named += 1
            engine = self.engines.hire(self.kind, name)
            self._launch(Worker(engine, self.trace.track(self.stage, name, there=False)), 0.0)
        for _ in range(self.size - size):
            self._dismiss()

    def _dismiss(self) -> None:
        """Remove one worker: one that is still starting, or else the newest."""
        if self.coming:
            worker, coming = self.coming.popitem()
            coming.cancel()
            self._end_later(worker, coming)
        else:
            assert len(self.workers) > 1, f"the last {self.name} cannot leave"
            worker = next(reversed(self.workers))
            del self.workers[worker]
            self._end_later(worker)

    def _end_later(self, worker: Worker[E], *coming: asyncio.Task[None]) -> None:
        worker.track.there = False
        if task := begin_task(self.tasks, self._leave(worker, *coming)):
            self.leaving[worker] = task

    async def _leave(self, worker: Worker[E], *coming: asyncio.Task[None]) -> None:
        assert self.engines.dismiss is not None
        if coming:
            await asyncio.wait(coming)
        if worker.load:
            await self.release_work(worker)
            await worker.free.wait()
        await self.engines.dismiss(worker.engine)
        del self.leaving[worker]
        self.say(f"{worker.name} has left")

    # --- load ------------------------------------------------------------------------------------------------

    def _take(self) -> Worker[E]:
        """Return the least loaded worker; of equally loaded ones, the one that has waited longest."""
        while not self._counts(found := heappop(self._loads)):
            pass
        self._shift(found[2], +1)
        return found[2]

    def _counts(self, entry: tuple[int, int, Worker[E]]) -> bool:
        return entry[1] == entry[2].last_change and entry[2] in self.workers

    def _shift(self, worker: Worker[E], change: int) -> None:
        worker.load += change
        worker.last_change = next(self._changes)
        heappush(self._loads, (worker.load, worker.last_change, worker))
        if len(self._loads) > 4 * len(self.workers) + 100:  # most entries count no more
            self._loads = list(filter(self._counts, self._loads))
            heapify(self._loads)
        if not worker.load and worker not in self.workers:
            worker.free.set()
