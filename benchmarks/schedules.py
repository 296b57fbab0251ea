"""Every schedule on the same two cores: training throughput, overlap, and accuracy after the same number of updates.

    python benchmarks/schedules.py [--seeds 5] [--updates 100] [--only "sync, one process" "async(4)" …] [--burn]

The built-in student learns the heavy-tailed arithmetic of the built-in teacher, 64 samples per update. Synchronous runs
may use both cores in every way there is here: one process, one for each engine, two scorers, two samplers and scorers,
a learner of two threads; the fastest of them is the baseline. For every seed all schedules take their turn. Throughput
is that of `metrics.throughput`, after five updates of warm-up; accuracy is the final student's on 200 held-out prompts.
With `--burn` another process, with nothing to do with it, keeps a core busy all the time.

The bound of a run is the time that its CPU work would take if both cores were always busy: CPU seconds of all stages,
and of the coordinator, divided by two. What a run reaches of it is how well it keeps the cores busy.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.commands.evaluate import measure
from slipstream.config.file import parse
from slipstream.data.prompts import load_rows
from slipstream.metrics import throughput
from slipstream.pipeline.run import Run
from slipstream.plan.engine_plans import GraderPlan
from slipstream.plan.evaluation import EvalRequest, config_of_model, evaluation, with_options
from slipstream.plan.plan import plan
from slipstream.plan.prompts import eval_prompts
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import inline, local, ray
from slipstream.runtimes.build import build_grader
from slipstream.runtimes.workers import cpu_seconds

CORES, BATCH, MAX_TOKENS = 2, 64, 80
RUNTIMES = {"inline": inline, "local": local, "ray": ray}
ARMS: dict[str, dict[str, Any]] = {
    "sync, one process": {"schedule": {"kind": "sync"}, "runtime": {"kind": "inline"}},
    "sync": {"schedule": {"kind": "sync"}},
    "sync, 2 scorers": {"schedule": {"kind": "sync"}, "teacher": {"replicas": 2}},
    "sync, 2 of each": {
        "schedule": {"kind": "sync"},
        "sampler": {"replicas": 2},
        "teacher": {"replicas": 2},
        "learner": {"threads": 2},
    },
    "periodic": {"schedule": {"kind": "periodic"}},
    "step_off(1)": {"schedule": {"kind": "step_off", "k": 1}},
    "async(4)": {"schedule": {"kind": "async", "tau": 4}},
    "async(4), one process": {"schedule": {"kind": "async", "tau": 4}, "runtime": {"kind": "inline"}},
    "async(4), Ray": {"schedule": {"kind": "async", "tau": 4}, "runtime": {"kind": "ray"}},
}


@dataclass(frozen=True)
class Found:
    tokens_per_s: float
    of_bound: float
    stages_of_bound: float
    """The same, where only the CPU seconds of the stages count."""
    overlap: float
    """Number of workers that are busy at a time, with publishes."""
    lag: float
    accuracy: float
    waits: dict[str, float]
    cpu: dict[str, float]
    cpu_per_sample: float
    """CPU seconds of stages and coordinator."""


def run(arm: dict[str, Any], *, seed: int, updates: int) -> Found:
    config = parse(
        {
            "student": "builtin:student",
            "updates": updates,
            "seed": seed,
            "teachers": {"main": {"model": "builtin:teacher", **arm.get("teacher", {})}},
            "sampler": {"max_tokens": MAX_TOKENS, **arm.get("sampler", {})},
            "learner": {"batch_size": BATCH, "lr": 1e-3, **arm.get("learner", {})},
            "schedule": arm["schedule"],
            "runtime": arm.get("runtime", {}),
        }
    )
    job = plan(config)
    runtime: Any = RUNTIMES[config.runtime.kind]
    with tempfile.TemporaryDirectory() as path:
        engines = runtime.open_engines(job.engines, job.tokenizer, say=lambda _: None)
        try:
            with RunLog.create(config, Path(path) / "run") as log:
                seconds, cpu = asyncio.run(timed(Run(config, engines, job.prompts, log)))
        finally:
            engines.close()
        lines = read_lines(Path(path) / "run" / "metrics.jsonl")[5:]
        accuracy = accuracy_of(str(Path(path) / "run" / "final"), job.tokenizer)
    wall = sum(line["seconds/update"] for line in lines)
    stages = sum(value for name, value in cpu.items() if name != "coordinator")
    return Found(
        tokens_per_s=throughput([line["tokens"] for line in lines], [line["time"] for line in lines], warmup=1),
        of_bound=sum(cpu.values()) / CORES / seconds,
        stages_of_bound=stages / CORES / seconds,
        overlap=sum(line["overlap/busy"] * line["seconds/update"] for line in lines) / wall,
        lag=statistics.fmean(line["lag/mean"] for line in lines),
        accuracy=accuracy,
        waits={name: sum(line[f"seconds/{name}"] for line in lines) / wall for name in ("data", "turn", "weights")},
        cpu=cpu,
        cpu_per_sample=sum(cpu.values()) / updates / BATCH,
    )


async def timed(run: Run) -> tuple[float, dict[str, float]]:
    """Wall-clock seconds of a run, and the CPU seconds of every worker."""
    before, mine, began = await cpu_seconds(run.engines), time.process_time(), time.perf_counter()
    await run.train()
    seconds, mine = time.perf_counter() - began, time.process_time() - mine
    after = await cpu_seconds(run.engines)
    return seconds, {name: after[name] - before[name] for name in after} | {"coordinator": mine}


def accuracy_of(model: str, tokenizer: Any) -> float:
    rows = load_rows("builtin:arithmetic", split="eval", limit=200)
    prompts = eval_prompts(rows, tokenizer, config_of_model(model))
    grader = build_grader(GraderPlan(rewards=("exact",)), tokenizer)
    try:
        asked = EvalRequest(with_options(config_of_model(model), {"sampler.max_tokens": MAX_TOKENS}))
        return measure(evaluation(asked, {"": prompts}, tokenizer), grader)[""].avg
    finally:
        grader.close()


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """A process that computes, of no use to anybody."""
    process = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()


def burn() -> None:
    while True:
        sum(range(1_000_000))


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} [{low} … {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--burn", action="store_true", help="beside a process that keeps a core busy")
    args = parser.parse_args()
    found: dict[str, list[Found]] = {name: [] for name in args.only}
    for seed in range(args.seeds):
        for name in found:
            with burning() if args.burn else contextlib.nullcontext():
                one = run(ARMS[name], seed=seed, updates=args.updates)
            found[name].append(one)
            cpu = ", ".join(f"{worker} {value:.1f}" for worker, value in one.cpu.items())
            print(
                f"seed {seed}  {name:22} {one.tokens_per_s:7,.0f} tok/s  accuracy {one.accuracy:.1%}  CPU s: {cpu}",
                flush=True,
            )
    print(f"\nmedians of {args.seeds} seeds [range], {args.updates} updates of {BATCH} samples on {CORES} cores")
    print(
        f"{'':22} {'tokens/s':>24} {'of the bound':>22} {'overlap':>8} {'lag':>5} {'accuracy':>25}  learner waits for"
    )
    for name, runs in found.items():
        waits = ", ".join(f"{what} {statistics.median(one.waits[what] for one in runs):.0%}" for what in runs[0].waits)
        print(
            f"{name:22} {spread([one.tokens_per_s for one in runs], ',.0f'):>24} "
            f"{spread([one.of_bound for one in runs], '.0%'):>22} "
            f"{statistics.median(one.overlap for one in runs):8.2f} {statistics.median(one.lag for one in runs):5.1f} "
            f"{spread([one.accuracy for one in runs], '.1%'):>25}  {waits}"
        )
    for name, runs in found.items():
        stages = spread([one.stages_of_bound for one in runs], ".0%")
        per_sample = spread([1e3 * one.cpu_per_sample for one in runs], ".2f")
        print(f"{name:22} {per_sample} ms of CPU per sample; {stages} of the bound with the stages' alone")
    syncs = [name for name in found if name.startswith("sync")]
    best = max(syncs, key=lambda name: statistics.median(one.tokens_per_s for one in found[name]))
    for name in found:
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(found[name], found[best], strict=True)]
        print(f"{name:22} / {best}: {spread(ratios, '.2f')}")


if __name__ == "__main__":
    main()
