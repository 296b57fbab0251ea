"""Native engines on modelled time: they compute for real, and a file of costs says how long that takes.

The computation happens at once, while the clock of the event loop (`ModelledLoop`) stands still. Then the engine sleeps
for the modelled seconds. So lags depend on the costs and on the seed, and not on the speed or load of this machine.
On any other event loop, for example in the start checks, no modelled time passes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from torch import Tensor

from slipstream.config.costs import Costs
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.sampling.decoding import Decoder, Read
from slipstream.engines.native.sampling.requests import Publish
from slipstream.engines.native.sampling.sampler import NativeSampler, settle
from slipstream.engines.native.scorer import Call, NativeScorer
from slipstream.protocols import Fingerprint, Loaded, Metrics, Mode, WeightsRef
from slipstream.records import ONE_COUNT, Counts
from slipstream.runtimes.build import NativeKinds
from slipstream.simulation.cores import Cores
from slipstream.simulation.virtual_clock import ModelledLoop

T = TypeVar("T")
FORWARD_COST = 1 / 3
"""Cost of a pass without a gradient, relative to a training pass."""


class ModelledTime:
    """Time that engines share: all work takes its cost, and longer if `costs.cores` are too few."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.loop: asyncio.AbstractEventLoop | None = None
        self.cores = Cores()

    async def work(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, ModelledLoop):
            return
        if loop is not self.loop:
            self.loop = loop
            self.cores = Cores(self.costs.cores or inf, others=self.costs.others)
        await self.cores.work(seconds)


def on_modelled_time(costs: Costs) -> NativeKinds:
    time = ModelledTime(costs)
    return NativeKinds(
        sampler=partial(ModelledSampler, time),
        scorer=partial(ModelledScorer, time),
        learner=partial(ModelledLearner, time),
    )


class ModelledSampler(NativeSampler):
    def __init__(self, time: ModelledTime, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.time, self.costs = time, time.costs
        self.owed = 0.0
        """Modelled seconds of the current step."""

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        clock = asyncio.get_running_loop().time
        called = clock()
        loaded = await super().publish(weights, mode)
        return replace(loaded, wait=max(0.0, clock() - called - loaded.load - loaded.rebuild))

    async def _drive(self) -> None:
        while self.busy:
            try:
                results = await asyncio.get_running_loop().run_in_executor(self.thread, self._step)
            except Exception as error:
                self.owed = 0.0
                self._fail(error)
                continue
            owed, self.owed = self.owed, 0.0
            await self.time.work(owed)
            for answer, result in results:
                settle(answer, result)

    def _load(self, publish: Publish) -> Loaded:
        before = self.owed
        found = super()._load(publish)
        rebuild, load = self.owed - before, self.costs.publish.load
        self.owed += load
        return replace(found, load=load, rebuild=rebuild)

    def _read_again(self, slots: Sequence[int], decoder: Decoder) -> None:
        rows = [self.rows[slot] for slot in slots]
        prompts = {row.request: len(row.request.prompt.tokens) for row in rows}
        self.owed += self.costs.read.seconds(sum(row.tokens for row in rows) + sum(prompts.values()))
        super()._read_again(slots, decoder)

    def _admit(self) -> list[Read]:
        reads = super()._admit()
        self.owed += self.costs.read.seconds(sum(read.stop - read.first for read in reads))
        return reads

    def _emit(self, logits_TV: Tensor, *given: Any) -> list[Any]:
        decode = self.costs.decode
        self.owed += decode.step + decode.row * len(self.rows) + decode.context * sum(row.length for row in self.rows)
        return super()._emit(logits_TV, *given)


class ModelledScorer(NativeScorer):
    def __init__(self, time: ModelledTime, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.time, self.costs = time, time.costs

    async def publish(self, weights: WeightsRef) -> Loaded:
        found = await super().publish(weights)
        await self.time.work(self.costs.publish.load)
        return replace(found, load=self.costs.publish.load)

    async def _pass(self, calls: Sequence[Call]) -> None:
        headers = [handle.header for call in calls for handle in call.group]
        await self.time.work(self.costs.score.seconds(sum(each.prompt_tokens + each.tokens for each in headers)))
        await super()._pass(calls)


class ModelledLearner(NativeLearner):
    def __init__(self, time: ModelledTime, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.time, self.costs = time, time.costs

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        found = await super().step(counts, lr)
        await self.time.work(self.costs.learn.step)
        return found

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        found = await super().export(teacher)
        await self.time.work(self.costs.publish.export)
        return found

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        before = self._tokens_passed
        found = await super()._run(work, *args)
        await self.time.work(self.costs.learn.seconds(self._tokens_passed - before))
        return found

    @property
    def _tokens_passed(self) -> float:
        """Return the tokens of all passes so far, as training tokens that take the same time.

        Tokens of a critic's own model count as the student's.
        """
        every = {self.passes, self.passes if self.critic is None else self.critic.passes}
        return sum(each.trained + FORWARD_COST * each.read for each in every)
