"""Measurement of the costs of a run's stages on its own engines: first a short run, then each stage alone.

On CPUs, costs are CPU seconds, so that other load on the machine does not count; on GPUs they are wall-clock seconds.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config.costs import Costs, DecodeCost, LearnCost, Lengths, PassCost, PublishCost, ScoreCost, quantiles
from slipstream.config.schema import Config
from slipstream.engines.native.config import PASS_INTERVAL, PASS_SHARE
from slipstream.errors import ConfigError
from slipstream.pipeline.run import Run
from slipstream.plan import checks
from slipstream.plan.facts import Facts
from slipstream.plan.plan import Plan
from slipstream.plan.rules.machine import on_cpu
from slipstream.planning.fit import Paid, Terms, fitted_to_fastest
from slipstream.planning.simulate import Split, Work, forecast
from slipstream.protocols import Engines, Sampling
from slipstream.records import Batch, Group, total
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes.workers import cpu_seconds

REPEATS = 3
UPDATES = 10
"""Number of updates of the short run."""


def shared_cores(config: Config) -> float | None:
    """Return the number of CPU cores that engines share: 1 if they run in one process, None if they use GPUs."""
    if config.runtime.kind == "inline":
        return 1.0
    return float(len(os.sched_getaffinity(0))) if on_cpu(config, Facts(config)) else None


def check_measurable(made: Plan) -> None:
    if made.config.every_environment:
        raise ConfigError("environment: the cost of its turns cannot be measured yet: give --costs")
    if len(made.config.teachers) > 1:
        raise ConfigError(f"{len(made.config.teachers)} teachers: their costs cannot be separated: give --costs")


def measured(made: Plan, engines: Engines, *, say: Callable[[str], None]) -> Costs:
    """Return costs of stages measured alone; on CPUs, scale them to the short run, in which stages share the cores."""
    bench = Bench(made, engines)
    costs, spent = asyncio.run(bench.costs(say))
    return costs.scaled(spent / bench.simulated_work(costs)) if bench.by_cpu else costs


class Bench:
    def __init__(self, made: Plan, engines: Engines) -> None:
        self.made, self.config, self.engines = made, made.config, engines
        self.by_cpu = shared_cores(made.config) is not None

    async def costs(self, say: Callable[[str], None]) -> tuple[Costs, float]:
        """Return the costs of each stage alone, and the CPU seconds of all engines per sample of the short run."""
        say(f"costs: a short run of {UPDATES} updates")
        await self.warm_up()
        coordinator, spent, responses = await self.short_run()
        say("costs: decoding, and reading prompts")
        waves, groups = await self.decoding()
        decode, read = decode_cost(waves)
        say("costs: scoring, learning and publishing")
        prompt = round(fmean(group[0].header.prompt_tokens for group in groups))
        costs = Costs(
            cores=shared_cores(self.config),
            decode=decode,
            read=read,
            score=await self.scoring(groups) if self.engines.scorers.keys() - {""} else ScoreCost(),
            learn=await self.learning(groups),
            publish=await self.publishing(),
            lengths=Lengths(prompt=prompt, responses=quantiles(responses)),
            coordinator=coordinator,
        )
        return costs, spent

    def simulated_work(self, costs: Costs) -> float:
        """Return the CPU seconds per sample that engines with these costs would need in a simulated short run."""
        costs = costs.model_copy(update={"coordinator": 0.0})
        config, scorers = self.config, sum(map(len, self.engines.scorers.values()))
        split = Split(len(self.engines.samplers), scorers, config.learner.ranks)
        return forecast(costs, split, config.schedule, Work.of(config), updates=UPDATES).work

    async def timed(self, worker: str, work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
        """Return the seconds of `work` (CPU: mean of workers whose names begin with `worker`) and its result."""
        before = await self._clock(worker)
        result = await work()
        return max(0.0, await self._clock(worker) - before), result  # two clocks may round against each other

    async def _clock(self, worker: str) -> float:
        if not self.by_cpu:
            return time.perf_counter()
        if apart := await cpu_seconds(self.engines):
            return fmean(seconds for name, seconds in apart.items() if name.startswith(worker))
        return await self._engines_cpu()

    async def _engines_cpu(self) -> float:
        apart = await cpu_seconds(self.engines)
        # engines without processes are threads of this process, so subtract the thread of the event loop
        return sum(apart.values()) if apart else time.process_time() - time.thread_time()

    async def warm_up(self) -> None:
        """Call every engine once before measuring, because first calls are slower."""
        await checks.publish(self.engines)
        count = max(1, self.made.engines.sampler.slots // self.made.sampling.group)
        _, groups = await self.wave(self.made.sampling, range(count))
        await self.engines.learner.compare(Batch(tuple(await checks.scored(self.engines, groups)), 1))

    async def short_run(self) -> tuple[float, float, list[int]]:
        """Return CPU seconds per sample of the coordinator and of all engines, and the lengths of all responses."""
        config = self.config.with_values(updates=UPDATES, eval={"every": 0}, sft=None)
        with tempfile.TemporaryDirectory() as path:
            with RunLog.create(config, Path(path) / "run") as log:
                began, before = time.thread_time(), await self._engines_cpu()
                whole = self.made.whole_batches
                run = Run(config, self.engines, self.made.prompts, log, whole_batches=whole, say=lambda _: None)
                await run.train()
                coordinator, spent = time.thread_time() - began, await self._engines_cpu() - before
            lengths = [n for line in read_lines(Path(path) / "run" / "ledger.jsonl") for n in line.get("tokens", ())]
        samples = UPDATES * config.learner.batch_size
        return coordinator / samples, spent / samples, lengths

    async def decoding(self) -> tuple[list[Paid], list[Group]]:
        """Time waves (groups decoded together) of several sizes and lengths; also return the full-length groups."""
        full, slots = self.made.sampling, self.made.engines.sampler.slots
        counts = sorted({max(1, rows // full.group) for rows in (full.group, slots // 8, slots // 2, slots)})
        waves, full_groups, number = list[Paid](), list[Group](), 0
        for _ in range(REPEATS):
            for tokens, count in product((1, full.max_tokens), counts):
                seconds, groups = await self.wave(replace(full, max_tokens=tokens), range(number, number + count))
                number += count
                waves.append(Paid(seconds, paid_for(groups), f"{tokens}, {count}"))
                if tokens > 1:
                    full_groups += groups
        return waves, full_groups

    async def wave(self, sampling: Sampling, numbers: range) -> tuple[float, list[Group]]:
        sampler, prompts = self.engines.samplers[0], self.made.prompts

        async def roll() -> list[Group]:
            return list(await asyncio.gather(*(sampler.generate(prompts.at(n), sampling) for n in numbers)))

        return await self.timed("sampler", roll)

    async def scoring(self, groups: Sequence[Group]) -> ScoreCost:
        some = groups[-self.config.groups_per_update :]
        one = replace(self.engines, scorers={name: scorers[:1] for name, scorers in self.engines.scorers.items()})
        paid = list[Paid]()
        for call in [some, *([group] for group in some[:4])] * REPEATS:
            seconds, _ = await self.timed("scorer", partial(checks.scored, one, call))
            paid.append(Paid(seconds, {"call": 1.0, "token": tokens_of(call)}, str(len(call))))
        native = self.made.engines.scorers
        budget = next(iter(native.values())).token_budget if native else 0
        return ScoreCost(**fitted_to_fastest(paid), apart=PASS_INTERVAL, enough=max(1, budget // PASS_SHARE))

    async def learning(self, groups: Sequence[Group]) -> LearnCost:
        learner, count = self.engines.learner, self.config.groups_per_update
        scored = await checks.scored(self.engines, groups)
        paid, steps = list[Paid](), list[float]()
        for size in sorted({1, max(1, count // 4), min(count, len(scored))}) * REPEATS:
            batch = Batch(tuple(scored[:size]), 1)

            async def learn(batch: Batch = batch) -> None:
                await learner.accumulate(batch, total(await learner.prepare(batch)))

            seconds, _ = await self.timed("learner", learn)
            paid.append(Paid(seconds, {"call": 1.0, "token": tokens_of(batch.groups)}, str(size)))
            steps.append((await self.timed("learner", learner.step))[0])
        found = fitted_to_fastest(paid)
        return LearnCost(call=found["call"], token=found["token"] * self.config.learner.ranks, step=min(steps))

    async def publishing(self) -> PublishCost:
        exports, loads = list[float](), list[float]()
        for _ in range(REPEATS):
            seconds, (weights, _) = await self.timed("learner", self.engines.learner.export)
            exports.append(seconds)
            load = partial(self.engines.samplers[0].publish, weights, "drain")
            loads.append((await self.timed("sampler", load))[0])
        return PublishCost(export=min(exports), load=min(loads))


def paid_for(groups: Sequence[Group]) -> Terms:
    """Return how often each cost is paid in a wave; the number of steps is the length of the longest response."""
    headers = [handle.header for group in groups for handle in group]
    return {
        "step": max(header.tokens for header in headers),
        "row": sum(header.tokens for header in headers),
        "context": sum(h.tokens * (h.prompt_tokens + h.tokens / 2) for h in headers),
        "call": 1.0,
        "token": sum(group[0].header.prompt_tokens for group in groups),
    }


def decode_cost(waves: Sequence[Paid]) -> tuple[DecodeCost, PassCost]:
    found = fitted_to_fastest(waves)
    decode = DecodeCost(step=found["step"], row=found["row"], context=found["context"])
    return decode, PassCost(call=found["call"], token=found["token"])


def tokens_of(groups: Sequence[Group]) -> float:
    return float(sum(h.header.prompt_tokens + h.header.tokens for group in groups for h in group))
