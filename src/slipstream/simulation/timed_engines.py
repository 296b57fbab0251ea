"""Simulated engines that only take time, to predict the pipeline's behaviour on other machines.

A sampler decodes all running rows in steps. The duration of a step depends on the number of rows and on the tokens that
they attend to. Durations of scorers and the learner depend on the number of tokens. Engines may share cores. Responses
have only a length and versions. Use these engines with a virtual clock.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import sqrt
from operator import itemgetter
from pathlib import Path

from slipstream.engines.record_files import read_groups, write_groups
from slipstream.protocols import Fingerprint, Loaded, Metrics, Mode, Quote, SampleFreshness, Sampling, WeightsRef
from slipstream.records import (
    ONE_COUNT,
    Attempts,
    Batch,
    Counts,
    Group,
    Handle,
    Header,
    Prompt,
    Rollout,
    TextScores,
    counts_of,
)
from slipstream.simulation.cores import Cores, Work

Length = Callable[[Prompt, int], int]
"""Function that returns the number of tokens of a prompt's response, given its index in the group."""
Step = Callable[[int], float]
"""Function that returns the seconds of a decoding step, given the number of running rows."""
Cost = Callable[[int], float]
"""Function that returns seconds, given a number of tokens."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    lengths: list[int]
    answer: asyncio.Future[list[Handle]]
    begun: dict[int, Header] = field(default_factory=dict)
    """Headers by index of the members that already had tokens when the request arrived."""
    left: int = 0
    """Number of rows that are still running."""
    began: float = 0.0
    """Step count of the sampler when the request got its slots."""
    versions: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of a step and the version that runs from this step on."""

    def missing(self, index: int) -> int:
        """Return the number of tokens that this member still needed when the request arrived."""
        return self.lengths[index] - (self.begun[index].tokens if index in self.begun else 0)

    def whole(self, index: int) -> int:
        return len(self.prompt.tokens) + self.lengths[index]

    def unread(self) -> int:
        """Return the number of tokens to prefill before the request runs; members share their prompt."""
        return len(self.prompt.tokens) + sum(header.tokens for header in self.begun.values())


