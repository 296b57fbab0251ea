"""A toy run on a virtual clock, which is begun, stopped and gone on with in milliseconds."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.learner import LearnerConfig
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import CheckpointConfig, EvalConfig, HealthConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoints, newest
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, GradingSampler
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy

VOCAB = 6
PROMPTS = Prompts(
    [Row(id=str(i), prompt="x") for i in range(10)],
    [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(10)],
    seed=0,
    shuffle=True,
)
HELD_OUT = {"": [PROMPTS.at(1000), PROMPTS.at(1001)]}


def config(
    schedule: Any,
    *,
    updates: int = 8,
    freshness: FreshnessConfig | None = None,
    evals: int = 0,
    sections: Mapping[str, Any] | None = None,
    **checkpoint: float,
) -> Config:
    """`evals` is how many updates are between two evaluations; `sections` replace those of the config."""
    evaluated = {"eval": EvalConfig(every=evals), "task": TaskConfig(reward=("./own.py:ended",))} if evals else {}
    made = Config(
        student="toy",
        teachers={"main": TeacherConfig(model="toy")},
        updates=updates,
        sampler=SamplerConfig(max_tokens=10, group=2),
        learner=LearnerConfig(batch_size=6),
        schedule=schedule,
        freshness=freshness,
        checkpoint=CheckpointConfig(**{"every": 2, "keep": 9} | checkpoint),
        health=HealthConfig(canary=0),  # which takes time
    )
    return made.model_copy(update=evaluated | dict(sections or {}))


def engines(*, score: float = 0.5, freshness: FreshnessConfig | None = None) -> Engines:
    student = toy.random_table(VOCAB, seed=0)
    return Engines(
        samplers=(GradingSampler(toy.ToySampler(student, seconds=0.3), toy.ToyGrader()),),
        scorers={"": (toy.ToyScorer(toy.random_table(VOCAB, seed=1, scale=2.0), cost=lambda _: score),)},
        learner=toy.ToyLearner(student, cost=lambda _: 1.0, freshness=freshness),
        close=lambda: None,
    )


def go(
    path: Path,
    schedule: Any,
    *,
    until: float | None = None,
    number: int | None = None,
    score: float = 0.5,
    prompts: Prompts = PROMPTS,
    changes: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> toy.ToyLearner:
    """Begin or go on (from this checkpoint), and stop as Ctrl-C does after so many virtual seconds."""
    settings = config(schedule, **sizes).model_copy(update=changes)
    made = engines(score=score, freshness=settings.freshness)

    async def work() -> None:
        if (path / "checkpoints").exists():
            checkpoint = newest(path, number)
            state = await checkpoint.restore(made.learner)
            Checkpoints(path / "checkpoints").forget_after(state.admission.version)
            log = RunLog.reopen(settings, path, checkpoint.mark)
        else:
            state, log = BEGINNING, RunLog.create(settings, path)
        with log:
            run = Run(settings, made, prompts, log, state=state, held_out=HELD_OUT)
            task = asyncio.create_task(run.train())
            await asyncio.wait([task], timeout=until)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            else:
                task.result()

    virtual.run(work())
    assert isinstance(made.learner, toy.ToyLearner)
    return made.learner


def ends(path: Path) -> list[int]:
    return sorted(entry["number"] for entry in read_lines(path / "ledger.jsonl") if entry["end"] == "trained")
