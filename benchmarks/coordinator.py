"""Cost of the pipeline itself: no-op engines on one core, and ten thousand rollout workers on a virtual clock.

    python benchmarks/coordinator.py [--repeats 5]

Every sample goes the whole way: credit, dispatch, rollout, score, batch, update, publish, ledger, metrics, trace. The
engines answer at once with records that hold a header only, so what is left is the coordinator.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config.learner import LearnerConfig
from slipstream.config.running import CheckpointConfig, HealthConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Async
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Header, Prompt
from slipstream.run_dir.writing import RunLog
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer

PROMPTS = Prompts([Row(id="p", prompt="x")], [np.array([1], np.int32)], seed=0, shuffle=False)


class NoSampler:
    """Answers at once."""

    version = 0

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        await asyncio.sleep(0)
        return [
            Handle(
                Header(
                    prompt=prompt.id,
                    number=prompt.number,
                    index=index,
                    episode=index,
                    data_source="x",
                    prompt_tokens=1,
                    tokens=100,
                    versions=((self.version, 100),),
                    finish="eos",
                    rewards={"exact": 1.0},
                ),
                None,
            )
            for index in range(sampling.group)
        ]

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        self.version = weights.version
        return Loaded(str(self.version))


class NoScorer:
    async def score(self, group: Group) -> list[Handle]:
        await asyncio.sleep(0)
        return list(group)


def config(*, updates: int, batch: int, group: int) -> Config:
    return Config(
        student="none",
        teachers={"main": TeacherConfig(model="none", recheck=0)},
        updates=updates,
        sampler=SamplerConfig(group=group, max_tokens=100_000),
        learner=LearnerConfig(batch_size=batch),
        schedule=Async(tau=4),
        checkpoint=CheckpointConfig(minutes=0),
        health=HealthConfig(canary=0),
    )


def timed(settings: Config, engines: Engines, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> float:
    """Wall-clock seconds of a whole run."""
    with tempfile.TemporaryDirectory() as path, RunLog(Path(path), []) as log:
        work = Run(settings, engines, PROMPTS, log).train()
        began = time.perf_counter()
        run(work)
        return time.perf_counter() - began


def no_op(*, updates: int, batch: int, group: int) -> float:
    """Samples per second."""
    learner = SleepLearner(lambda _: 0.0)
    engines = Engines(samplers=(NoSampler(),), scorers={"": (NoScorer(),)}, learner=learner, close=lambda: None)
    return updates * batch / timed(config(updates=updates, batch=batch, group=group), engines, asyncio.run)


def simulated(workers: int, *, updates: int) -> float:
    """Wall-clock microseconds per sample with so many rollout workers, eight samples of an update for each."""
    batch = 8 * workers

    def length(prompt: Prompt, index: int) -> int:
        return 1 + int(random.Random(prompt.number).lognormvariate(6, 1))

    engines = Engines(
        samplers=tuple(SleepSampler(length, step=lambda rows: 0.02 + 0.0001 * rows) for _ in range(workers)),
        scorers={"": (SleepScorer(lambda tokens: 1e-9 * tokens),)},
        learner=SleepLearner(lambda tokens: 5.0),
        close=lambda: None,
    )
    seconds = timed(config(updates=updates, batch=batch, group=1), engines, virtual.run)
    return seconds / (updates * batch) * 1e6


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle}   [{low} … {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for group in (1, 8):
        speeds = [no_op(updates=40, batch=1024, group=group) for _ in range(args.repeats)]
        print(f"no-op engines, groups of {group}: {spread(speeds, ',.0f')} samples/s", flush=True)
    for workers, updates in ((10, 400), (100, 40), (1000, 8), (10_000, 6)):
        costs = [simulated(workers, updates=updates) for _ in range(1 if workers > 1000 else args.repeats)]
        print(f"{workers:6,} virtual rollout workers: {spread(costs, '.0f')} µs per sample", flush=True)


if __name__ == "__main__":
    main()
