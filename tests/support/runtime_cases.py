"""Engines and prompts for tests of every runtime."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.learner import LearnerConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Sync
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, Sampling
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import local
from slipstream.runtimes import ray as on_ray
from support.tabular_workers import VOCAB

TESTS = str(Path(__file__).parents[1])
"""Directory from which processes import test engines."""

SAMPLING = Sampling(max_tokens=4)
RUNTIMES = [pytest.param(local, id="local"), pytest.param(on_ray, id="ray")]


def silent(_: str) -> None:
    pass


def settings(updates: int = 4, **changes: Any) -> Config:
    names = {"student": "toy", "teachers": {"main": TeacherConfig(model="toy")}}
    sizes = {"sampler": SamplerConfig(max_tokens=8, group=2), "learner": LearnerConfig(batch_size=8)}
    return Config(**(names | sizes | {"schedule": Sync(), "updates": updates} | changes))


def prompts() -> Prompts:
    tokens = [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(10)]
    rows = [Row(id=str(i), prompt="x", ground_truth="y") for i in range(10)]
    return Prompts(rows, tokens, seed=0, shuffle=True)


def losses(path: Path, config: Config, engines: Engines) -> list[float]:
    with RunLog.create(config, path) as log:
        asyncio.run(Run(config, engines, prompts(), log, say=silent).train())
    return [line["loss"] for line in read_lines(path / "metrics.jsonl")]


class Fate:
    """At the end of some updates something happens to a process: a sink of the run log."""

    every = 1

    def __init__(self, how: signal.Signals, victims: dict[int, str], pid_of: Callable[[str], int]) -> None:
        self.how, self.victims, self.pid_of = how, victims, pid_of

    def log(self, numbers: Any, step: int) -> None:
        if victim := self.victims.pop(step, ""):
            os.kill(self.pid_of(victim), self.how)

    def samples(self, quotes: Any, step: int) -> None:
        pass

    def close(self) -> None:
        pass
