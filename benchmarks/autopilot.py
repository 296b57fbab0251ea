"""`tau = "auto"` against fixed values: throughput, drift, and accuracy after the same number of updates.

    python benchmarks/autopilot.py [--seeds 3] [--updates 120] [--drift 0.02]

The built-in student learns the arithmetic of the built-in teacher, everything in a process of its own. For every seed
all arms take their turn. Throughput is over the updates after the first 40, in which auto has found its tau, and drift
their mean drift/k3_kl; accuracy is the final student's on 200 held-out prompts. All are compared with the fixed tau
that is fastest over all seeds, of those whose mean drift is within the budget: the fastest of each seed alone would be
one that chance favoured.
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from schedules import BATCH, MAX_TOKENS, accuracy_of
from slipstream.config.file import parse
from slipstream.pipeline.run import Run
from slipstream.plan.plan import plan
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import local

FOUND = 40
"""Updates that are left to auto to find its tau."""
TAUS: tuple[Any, ...] = (0, 1, 2, 4, 8, "auto")


@dataclass(frozen=True)
class Found:
    tokens_per_s: float
    drift: float
    taus: list[float]
    accuracy: float


def run(tau: Any, *, seed: int, updates: int, drift: float, lr: float) -> Found:
    config = parse(
        {
            "student": "builtin:student",
            "updates": updates,
            "seed": seed,
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {"max_tokens": MAX_TOKENS},
            "learner": {"batch_size": BATCH, "lr": lr},
            "schedule": {"kind": "async", "tau": tau, **({"drift": drift} if tau == "auto" else {})},
        }
    )
    job = plan(config)
    with tempfile.TemporaryDirectory() as path:
        engines = local.open_engines(job.engines, job.tokenizer, say=lambda _: None)
        try:
            with RunLog.create(config, Path(path) / "run") as log:
                asyncio.run(Run(config, engines, job.prompts, log).train())
        finally:
            engines.close()
        lines = read_lines(Path(path) / "run" / "metrics.jsonl")
        accuracy = accuracy_of(str(Path(path) / "run" / "final"), job.tokenizer)
    late = lines[FOUND:]
    return Found(
        tokens_per_s=sum(line["tokens"] for line in late) / sum(line["seconds/update"] for line in late),
        drift=fmean(line["drift/k3_kl"] for line in late),
        taus=[line.get("tau", tau) for line in lines],
        accuracy=accuracy,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--drift", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if args.updates <= FOUND:
        parser.error(f"--updates {args.updates}: more than {FOUND}")
    found: dict[Any, list[Found]] = {tau: [] for tau in TAUS}
    for seed in range(args.seeds):
        for tau in TAUS:
            one = run(tau, seed=seed, updates=args.updates, drift=args.drift, lr=args.lr)
            found[tau].append(one)
            print(f"seed {seed}, tau {tau}: {one.tokens_per_s:,.0f} tokens/s, drift {one.drift:.4f}", flush=True)
    report(found, args.drift)


def report(found: dict[Any, list[Found]], drift: float) -> None:
    fresh = [tau for tau in TAUS if tau != "auto" and fmean(one.drift for one in found[tau]) <= drift]
    best = max(fresh, key=lambda tau: fmean(one.tokens_per_s for one in found[tau]))
    print(f"| tau | tokens/s of tau {best}, by seed | drift | accuracy | taus that it had |")
    print("| --- | --- | --- | --- | --- |")
    for tau, runs in found.items():
        shares = [one.tokens_per_s / other.tokens_per_s for one, other in zip(runs, found[best], strict=True)]
        had = "; ".join(" ".join(f"{each:g}" for each in dict.fromkeys(one.taus)) for one in runs)
        print(
            f"| {tau} | {median(shares):.2f} [{min(shares):.2f} … {max(shares):.2f}] "
            f"| {fmean(one.drift for one in runs):.4f} | {fmean(one.accuracy for one in runs):.1%} "
            f"| {had if tau == 'auto' else ''} |"
        )


if __name__ == "__main__":
    main()
