"""Engines that only take time: what the pipeline would do on machines that are not here.

Samplers decode all their running rows in steps whose duration depends on how many there are; scorers and the learner
take so long for so many tokens. Responses have a length and versions, and nothing else. Meant for a virtual clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from slipstream.engines.base import Fingerprint, Loaded, Metrics, Mode, Quote, Sampling, Weighed, WeightsRef
from slipstream.engines.recordfile import read_groups, write_groups
from slipstream.records import ONE, Batch, Counts, Group, Handle, Header, Prompt, counts_of

Length = Callable[[Prompt, int], int]
"""Tokens of a prompt's response with this index in its group."""
Step = Callable[[int], float]
"""Seconds in which so many running rows get one token each."""
Cost = Callable[[int], float]
"""Seconds for so many tokens."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    lengths: list[int]
    answer: asyncio.Future[list[Handle]]
    begun: dict[int, Header] = field(default_factory=dict)
    """What each member had when it came, if it had anything."""
    left: int = 0
    """Rows that are still running."""
    began: float = 0.0
    """The sampler's step count when it was seated."""
    versions: list[tuple[float, int]] = field(default_factory=list)
    """From which step on it ran under which version."""

    def missing(self, index: int) -> int:
        """Tokens that this member lacked when it came."""
        return self.lengths[index] - (self.begun[index].tokens if index in self.begun else 0)


class SleepSampler:
    def __init__(self, length: Length, *, step: Step, slots: int = 1 << 30, load: float = 0.0) -> None:
        """`load` is how many seconds a publish stands still."""
        self.length, self.step, self.slots, self.load = length, step, slots, load
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.rows: list[tuple[float, int, Request]] = []
        """A heap: the step at which a row ends, a number that breaks ties, and its request."""
        self.seated = self.count = 0
        self.steps = 0.0
        """Steps made so far, as of `at`."""
        self.at = 0.0
        self.paused = False
        """Nothing is seated until a publish is done."""
        self.still = False
        """Rows make no step while weights are loaded."""
        self.timer: asyncio.TimerHandle | None = None
        self.drained: asyncio.Event | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        lengths = [min(self.length(prompt, index), sampling.max_tokens) for index in range(sampling.group)]
        known = {handle.header.index: handle.header for handle in begun}
        request = Request(prompt, lengths, asyncio.get_running_loop().create_future(), known)
        if not any(request.missing(index) for index in range(sampling.group)):
            return [self._handle(request, index) for index in range(sampling.group)]
        self._catch_up()
        self.waiting.append(request)
        self._go_on()
        try:
            return await request.answer
        finally:
            if not request.answer.done() or request.answer.cancelled():
                self._abort(request)

    async def release(self, numbers: Collection[int] = ()) -> None:
        self._catch_up()
        for request in [*self.running, *self.waiting]:
            if not request.answer.done() and (not numbers or request.prompt.number in numbers):
                request.answer.set_result(self._so_far(request))
                self._abort(request)

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        clock = asyncio.get_running_loop().time
        began, thrown = clock(), 0
        self.paused = True  # nothing new is seated
        if mode == "drain" and self.running:
            self.drained = asyncio.Event()
            await self.drained.wait()
            self.drained = None
        self._catch_up()
        stood = clock()
        if mode == "restart":
            thrown = sum(handle.header.tokens for request in self.running for handle in self._so_far(request))
            self.waiting.extendleft(reversed(self.running))
            for request in self.waiting:
                request.begun = {}
            self._clear()
        if self.load:
            self.still = True
            self._go_on()
            await asyncio.sleep(self.load)
            self._catch_up()
            self.still = False
        self.version = weights.version
        for request in self.running:
            request.versions.append((self.steps, self.version))
        self.paused = False
        self._go_on()
        return Loaded(str(self.version), wait=stood - began, load=clock() - stood, thrown=thrown)

    # --- time passes ---------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.count and not self.still:
            self.steps += (now - self.at) / self.step(self.count)
        self.at = now

    def _go_on(self) -> None:
        """Seat what fits, and wake up when the next row ends."""
        while self.waiting and not self.paused and self.count + len(self.waiting[0].lengths) <= self.slots:
            self._seat(self.waiting.popleft())
        if self.timer:
            self.timer.cancel()
            self.timer = None
        while self.rows and self.rows[0][2] not in self.running:  # aborted
            heapq.heappop(self.rows)
        if self.rows and not self.still:
            seconds = max(self.rows[0][0] - self.steps, 0.0) * self.step(self.count)
            self.timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _seat(self, request: Request) -> None:
        missing = [lacks for index in range(len(request.lengths)) if (lacks := request.missing(index))]
        request.left, request.began = len(missing), self.steps
        request.versions = [(self.steps, self.version)]
        self.running[request] = None
        self.count += len(missing)
        for tokens in missing:
            heapq.heappush(self.rows, (self.steps + tokens, self.seated, request))
            self.seated += 1

    def _end(self) -> None:
        """The next row has ended, and all that end with it."""
        self._catch_up()
        self.steps = max(self.steps, self.rows[0][0])
        while self.rows and self.rows[0][0] <= self.steps + 1e-6:
            _, _, request = heapq.heappop(self.rows)
            if request not in self.running:
                continue
            self.count -= 1
            request.left -= 1
            if request.left == 0:
                del self.running[request]
                if not request.answer.done():
                    request.answer.set_result([self._handle(request, index) for index in range(len(request.lengths))])
        if self.drained and not self.running:
            self.drained.set()
        self._go_on()

    def _abort(self, request: Request) -> None:
        self._catch_up()
        if request in self.running:
            del self.running[request]
            self.count -= request.left
        else:
            self.waiting.remove(request)
        if self.drained and not self.running:
            self.drained.set()
        self._go_on()

    def _clear(self) -> None:
        self.running.clear()
        self.rows.clear()
        self.count = 0

    def _handle(self, request: Request, index: int, steps: int | None = None) -> Handle:
        """A member, complete; or as it is so many steps after it was seated."""
        begun, missing = request.begun.get(index), request.missing(index)
        drawn = missing if steps is None else min(steps, missing)
        edges = [(min(int(step - request.began), drawn), version) for step, version in request.versions]
        runs = [(version, after - at) for (at, version), (after, _) in pairwise([*edges, (drawn, -1)]) if after > at]
        runs = [*(begun.versions if begun else ()), *runs]
        prompt = request.prompt
        header = Header(
            prompt=prompt.id,
            number=prompt.number,
            index=index,
            episode=index,
            data_source=prompt.data_source,
            prompt_tokens=len(prompt.tokens),
            tokens=drawn + (begun.tokens if begun else 0),
            versions=tuple(
                (version, sum(count for _, count in part)) for version, part in groupby(runs, itemgetter(0))
            ),
            finish="eos" if steps is None else "released",
            teacher=prompt.teacher,
        )
        return Handle(header, None)

    def _so_far(self, request: Request) -> list[Handle]:
        """What there is of a group, without members that have no token."""
        steps = int(self.steps - request.began) if request in self.running else 0
        have = [self._handle(request, index, steps) for index in range(len(request.lengths))]
        return [handle for handle in have if handle.header.tokens]


