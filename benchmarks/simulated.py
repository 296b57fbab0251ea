"""Schedules on eight devices that are not here: the real pipeline on a virtual clock, with engines that only take time.

    python benchmarks/simulated.py [--updates 30]

The layout of the papers: one teacher, four rollout workers, three trainers; strictly synchronous runs share seven
devices in turn between rollout and training. Responses are log-normal, cut at 16k tokens; the sweep is over their mean
and over how long their tail is. The costs below are assumptions of the order that a 4B student and a sparse 30B teacher
have on current GPUs, so read the ratios, and how they move with the tail, and not the seconds.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config.schedule import Async, Periodic, StepOff, Sync
from slipstream.config.schema import CheckpointConfig, Config, LearnerConfig, SamplerConfig, TeacherConfig
from slipstream.engines.base import Engines
from slipstream.engines.sleep import SleepLearner, SleepSampler, SleepScorer
from slipstream.metrics import throughput
from slipstream.pipeline.run import Run
from slipstream.records import Prompt
from slipstream.runlog import RunLog, read_lines
from slipstream.runtimes import virtual
from slipstream.tasks.data import Prompts, Row

BATCH, LONGEST, SLOTS = 256, 16384, 128
PUBLISH = 1.0
TRAINED, SCORED = 10_000, 40_000
"""Tokens per second of one trainer and of the teacher."""
SCHEDULES = {
    "sync": Sync(),
    "periodic": Periodic(),
    "step_off(1)": StepOff(k=1),
    "async(1)": Async(tau=1),
    "async(4)": Async(tau=4),
}
PROMPTS = Prompts([Row(id="p", prompt="x")], [np.array([1], np.int32)], seed=0, shuffle=False)


def step(rows: int) -> float:
    """Seconds of one decoding step of so many rows."""
    return 0.015 + 0.0002 * rows


def lengths(mean: float, sigma: float) -> Callable[[Prompt, int], int]:
    mu = math.log(mean) - sigma**2 / 2

    def length(prompt: Prompt, index: int) -> int:
        return max(1, min(LONGEST, int(random.Random(prompt.number).lognormvariate(mu, sigma))))

    return length


def speed(schedule: Any, *, mean: float, sigma: float, updates: int) -> tuple[float, float, float]:
    """Trained tokens per virtual second, overlap of all that keeps workers busy, and mean lag."""
    rollout, trainers = (7, 7) if schedule.kind == "sync" else (4, 3)
    config = Config(
        student="none",
        teachers={"main": TeacherConfig(model="none", recheck=0)},
        updates=updates,
        sampler=SamplerConfig(max_tokens=LONGEST),
        learner=LearnerConfig(batch_size=BATCH),
        schedule=schedule,
        checkpoint=CheckpointConfig(minutes=0),  # of virtual time
    )
    engines = Engines(
        samplers=tuple(
            SleepSampler(lengths(mean, sigma), step=step, slots=SLOTS, load=PUBLISH) for _ in range(rollout)
        ),
        scorers={"": (SleepScorer(lambda tokens: tokens / SCORED),)},
        learner=SleepLearner(lambda tokens: tokens / TRAINED / trainers),
        close=lambda: None,
    )
    with tempfile.TemporaryDirectory() as path:
        with RunLog(Path(path), []) as log:
            virtual.run(Run(config, engines, PROMPTS, log).train())
        lines = read_lines(Path(path) / "metrics.jsonl")
    late = lines[5:]
    wall = sum(line["seconds/update"] for line in late)
    overlap = sum(line["overlap/busy"] * line["seconds/update"] for line in late) / wall
    lag = sum(line["lag/mean"] for line in late) / len(late)
    return throughput([line["tokens"] for line in lines], [line["time"] for line in lines]), overlap, lag


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=30)
    args = parser.parse_args()
    print(f"{'tokens/s over sync (overlap, mean lag)':40}" + "".join(f"{name:>20}" for name in list(SCHEDULES)[1:]))
    for mean in (1000, 2000, 4000):
        for sigma in (0.0, 0.5, 1.0, 1.5):
            found = {
                name: speed(schedule, mean=mean, sigma=sigma, updates=args.updates)
                for name, schedule in SCHEDULES.items()
            }
            base = found["sync"][0]
            ratios = "".join(
                f"{f'{tokens / base:.2f} ({overlap:.1f}, {lag:.1f})':>20}"
                for tokens, overlap, lag in list(found.values())[1:]
            )
            print(f"mean {mean:5,}, σ {sigma:.1f}: sync {base:7,.0f} tokens/s{'':7}{ratios}", flush=True)


if __name__ == "__main__":
    main()
