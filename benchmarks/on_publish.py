"""Cost of running responses at a publish, by `sampler.on_publish`, and their distance from any one student.

    python benchmarks/on_publish.py [--seeds 3] [--updates 60] [--group 1]

The asynchronous pipeline of `schedules.py` (tau = 4, the demo's student and teacher, updates of 64 samples), with
either setting in turn for every seed. `rebuild` is the part of the sampler's time that goes into the keys and values of
running responses. `drift/k3_kl` is between what drew a token and the student that learns from it, by how many updates
lie between: what reuse adds to the drift of lag itself. Medians and ranges over the seeds.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from schedules import BATCH, MAX_TOKENS, spread
from slipstream.config.file import parse
from slipstream.metrics import throughput
from slipstream.pipeline.run import Run
from slipstream.plan.plan import plan
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import local

WARMUP = 5


def run(on_publish: str, *, seed: int, updates: int, group: int) -> list[dict[str, Any]]:
    config = parse(
        {
            "student": "builtin:student",
            "updates": updates,
            "seed": seed,
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {"max_tokens": MAX_TOKENS, "on_publish": on_publish, "group": group},
            "learner": {"batch_size": BATCH, "lr": 1e-3},
            "schedule": {"kind": "async", "tau": 4},
        }
    )
    job = plan(config)
    with tempfile.TemporaryDirectory() as path:
        engines = local.open_engines(job.engines, job.tokenizer, say=lambda _: None)
        try:
            with RunLog.create(job.config, Path(path) / "run") as log:
                asyncio.run(Run(job.config, engines, job.prompts, log).train())
        finally:
            engines.close()
        return read_lines(Path(path) / "run" / "metrics.jsonl")[WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--group", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {"rebuild": {}, "reuse": {}}
    for seed in range(args.seeds):
        for name, numbers in found.items():
            lines = run(name, seed=seed, updates=args.updates, group=args.group)
            wall = sum(line["seconds/update"] for line in lines)
            one = {
                "tokens/s": throughput([line["tokens"] for line in lines], [line["time"] for line in lines], warmup=1),
                "rebuild": sum(line.get("publish/rebuild", 0.0) for line in lines) / wall,
                "lag": statistics.fmean(line["lag/mean"] for line in lines),
            }
            for lag in sorted({round(line["lag/mean"]) for line in lines}):
                drifts = [line["drift/k3_kl"] for line in lines if round(line["lag/mean"]) == lag]
                one[f"k3_kl at lag {lag}"] = statistics.fmean(drifts)
            for key, value in one.items():
                numbers.setdefault(key, []).append(value)
            print(f"seed {seed}  {name:8} " + "  ".join(f"{key} {value:.4g}" for key, value in one.items()), flush=True)
    for name, numbers in found.items():
        for key, values in numbers.items():
            print(f"{name:8} {key:20} {spread(values, '.1%' if key == 'rebuild' else '.4g')}")


if __name__ == "__main__":
    main()
