"""Simulation of a run on other devices: the real pipeline on a virtual clock, with engines that only take time."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from slipstream.config.costs import Costs, ScoreCost
from slipstream.config.engines import ENGINES
from slipstream.config.learner import LearnerConfig
from slipstream.config.running import CheckpointConfig, HealthConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import ReuseConfig, ScheduleConfig
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.native.config import ADMISSION_SHARE
from slipstream.metrics import throughput
from slipstream.pipeline.run import Run
from slipstream.pipeline.schedules import schedule_of
from slipstream.protocols import Engines, Fingerprint, Metrics, SampleFreshness, Sampling, WeightsRef
from slipstream.records import ONE_COUNT, Batch, Counts, Group, Handle, Header, Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.cores import Cores
from slipstream.simulation.timed_engines import Length, Server, SleepLearner, SleepSampler, SleepScorer

WARMUP = 5
"""Number of first updates that speed, mean lag and idle shares of a forecast leave out."""


@dataclass(frozen=True, order=True)
class Split:
    samplers: int
    scorers: int
    ranks: int

    @property
    def devices(self) -> int:
        return self.samplers + self.scorers + self.ranks

    @property
    def workers(self) -> dict[str, int]:
        """Number of workers by stage."""
        return {"rollout": self.samplers, "score": self.scorers, "learn": self.ranks}

    def __str__(self) -> str:
        return "+".join(map(str, self.workers.values()))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of an update, independent of devices and costs."""

    batch: int
    """Number of samples of an update."""
    group: int = 1
    max_tokens: int
    slots: int
    """Number of rows of a sampler."""
    gather: int = 0
    """Number of rows of a sampler that must be free before it starts new responses."""
    minibatches: int = 1
    epochs: int = 1
    rebuilds: bool = True
    """True if a sampler recomputes the prefixes of running rows after a publish."""
    rechecked: float = 0.0
    """Share of the groups that are scored twice."""
    scored: bool = True
    """True if teachers score the responses."""
    reuse: ReuseConfig | None = None
    """Store of groups that several updates learn from."""

    @property
    def most_ranks(self) -> int:
        """Largest number of learner ranks such that each rank has a new group in every step."""
        return max(1, self.batch // self.group // (self.reuse.times if self.reuse else 1) // self.minibatches)

    @classmethod
    def of(cls, config: Config) -> Work:
        sampler, learner = config.sampler, config.learner
        rechecks, reuse = [teacher.recheck for teacher in config.teachers.values()], config.reuse
        if reuse is not None and reuse.order == "advantage":  # simulated responses have no rewards
            reuse = reuse.model_copy(update={"order": "freshness"})
        return cls(
            batch=learner.batch_size,
            group=sampler.group,
            max_tokens=sampler.max_tokens,
            slots=sampler.slots,
            gather=sampler.slots // ADMISSION_SHARE if ENGINES[sampler.engine].gathers_prompts else 0,
            minibatches=learner.minibatches,
            epochs=learner.epochs,
            rebuilds=sampler.on_publish == "rebuild",
            rechecked=fmean(rechecks) if rechecks else 0.0,
            scored=bool(rechecks),
            reuse=reuse,
        )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    samples_per_s: float
    tokens_per_s: float
    """Response tokens per second."""
    lag: float
    """Mean lag over tokens, in updates."""
    max_lag: float
    idle: dict[str, float]
    """Share of the time in which a stage's workers are idle, by stage that has workers."""
    overlap: float
    """Mean of the metric `overlap/stages`, weighted by time."""
    work: float
    """Device seconds per sample, summed over all stages."""
    first: float
    """Seconds of the `WARMUP` first updates."""

    def seconds(self, updates: int, batch: int) -> float:
        """Return the seconds of a run with this number of updates, warm-up included."""
        return self.first * min(1.0, updates / WARMUP) + max(0, updates - WARMUP) * batch / self.samples_per_s


def forecast(costs: Costs, split: Split, schedule: ScheduleConfig, work: Work, *, updates: int = 30) -> Forecast:
    config = Config(
        student="none",
        teachers={"main": TeacherConfig(model="none", recheck=work.rechecked)},
        updates=WARMUP + updates + ahead(schedule, work),
        sampler=SamplerConfig(max_tokens=work.max_tokens, group=work.group, slots=work.slots),
        learner=LearnerConfig(batch_size=work.batch, minibatches=work.minibatches, epochs=work.epochs),
        schedule=schedule,
        reuse=work.reuse,
        checkpoint=CheckpointConfig(minutes=0),  # no checkpoints, which would count virtual minutes
        health=HealthConfig(canary=0),  # simulated engines return no log-probs
    )
    with tempfile.TemporaryDirectory() as path:
        cores = Cores(math.inf if costs.cores is None else costs.cores, others=costs.others)
        made = engines(costs, split, work, cores)
        with RunLog(Path(path), [], trace=False) as log:
            virtual.run(Run(config, made, prompts(costs), log, say=lambda _: None).train())
        lines = read_lines(Path(path) / "metrics.jsonl")
    found = forecast_of(lines, cores.done, updates=updates)
    return replace(found, idle={stage: found.idle[stage] for stage, count in split.workers.items() if count})


def ahead(schedule: ScheduleConfig, work: Work) -> int:
    """Return the number of last updates to leave out: they start no new groups, so their speed differs."""
    data = schedule_of(schedule, work.batch // work.group, work.reuse)
    return math.ceil(data.credits / data.groups)


def forecast_of(lines: Sequence[dict[str, Any]], work: float, *, updates: int) -> Forecast:
    """Compute a forecast from the `updates` updates after warm-up; `work` is device seconds of the whole run."""
    samples = sum(line["samples"] for line in lines)
    lines = lines[: WARMUP + updates]
    times, late = [line["time"] for line in lines], lines[WARMUP:]
    wall = sum(line["seconds/update"] for line in late)
    stages = {"rollout": "sampler", "score": "scorer", "learn": "learner"}

    def idle(worker: str) -> float:
        names = [name for name in late[0] if name.startswith(f"idle/{worker}")]
        return float(sum(fmean(line[name] for name in names) * line["seconds/update"] for line in late) / wall)

    return Forecast(
        samples_per_s=throughput([line["samples"] for line in lines], times, warmup=WARMUP),
        tokens_per_s=throughput([line["tokens"] for line in lines], times, warmup=WARMUP),
        lag=sum(line["lag/mean"] * line["tokens"] for line in late) / sum(line["tokens"] for line in late),
        max_lag=max(line["lag/max"] for line in lines),
        idle={stage: idle(worker) for stage, worker in stages.items()},
        overlap=sum(line["overlap/stages"] * line["seconds/update"] for line in lines) / times[-1],
        work=work / samples,
        first=times[WARMUP - 1],
    )


def prompts(costs: Costs) -> Prompts:
    tokens = np.ones(costs.lengths.prompt, np.int32)
    return Prompts([Row(id="p", prompt="x")], [tokens], seed=0, shuffle=False)


def engines(costs: Costs, split: Split, work: Work, cores: Cores) -> Engines:
    coordinator = Server(lambda samples: samples * costs.coordinator / 2, cores)

    def length(prompt: Prompt, index: int) -> int:
        return min(work.max_tokens, costs.lengths.draw(prompt.number, index))

    def sampler() -> Rows:
        return Rows(
            length,
            coordinator,
            step=lambda rows: costs.decode.step + costs.decode.row * rows,
            slots=work.slots,
            load=costs.publish.load,
            context=costs.decode.context,
            read=costs.read.seconds,
            rebuilds=work.rebuilds,
            gather=work.gather,
            cores=cores,
        )

    score = costs.score if work.scored else ScoreCost()
    return Engines(
        samplers=tuple(sampler() for _ in range(split.samplers)),
        scorers={"": tuple(Passes(score, coordinator, cores) for _ in range(max(1, split.scorers)))},
        learner=Ranks(costs, split.ranks, cores),
        close=lambda: None,
    )


def sequence(header: Header) -> int:
    return header.prompt_tokens + header.tokens


class Rows(SleepSampler):
    """A simulated sampler. After each rollout of a group, it adds half of the coordinator's work on that group."""

    def __init__(self, length: Length, coordinator: Server, **options: Any) -> None:
        super().__init__(length, **options)
        self.coordinator = coordinator

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        await self.coordinator.work(len(group))
        return group


class Passes(SleepScorer):
    """A simulated scorer: one pass scores all waiting groups. Then it adds the other half of the coordinator's work."""

    def __init__(self, costs: ScoreCost, coordinator: Server, cores: Cores) -> None:
        super().__init__(costs.seconds, cores)
        self.costs, self.coordinator = costs, coordinator
        self.waiting: list[tuple[Group, asyncio.Future[None]]] = []
        self.driver: asyncio.Task[None] | None = None
        self.enough = asyncio.Event()
        self.ended = float("-inf")

    async def score(self, group: Group) -> list[Handle]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((group, answer))
        if sum(handle.header.tokens for group, _ in self.waiting for handle in group) >= self.costs.enough:
            self.enough.set()
        if self.driver is None or self.driver.done():
            self.driver = asyncio.get_running_loop().create_task(self._drive())
        await answer
        await self.coordinator.work(len(group))
        return list(group)

    async def _drive(self) -> None:
        clock = asyncio.get_running_loop().time
        while self.waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.enough.wait(), max(0.0, self.ended + self.costs.apart - clock()))
            taken, self.waiting = self.waiting, []
            self.enough.clear()
            await self.work(sum(sequence(handle.header) for group, _ in taken for handle in group))
            self.ended = clock()
            for _, answer in taken:
                if not answer.done():
                    answer.set_result(None)


class Ranks(SleepLearner):
    """A simulated learner whose ranks share the tokens of an update evenly and wait for each other."""

    def __init__(self, costs: Costs, ranks: int, cores: Cores) -> None:
        super().__init__(lambda tokens: costs.learn.call + costs.learn.token * tokens / ranks, cores)
        self.costs, self.ranks, self.update = costs, ranks, 0

    async def work(self, tokens: int) -> None:
        async with self.turn:
            await self.cores.work(self.cost(tokens), wide=self.ranks)

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        await self.work(sum(map(sequence, batch.headers)))
        self.update = batch.update
        return []

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        """Make one optimizer step; all steps of an update get the same version: the number of the update."""
        learn = self.costs.learn
        await self.cores.work(learn.step + learn.exchange * (self.ranks - 1), wide=self.ranks)
        self.steps = self.update
        return {}

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        await self.cores.work(self.costs.publish.export)
        return await super().export(teacher)