class SleepSampler:
    def __init__(
        self,
        length: Length,
        *,
        step: Step,
        slots: int = 1 << 30,
        load: float = 0.0,
        context: float = 0.0,
        read: Cost = lambda _: 0.0,
        rebuilds: bool = True,
        gather: int = 0,
        cores: Cores | None = None,
    ) -> None:
        """Create a sampler. Requests wait until `gather` slots are free; times are in seconds.

        `load` is the pause of a publish; if `rebuilds`, the prefill of all running rows adds to it. `context` is the
        extra time of a step for every attended token. `read` returns the time of a prefill, for which all rows wait.
        """
        self.length, self.step, self.slots, self.load = length, step, slots, load
        self.per_token, self.read, self.rebuilds, self.gather = context, read, rebuilds, gather
        self.cores = cores or Cores()
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.rows: list[tuple[float, int, Request, int]] = []
        """Heap of running rows: the step at which a row ends, a tie breaker, its request, its index in the group."""
        self.seated = self.count = 0
        self.steps = 0.0
        """Number of decoding steps completed at time `at`."""
        self.context = 0.0
        """Number of tokens that the running rows attend to at time `at`."""
        self.unread = 0.0
        """Seconds of prefill at time `at` that remain before the next step."""
        self.at = 0.0
        """Time of the latest update of this state, on the service clock of the cores."""
        self.filling = -1.0
        """Time when slots were last filled; requests that arrive at the same time need not wait for `gather`."""
        self.paused = False
        """True during a publish: waiting requests get no slots."""
        self.loading = False
        """True while weights are loaded: rows make no step."""
        self.work: Work | None = None
        """Work on the cores until the next row ends; None if no row runs."""
        self.drained: asyncio.Event | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        lengths = [min(self.length(prompt, index), sampling.max_tokens) for index in range(sampling.group)]
        known = {handle.header.index: handle.header for handle in begun}
        request = Request(prompt, lengths, asyncio.get_running_loop().create_future(), known)
        if not any(request.missing(index) for index in range(sampling.group)):
            return [self._handle(request, index) for index in range(sampling.group)]
        self._catch_up()
        self.waiting.append(request)
        self._schedule()
        try:
            return await request.answer
        finally:
            if not request.answer.done() or request.answer.cancelled():
                self._abort(request)

    async def release(self, numbers: Collection[int] = ()) -> None:
        self._catch_up()
        for request in [*self.running, *self.waiting]:
            if not request.answer.done() and (not numbers or request.prompt.number in numbers):
                request.answer.set_result(self._current_members(request))
                self._abort(request)

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        clock = asyncio.get_running_loop().time
        began, thrown = clock(), 0
        self.paused = True
        if mode == "drain" and self.running:
            self.drained = asyncio.Event()
            await self.drained.wait()
            self.drained = None
        self._catch_up()
        stopped = clock()
        if mode == "restart":
            begun = [*self.running, *self.waiting]
            thrown = sum(handle.header.tokens for request in begun for handle in self._current_members(request))
            self.waiting.extendleft(reversed(self.running))
            for request in self.waiting:
                request.begun = {}
            self.running.clear()
            self.rows.clear()
            self.count, self.context, self.unread = 0, 0.0, 0.0
        self.loading = True
        self._schedule()
        if self.load:
            await self.cores.work(self.load)
        loaded = clock()
        shared = sum((request.left - 1) * len(request.prompt.tokens) for request in self.running)
        if self.rebuilds and (prefill := self.read(int(self.context) - shared)):
            await self.cores.work(prefill)
        self._catch_up()
        self.loading = False
        self.version = weights.version
        for request in self.running:
            request.versions.append((self.steps, self.version))
        self.paused = False
        self._schedule()
        rebuild = clock() - loaded
        return Loaded(str(self.version), wait=stopped - began, load=loaded - stopped, rebuild=rebuild, thrown=thrown)

    # --- time passes ---------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        now = self.cores.time()
        if self.count and not self.loading:
            reading = min(self.unread, now - self.at)
            self.unread -= reading
            self._step(self._steps(now - self.at - reading))
        self.at = now

    def _step(self, steps: float) -> None:
        self.steps += steps
        self.context += steps * self.count

    def _seconds(self, steps: float) -> float:
        """Return the seconds of the next `steps` steps; steps get longer because their rows grow."""
        first = self.step(self.count) + self.per_token * self.context
        return steps * first + self.per_token * self.count * steps**2 / 2

    def _steps(self, seconds: float) -> float:
        """Return the number of steps in the next `seconds` seconds: the inverse of `_seconds`."""
        first, more = self.step(self.count) + self.per_token * self.context, self.per_token * self.count
        return 2 * seconds / (first + sqrt(first**2 + 2 * more * seconds))

    def _schedule(self) -> None:
        """Give slots to waiting requests that fit, and set the timer to the end of the next row."""
        if self.at == self.filling or not self.count or self.slots - self.count >= self.gather:
            self.filling = self.at
            while self.waiting and not self.paused and self.count + len(self.waiting[0].lengths) <= self.slots:
                self._start(self.waiting.popleft())
        if self.work:
            self.cores.cancel(self.work)
            self.work = None
        while self.rows and self.rows[0][2] not in self.running:  # aborted
            heapq.heappop(self.rows)
        if self.rows and not self.loading:
            seconds = self.unread + self._seconds(max(self.rows[0][0] - self.steps, 0.0))
            self.work = self.cores.begin(seconds, self._end)

    def _start(self, request: Request) -> None:
        missing = {index: lacks for index in range(len(request.lengths)) if (lacks := request.missing(index))}
        request.left, request.began = len(missing), self.steps
        request.versions = [(self.steps, self.version)]
        self.running[request] = None
        self.count += len(missing)
        self.context += sum(request.whole(index) - lacks for index, lacks in missing.items())
        self.unread += self.read(request.unread())
        for index, tokens in missing.items():
            heapq.heappush(self.rows, (self.steps + tokens, self.seated, request, index))
            self.seated += 1

    def _end(self) -> None:
        """Complete the next row, and all rows that end at the same step."""
        self._catch_up()
        self._step(max(0.0, self.rows[0][0] - self.steps))
        while self.rows and self.rows[0][0] <= self.steps + 1e-6:
            end, _, request, index = heapq.heappop(self.rows)
            if request not in self.running:
                continue
            self._remove_row(end, request, index)
            request.left -= 1
            if request.left == 0:
                del self.running[request]
                if not request.answer.done():
                    request.answer.set_result([self._handle(request, index) for index in range(len(request.lengths))])
        if self.drained and not self.running:
            self.drained.set()
        self._schedule()

    def _remove_row(self, end: float, request: Request, index: int) -> None:
        """Remove a row that ends, or would have ended, at step `end`."""
        self.count -= 1
        self.context = self.context - request.whole(index) + (end - self.steps) if self.count else 0.0

    def _abort(self, request: Request) -> None:
        self._catch_up()
        if request in self.running:
            del self.running[request]
            for end, _, other, index in self.rows:
                if other is request:
                    self._remove_row(end, request, index)
        else:
            self.waiting.remove(request)
        if self.drained and not self.running:
            self.drained.set()
        self._schedule()

    def _handle(self, request: Request, index: int, steps: int | None = None) -> Handle:
        """Return a member: complete if `steps` is None, else in its state that many steps after it got its slot."""
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

    def _current_members(self, request: Request) -> list[Handle]:
        """Return the members of a group in their current state, without members that have no token."""
        steps = int(self.steps - request.began) if request in self.running else 0
        members = [self._handle(request, index, steps) for index in range(len(request.lengths))]
        return [handle for handle in members if handle.header.tokens]


