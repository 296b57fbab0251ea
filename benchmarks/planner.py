"""Predictions of the planner against reality: costs measured once, then six configurations, predicted and run.

    python benchmarks/planner.py [--repeats 3] [--updates 40]

The built-in student and teacher on all cores of this machine, every engine in a process of its own. The learning rate
is next to nothing, so that answers stay as long as they were. Costs are measured anew before every round of six (CPU
seconds, so that they are of this machine whatever else runs on it), and every prediction is made before its run. Who
else computes here has a share of the cores: threads of others that are ready to run are counted while a run lasts,
`strangers` says how many there were on average, and `shared` is the prediction for so many. Where nothing else runs
both predictions are the same; elsewhere neither says much. What does is CPU milliseconds per sample, of all engines and
the coordinator: what the schedule does to the work that there is.
"""

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from slipstream.config.costs import Costs
from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.pipeline.run import Run
from slipstream.planning.measure import measured
from slipstream.planning.simulate import WARMUP, Forecast, Split, Work, ahead, forecast, forecast_of
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs.start import opened, planned_on, process_launcher
from slipstream.runtimes.workers import cpu_seconds

ARMS: dict[str, dict[str, Any]] = {
    "sync": {"schedule": {"kind": "sync"}},
    "periodic": {"schedule": {"kind": "periodic"}},
    "step_off(1)": {"schedule": {"kind": "step_off", "k": 1}},
    "async(1)": {"schedule": {"kind": "async", "tau": 1}},
    "async(4)": {"schedule": {"kind": "async", "tau": 4}},
    "async(2), groups of 4, batches of 128": {
        "schedule": {"kind": "async", "tau": 2},
        "sampler": {"group": 4},
        "learner": {"batch_size": 128},
    },
}
QUIET = Console(quiet=True)


def config(arm: dict[str, Any], *, updates: int, seed: int) -> Config:
    return parse(
        {
            "student": "builtin:student",
            "updates": updates,
            "seed": seed,
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {"max_tokens": 80, **arm.get("sampler", {})},
            "learner": {"batch_size": 64, "lr": 1e-9, **arm.get("learner", {})},
            "schedule": arm["schedule"],
        }
    )


def costs_here(seed: int) -> Costs:
    wanted = config(ARMS["async(4)"], updates=10, seed=seed)
    with process_launcher(wanted) as born:
        made = planned_on(QUIET, wanted, born)
        with opened(made, born, QUIET) as engines:
            return measured(made, engines, say=lambda _: None)


@dataclass(frozen=True)
class Found:
    seen: Forecast
    strangers: float


def run(wanted: Config, updates: int) -> Found:
    beyond = ahead(wanted.schedule, Work.of(wanted))
    wanted = wanted.model_copy(update={"updates": WARMUP + updates + beyond})
    with tempfile.TemporaryDirectory() as path, process_launcher(wanted) as born:
        made = planned_on(QUIET, wanted, born)
        with (
            opened(made, born, QUIET) as engines,
            RunLog.create(made.config, Path(path) / "run") as log,
            counting() as seen,
        ):
            cpu = asyncio.run(used(Run(made.config, engines, made.prompts, log, say=lambda _: None)))
        lines = read_lines(Path(path) / "run" / "metrics.jsonl")
    return Found(forecast_of(lines, cpu, updates=updates), fmean(seen or [0]))


async def used(run: Run) -> float:
    """CPU seconds of a run."""
    before, began = sum((await cpu_seconds(run.engines)).values()), time.thread_time()
    await run.train()
    return sum((await cpu_seconds(run.engines)).values()) - before + time.thread_time() - began


@contextmanager
def counting() -> Iterator[list[int]]:
    """Threads of others that are ready to run, several times a second."""
    seen, over = list[int](), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            seen.append(strangers())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def strangers() -> int:
    parents, running = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            states = [(each / "stat").read_text().rpartition(")")[2].split()[0] for each in path.glob("task/*")]
        except OSError:  # it has ended
            continue
        running[int(path.name)] = states.count("R")
    return sum(count for pid, count in running.items() if not is_ours(pid, parents))


def is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid and pid != os.getpid():
        pid = parents.get(pid, 0)
    return pid == os.getpid()


def predicted(costs: Costs, wanted: Config, updates: int) -> Forecast:
    return forecast(costs, Split(1, 1, 1), wanted.schedule, Work.of(wanted), updates=updates)


TITLES = ("samples/s", "predicted", "ratio", "strangers", "shared", "ratio", "CPU ms", "predicted", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40)
    args = parser.parse_args()
    ratios = {name: list[tuple[float, float, float]]() for name in ARMS}
    print(f"{'':38}" + "".join(f"{title:>10}" for title in TITLES))
    for repeat in range(args.repeats):
        costs = costs_here(repeat)
        for name, arm in ARMS.items():
            wanted = config(arm, updates=args.updates, seed=100 + repeat)
            seen = predicted(costs, wanted, args.updates)
            alone, cpu = seen.samples_per_s, 1e3 * seen.work
            found = run(wanted, args.updates)
            speed = found.seen.samples_per_s
            shared = predicted(costs.model_copy(update={"others": found.strangers}), wanted, args.updates).samples_per_s
            ratios[name].append((alone / speed, shared / speed, cpu / (1e3 * found.seen.work)))
            numbers = (speed, alone, alone / speed, found.strangers, shared, shared / speed, 1e3 * found.seen.work, cpu)
            print(f"{name:38}" + "".join(f"{x:10.2f}" for x in (*numbers, ratios[name][-1][2])), flush=True)
    print(f"\npredicted / measured, medians of {args.repeats}: alone, with strangers, CPU")
    for name, each in ratios.items():
        print(f"{name:38}" + "".join(f"{median(column):10.2f}" for column in zip(*each, strict=True)))


if __name__ == "__main__":
    main()
