"""Where asynchrony matters by nature: a teacher behind an endpoint that takes its time.

    python benchmarks/latency.py [--seeds 3] [--updates 30]

The endpoint that ships serves a table, which costs next to nothing, from a process of its own and lets every request
wait, 50 or 200 ms; 32 are open at a time. The built-in student learns from it in updates of 64 samples, each engine in
its own process. For every latency and seed the schedules take their turn. Throughput is that of `metrics.throughput`,
after five updates.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from slipstream.config.file import parse
from slipstream.metrics import throughput
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train
from support.fake_endpoint import FakeEndpoint, table

VOCABULARY = 39
ARMS: dict[str, dict[str, Any]] = {
    "sync": {"kind": "sync"},
    "async(1)": {"kind": "async", "tau": 1},
    "async(4)": {"kind": "async", "tau": 4},
}


def serve(told: Connection, latency: float) -> None:
    logits = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
    with FakeEndpoint(table(logits - np.logaddexp.reduce(logits, 1, keepdims=True))) as fake:
        fake.always, fake.seconds = "slow", latency
        told.send(fake.url)
        told.recv()


def run(url: str, schedule: dict[str, Any], *, seed: int, updates: int) -> tuple[float, float]:
    """Tokens per second, and their mean lag."""
    with tempfile.TemporaryDirectory() as path:
        config = parse(
            {
                "student": "builtin:student",
                "updates": updates,
                "seed": seed,
                "output": str(Path(path) / "run"),
                "teachers": {"main": {"model": "teacher", "base_url": url, "tokenizer": "builtin:teacher"}},
                "sampler": {"max_tokens": 40},
                "learner": {"batch_size": 64, "lr": 1e-3},
                "schedule": schedule,
            },
            say=lambda _: None,
        )
        with Path("/dev/null").open("w") as nowhere:
            train(config, Console(file=nowhere), name="latency", checks=False)
        lines = read_lines(Path(path) / "run" / "metrics.jsonl")[5:]
    speed = throughput([line["tokens"] for line in lines], [line["time"] for line in lines], warmup=1)
    return speed, statistics.fmean(line["lag/mean"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=30)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for latency in (0.05, 0.2):
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=serve, args=(theirs, latency), daemon=True)
        server.start()
        url = ours.recv()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
        for seed in range(args.seeds):
            for name, schedule in ARMS.items():
                found[name].append(run(url, schedule, seed=seed, updates=args.updates))
        ours.send(None)
        server.join()
        for name, runs in found.items():
            speeds = [speed for speed, _ in runs]
            ratios = [speed / base for speed, (base, _) in zip(speeds, found["sync"], strict=True)]
            print(
                f"{latency * 1000:3.0f} ms  {name:9} {statistics.median(speeds):7,.0f} tokens/s "
                f"[{min(speeds):,.0f} … {max(speeds):,.0f}]  {statistics.median(ratios):.2f}× sync "
                f"[{min(ratios):.2f} … {max(ratios):.2f}]  lag {statistics.fmean(lag for _, lag in runs):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
