"""Measurement of the costs of a run's stages on its own engines: first a short run, then each stage alone.

On CPUs, costs are CPU seconds, so that other load on the machine does not count; on GPUs they are wall-clock seconds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config.costs import Costs, DecodeCost, LearnCost, Lengths, PassCost, PublishCost, ScoreCost, quantiles
from slipstream.config.schema import Config
from slipstream.engines.native.config import ENOUGH, PASSES_APART
from slipstream.errors import ConfigError
from slipstream.pipeline.run import Run
from slipstream.plan import checks
from slipstream.plan.plan import Plan, on_cpu
from slipstream.planning.fit import Paid, Terms, fitted_to_fastest
from slipstream.planning.simulate import Split, Work, forecast
from slipstream.protocols import Engines, Sampling
from slipstream.records import Batch, Group, total
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes.places import cpu_seconds

REPEATS = 3
UPDATES = 10
"""Number of updates of the short run."""


class Meter:
    """Stopwatch for calls of engines, in CPU seconds or wall-clock seconds."""

    def __init__(self, engines: Engines, *, by_cpu: bool) -> None:
        self.engines, self.by_cpu = engines, by_cpu

    async def of(self, worker: str, work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
        """Return the seconds of `work` (CPU: mean of workers whose names begin with `worker`) and its result."""
        before = await self._clock(worker)
        result = await work()
        return await self._clock(worker) - before, result

    async def _clock(self, worker: str) -> float:
        if not self.by_cpu:
            return time.perf_counter()
        if apart := await cpu_seconds(self.engines):
            return fmean(seconds for name, seconds in apart.items() if name.startswith(worker))
        return await engines_cpu(self.engines)


def cores_of(config: Config) -> float | None:
    """Return the number of CPU cores that engines share: 1 if they run in one process, None if they use GPUs."""
    if config.runtime.kind == "inline":
        return 1.0
    return float(len(os.sched_getaffinity(0))) if on_cpu(config) else None


def check_measurable(made: Plan) -> None:
    if made.config.environment is not None:
        raise ConfigError("environment: the cost of its turns cannot be measured yet: give --costs")
    if len(made.config.teachers) > 1:
        raise ConfigError(f"{len(made.config.teachers)} teachers: their costs cannot be separated: give --costs")


def measured(made: Plan, engines: Engines, *, say: Callable[[str], None]) -> Costs:
    """Return costs of stages measured alone; on CPUs, scale them to the short run, in which stages share the cores."""
    by_cpu = cores_of(made.config) is not None
    costs, spent = asyncio.run(stage_costs(made, engines, by_cpu=by_cpu, say=say))
    return costs.scaled(spent / simulated_work(costs, made, engines)) if by_cpu else costs


async def stage_costs(made: Plan, engines: Engines, *, by_cpu: bool, say: Callable[[str], None]) -> tuple[Costs, float]:
    """Return the costs of each stage alone, and the CPU seconds of all engines per sample of the short run."""
    meter = Meter(engines, by_cpu=by_cpu)
    say(f"costs: a short run of {UPDATES} updates")
    await warm_up(made, engines, meter)
    coordinator, spent, responses = await short_run(made, engines)
    say("costs: decoding, and reading prompts")
    waves, groups = await decoding(made, engines, meter)
    decode, read = decode_cost(waves)
    say("costs: scoring, learning and publishing")
    costs = Costs(
        cores=cores_of(made.config),
        decode=decode,
        read=read,
        score=await scoring(made, engines, meter, groups) if engines.scorers.keys() - {""} else ScoreCost(),
        learn=await learning(made, engines, meter, groups),
        publish=await publishing(engines, meter),
        lengths=Lengths(
            prompt=round(fmean(group[0].header.prompt_tokens for group in groups)), responses=quantiles(responses)
        ),
        coordinator=coordinator,
    )
    return costs, spent


def simulated_work(costs: Costs, made: Plan, engines: Engines) -> float:
    """Return the CPU seconds per sample that engines with these costs would need in a simulated short run."""
    costs = costs.model_copy(update={"coordinator": 0.0})
    config, scorers = made.config, sum(map(len, engines.scorers.values()))
    split = Split(len(engines.samplers), scorers, config.learner.ranks)
    return forecast(costs, split, config.schedule, Work.of(config), updates=UPDATES, teacher=bool(config.teachers)).work


async def warm_up(made: Plan, engines: Engines, meter: Meter) -> None:
    """Call every engine once before measuring, because first calls are slower."""
    await checks.publish(engines)
    count = max(1, made.engines.sampler.slots // made.sampling.group)
    _, groups = await wave(made, engines, meter, made.sampling, range(count))
    await engines.learner.compare(Batch(tuple(await checks.scored(engines, groups)), 1))


async def short_run(made: Plan, engines: Engines) -> tuple[float, float, list[int]]:
    """Return CPU seconds per sample of the coordinator and of all engines, and the lengths of all responses."""
    quiet = made.config.eval.model_copy(update={"every": 0})
    config = made.config.model_copy(update={"updates": UPDATES, "eval": quiet})
    with tempfile.TemporaryDirectory() as path:
        with RunLog.create(config, Path(path) / "run") as log:
            began, before = time.thread_time(), await engines_cpu(engines)
            await Run(config, engines, made.prompts, log, say=lambda _: None).train()
            coordinator, spent = time.thread_time() - began, await engines_cpu(engines) - before
        lengths = [n for line in read_lines(Path(path) / "run" / "ledger.jsonl") for n in line.get("tokens", ())]
    samples = UPDATES * config.learner.batch_size
    return coordinator / samples, spent / samples, lengths


async def engines_cpu(engines: Engines) -> float:
    apart = await cpu_seconds(engines)
    # engines without processes are threads of this process, so subtract the thread of the event loop
    return sum(apart.values()) if apart else time.process_time() - time.thread_time()


async def decoding(made: Plan, engines: Engines, meter: Meter) -> tuple[list[Paid], list[Group]]:
    """Time waves (groups decoded together) of several sizes, with one token or full length; return times and groups."""
    size, slots = made.sampling.group, made.engines.sampler.slots
    counts = sorted({max(1, rows // size) for rows in (size, slots // 8, slots // 2, slots)})
    waves, full_groups, number = list[Paid](), list[Group](), 0
    for _ in range(REPEATS):
        for tokens in (1, made.sampling.max_tokens):
            for count in counts:
                sampling = replace(made.sampling, max_tokens=tokens)
                seconds, groups = await wave(made, engines, meter, sampling, range(number, number + count))
                number += count
                waves.append(Paid(seconds, paid_for(groups), f"{tokens}, {count}"))
                if tokens > 1:
                    full_groups += groups
    return waves, full_groups


async def wave(
    made: Plan, engines: Engines, meter: Meter, sampling: Sampling, numbers: range
) -> tuple[float, list[Group]]:
    sampler = engines.samplers[0]

    async def roll() -> list[Group]:
        return list(await asyncio.gather(*(sampler.generate(made.prompts.at(n), sampling) for n in numbers)))

    return await meter.of("sampler", roll)


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
    return (
        DecodeCost(step=found["step"], row=found["row"], context=found["context"]),
        PassCost(call=found["call"], token=found["token"]),
    )


async def scoring(made: Plan, engines: Engines, meter: Meter, groups: Sequence[Group]) -> ScoreCost:
    """Return the cost of scoring, measured by calls with many groups and by calls with a single group."""
    paid, some = list[Paid](), groups[-made.config.groups_per_update :]
    one = replace(engines, scorers={name: scorers[:1] for name, scorers in engines.scorers.items()})
    for _ in range(REPEATS):
        for call in (some, *([group] for group in some[:4])):
            seconds, _ = await meter.of("scorer", partial(checks.scored, one, call))
            paid.append(Paid(seconds, {"call": 1.0, "token": tokens_of(call)}, str(len(call))))
    found = fitted_to_fastest(paid)
    native = made.engines.scorers
    budget = next(iter(native.values())).token_budget if native else 0
    return ScoreCost(call=found["call"], token=found["token"], apart=PASSES_APART, enough=max(1, budget // ENOUGH))


def tokens_of(groups: Sequence[Group]) -> float:
    return float(sum(h.header.prompt_tokens + h.header.tokens for group in groups for h in group))


async def learning(made: Plan, engines: Engines, meter: Meter, groups: Sequence[Group]) -> LearnCost:
    """Return the cost of learning, measured on batches of a full update and on smaller batches."""
    scored, count = await checks.scored(engines, groups), made.config.groups_per_update
    paid, steps = list[Paid](), list[float]()
    for _ in range(REPEATS):
        for size in sorted({1, max(1, count // 4), min(count, len(scored))}):
            batch = Batch(tuple(scored[:size]), 1)

            async def learn(batch: Batch = batch) -> None:
                await engines.learner.accumulate(batch, total(await engines.learner.prepare(batch)))

            seconds, _ = await meter.of("learner", learn)
            paid.append(Paid(seconds, {"call": 1.0, "token": tokens_of(batch.groups)}, str(size)))
            steps.append((await meter.of("learner", engines.learner.step))[0])
    found, ranks = fitted_to_fastest(paid), made.config.learner.ranks
    return LearnCost(call=found["call"], token=found["token"] * ranks, step=min(steps))


async def publishing(engines: Engines, meter: Meter) -> PublishCost:
    exports, loads = list[float](), list[float]()
    for _ in range(REPEATS):
        seconds, (weights, _) = await meter.of("learner", engines.learner.export)
        exports.append(seconds)
        load = partial(engines.samplers[0].publish, weights, "drain")
        loads.append((await meter.of("sampler", load))[0])
    return PublishCost(export=min(exports), load=min(loads))
