"""Throughput against workers: the real pipeline on a virtual clock, with the costs that two short runs here had.

    python benchmarks/workers.py [--updates 12] [--measured 8]

A synchronous run with 8 rows at a time and one with 64 say what a decoding step costs, how fast teacher and learner
are, how long a publish takes and how long responses get. Then `periodic`, 32 prompts of 32 responses an update: with
one learner and ever more samplers, and with four samplers for each rank of the learner, as in Periodic Asynchrony's
Table 4 (2511.18871). Ranks are taken to share an update out evenly, and scorers to be enough.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from slipstream.config.file import load
from slipstream.config.learner import LearnerConfig
from slipstream.config.running import CheckpointConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Periodic
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.metrics import throughput
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines
from slipstream.records import Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs.start import train
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer

DEMO = Path(__file__).parent.parent / "configs" / "arithmetic.toml"
FEW, MANY, SLOTS = 8, 64, 64
PROMPTS, GROUP = 32, 32
ONE = Prompts([Row(id="p", prompt="x")], [np.array([1], np.int32)], seed=0, shuffle=False)


@dataclass(frozen=True)
class Costs:
    step: float
    """Seconds of a decoding step, and of each row in it."""
    row: float
    scored: float
    """Seconds of a token."""
    learned: float
    publish: float
    lengths: Sequence[int]


def measured(updates: int) -> Costs:
    seconds_of_step, lines, ledger = list[float](), list[dict[str, Any]](), list[dict[str, Any]]()
    for slots in (FEW, MANY):
        with tempfile.TemporaryDirectory() as path:
            changes = {
                "output": f"{path}/run",
                "updates": str(updates),
                "schedule.kind": "sync",
                "sampler.slots": str(slots),
                "runtime.kind": "inline",
                "eval.every": "0",
            }
            run = train(load(DEMO, list(changes.items())), Console(quiet=True), name="run", checks=False)
            lines, ledger = read_lines(run / "metrics.jsonl")[2:], read_lines(run / "ledger.jsonl")
        seconds_of_step.append(slots * spent(lines, "rollout"))
    few, many = seconds_of_step
    row = max(0.0, (many - few) / (MANY - FEW))
    return Costs(
        step=many - MANY * row,
        row=row,
        scored=spent(lines, "score"),
        learned=spent(lines, "learn"),
        publish=fmean(line["publish/load"] for line in lines if "publish/load" in line),
        lengths=[length for entry in ledger for length in entry["tokens"]],
    )


def spent(lines: Sequence[dict[str, Any]], stage: str) -> float:
    """Seconds of a stage for each token."""
    seconds = sum(line[f"stage/{stage}"] * line["seconds/update"] for line in lines)
    return float(seconds / sum(line["tokens"] for line in lines))


def speed(costs: Costs, samplers: int, ranks: int, updates: int) -> tuple[float, float]:
    """Trained tokens per virtual second, and how busy the learner is."""

    def length(prompt: Prompt, index: int) -> int:
        return random.Random(prompt.number * GROUP + index).choice(costs.lengths)

    config = Config(
        student="none",
        teachers={"main": TeacherConfig(model="none", recheck=0)},
        updates=updates,
        sampler=SamplerConfig(max_tokens=max(costs.lengths), group=GROUP),
        learner=LearnerConfig(batch_size=PROMPTS * GROUP),
        schedule=Periodic(),
        checkpoint=CheckpointConfig(minutes=0),  # of virtual time
    )
    engines = Engines(
        samplers=tuple(
            SleepSampler(length, step=lambda rows: costs.step + costs.row * rows, slots=SLOTS, load=costs.publish)
            for _ in range(samplers)
        ),
        scorers={"": tuple(SleepScorer(lambda tokens: tokens * costs.scored) for _ in range(samplers))},
        learner=SleepLearner(lambda tokens: tokens * costs.learned / ranks),
        close=lambda: None,
    )
    with tempfile.TemporaryDirectory() as path:
        with RunLog(Path(path), [], trace=False) as log:
            virtual.run(Run(config, engines, ONE, log).train())
        lines = read_lines(Path(path) / "metrics.jsonl")
    busy = fmean(line["stage/learn"] for line in lines[2:])
    return throughput([line["tokens"] for line in lines], [line["time"] for line in lines], warmup=2), busy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--measured", type=int, default=8, help="updates of each run from which costs are taken")
    args = parser.parse_args()
    costs = measured(args.measured)
    print(
        f"a step {1e3 * costs.step:.1f} ms and {1e6 * costs.row:.0f} µs a row; a token {1e6 * costs.scored:.0f} µs to "
        f"score, {1e6 * costs.learned:.0f} µs to learn from; a publish {1e3 * costs.publish:.0f} ms; responses "
        f"{fmean(costs.lengths):.0f} tokens on average"
    )
    table(costs, [(samplers, 1) for samplers in (1, 2, 4, 8, 16, 32)], args.updates)
    table(costs, [(4 * ranks, ranks) for ranks in (1, 2, 4, 8)], args.updates)


def table(costs: Costs, sizes: Sequence[tuple[int, int]], updates: int) -> None:
    print(f"{'samplers':>10}{'ranks':>10}{'tokens/s':>12}{'of linear':>12}{'learner busy':>14}")
    found = [speed(costs, samplers, ranks, updates) for samplers, ranks in sizes]
    each = found[0][0] / sizes[0][0]
    for (samplers, ranks), (tokens, busy) in zip(sizes, found, strict=True):
        print(f"{samplers:10}{ranks:10}{tokens:12,.0f}{tokens / (each * samplers):12.0%}{busy:14.0%}")


if __name__ == "__main__":
    main()