class Server:
    """Works on one thing at a time, in the order in which they came."""

    def __init__(self, cost: Cost) -> None:
        self.cost, self.free = cost, 0.0

    async def work(self, tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        self.free = max(self.free, now) + self.cost(tokens)
        await asyncio.sleep(self.free - now)


class SleepScorer(Server):
    async def score(self, group: Group) -> list[Handle]:
        await self.work(sum(handle.header.tokens for handle in group))
        return list(group)


class SleepLearner(Server):
    steps = 0

    async def prepare(self, batch: Batch) -> list[Counts]:
        return [counts_of(group) for group in batch.groups]

    async def accumulate(self, batch: Batch, counts: Counts) -> list[Weighed]:
        await self.work(sum(header.tokens for header in batch.headers))
        return [by_lag(batch.update - 1 - header.oldest) for header in batch.headers]

    async def step(self, counts: Counts = ONE, lr: float = 1.0) -> Metrics:
        await asyncio.sleep(0)
        self.steps += 1
        return {}

    async def quote(self, batch: Batch) -> list[Quote]:
        return []  # nobody said anything

    async def weigh(self, batch: Batch) -> list[Weighed]:
        return [by_lag(self.steps - header.oldest) for header in batch.headers]

    async def compare(self, batch: Batch) -> Metrics:
        return {}

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        return WeightsRef((), None, self.steps), str(self.steps)

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        (path / "steps").write_text(str(self.steps))
        write_groups(path, groups)

    async def restore(self, path: Path) -> Sequence[Group]:
        self.steps = int((path / "steps").read_text())
        return read_groups(path)


def by_lag(lag: int) -> Weighed:
    """Nothing drifts."""
    f = 1 / (max(0, lag) + 1)
    return Weighed(lag=lag, roll=0.0, sup=0.0, roll_coverage=1.0, sup_coverage=1.0, f=f, w=f)