class Server:
    def __init__(self, cost: Cost, cores: Cores | None = None) -> None:
        self.cost, self.cores = cost, cores or Cores()
        self.turn = asyncio.Lock()

    async def work(self, tokens: int) -> None:
        async with self.turn:
            await self.cores.work(self.cost(tokens))


class SleepScorer(Server):
    async def score(self, group: Group) -> list[Handle]:
        await self.work(sum(handle.header.tokens for handle in group))
        return list(group)

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[TextScores]:
        await self.work(sum(len(text.tokens) for text in texts))
        return [TextScores(text.action_logp) for text in texts]


class SleepLearner(Server):
    steps = 0

    async def prepare(self, batch: Batch) -> list[Counts]:
        return [counts_of(group) for group in batch.groups]

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        await self.work(sum(header.tokens for header in batch.headers))
        return [by_lag(batch.update - 1 - header.oldest) for header in batch.headers]

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        await asyncio.sleep(0)
        self.steps += 1
        return {}

    async def quote(self, batch: Batch) -> list[Quote]:
        return []  # responses have no tokens to show

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        return [by_lag(self.steps - header.oldest) for header in batch.headers]

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        return {"drift/k3_kl": 0.0, "drift/ppl_ratio": 1.0}  # nothing drifts

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        return WeightsRef((), None, self.steps), str(self.steps)

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        (path / "steps").write_text(str(self.steps))
        write_groups(path, groups)

    async def restore(self, path: Path) -> Sequence[Group]:
        self.steps = int((path / "steps").read_text())
        return read_groups(path)


def by_lag(lag: int) -> SampleFreshness:
    """Return the freshness weight of a sample if student and teacher have not drifted: 1 / (lag + 1)."""
    f = 1 / (max(0, lag) + 1)
    return SampleFreshness(lag=lag, roll=0.0, sup=0.0, roll_coverage=1.0, sup_coverage=1.0, f=f, w=f)
