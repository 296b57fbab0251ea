"""Runs of engines that only take time, on a virtual clock."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config.learner import LearnerConfig
from slipstream.config.running import HealthConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines
from slipstream.records import Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer

PROMPTS = Prompts([Row(id="p", prompt="x")], [np.array([1], np.int32)], seed=0, shuffle=False)
TEACHERS = ["quick"] * 10 + ["slow"] * 10
TWO = Prompts(
    [Row(id=str(i), prompt="x") for i in range(20)],
    [np.array([1], np.int32)] * 20,
    seed=0,
    shuffle=True,
    teachers=TEACHERS,
)
"""Half of them each teacher's, in a random order."""


def config(schedule: Any, *, updates: int = 8, groups: int = 4, group: int = 1, **sections: Any) -> Config:
    """Sections replace those of the config without its checks: these engines have no models."""
    made = Config(
        student="sleep",
        teachers={"main": TeacherConfig(model="sleep", recheck=0)},
        updates=updates,
        sampler=SamplerConfig(max_tokens=100_000, group=group),
        learner=LearnerConfig(batch_size=groups * group),
        schedule=schedule,
        health=HealthConfig(canary=0),  # which takes time
    )
    return made.model_copy(update=sections)


def engines(
    length: Callable[[Prompt, int], int] = lambda *_: 10,
    *,
    token: float = 0.2,
    score: float = 0.25,
    learn: float = 3.0,
    samplers: int = 1,
    **options: Any,
) -> Engines:
    """By default 2 s for a rollout, a quarter of a second for the score of one and 3 s for an update."""
    return Engines(
        samplers=tuple(SleepSampler(length, step=lambda _: token, **options) for _ in range(samplers)),
        scorers={"": (SleepScorer(lambda _: score),)},
        learner=SleepLearner(lambda _: learn),
        close=lambda: None,
    )


class Simulated:
    def __init__(self, path: Path, schedule: Any, made: Engines, *, prompts: Prompts = PROMPTS, **sizes: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.lines_said: list[str] = []
        settings = config(schedule, **sizes)
        with RunLog(path, []) as log:
            self.run = Run(settings, made, prompts, log, say=self.lines_said.append)
            _, self.seconds = virtual.run(self.run.train())
        self.lines = read_lines(path / "metrics.jsonl")
        self.ledger = read_lines(path / "ledger.jsonl")

    @property
    def lags(self) -> list[tuple[float, float]]:
        return [(line["lag/mean"], line["lag/max"]) for line in self.lines]

    def trained(self) -> list[int]:
        return [entry["number"] for entry in self.ledger if entry["end"] == "trained"]


def long_tailed(seed: int) -> Callable[[Prompt, int], int]:
    def length(prompt: Prompt, index: int) -> int:
        return 1 + int(random.Random(f"{seed}/{prompt.number}/{index}").lognormvariate(2, 1))

    return length
