"""What freshness saves of a run that is too stale, and what it costs.

    python benchmarks/freshness.py ladder [--seeds 5] [--updates 120] [--lr 8e-3] [--tau 8] [--only sync async …]
    python benchmarks/freshness.py speed  [--seeds 5] [--updates 60]

The built-in student learns the built-in teacher's arithmetic, 32 samples per update. `ladder` trains every arm for
every seed in turn and evaluates each ten times, on 100 held-out prompts: final accuracy, how far it fell from its peak,
and how many seeds collapsed (the end more than 40 % below the peak, and the last two evaluations below 90 % of it).
All that is in flight rolls out at the same time (sampler.slots), so that tokens are as stale as tau allows. `speed` is
the throughput of these without evaluations, after five updates, and that of async(4) with freshness and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import slipstream
from slipstream.metrics import throughput

BATCH = 32
OFF = {"weight": "equal", "anchor": 0.0, "refresh": "never"}
SOON = {"cooldown": 20}
"""Updates are few: two refreshes may be so many steps apart, and not 200."""
ARMS: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": None,
    "fixed refresh": OFF | {"refresh": "fixed", "every": 10},
    "lag only": OFF | {"weight": "lag"},
    "anchor only": OFF | {"anchor": 0.1},
    "refresh only": OFF | {"refresh": "adaptive"} | SOON,
    "weight": OFF | {"weight": "freshness"},
    "weight, anchor": {"refresh": "never"},
    "weight, anchor, refresh": dict(SOON),
}


def config_of(
    arm: str, *, seed: int, updates: int, lr: float, tau: float, kappa_f: float, every: int, loss: str
) -> dict[str, Any]:
    freshness = ARMS[arm]
    if freshness is not None and freshness.get("refresh", "adaptive") == "adaptive":
        freshness = freshness | {"kappa_f": kappa_f}
    return {
        "student": "builtin:student",
        "updates": updates,
        "seed": seed,
        "teachers": {"main": {"model": "builtin:teacher"}},
        "data": {"eval": "builtin:arithmetic"},
        "sampler": {"max_tokens": 40, "slots": 1024},
        "loss": {"kind": loss},
        "learner": {"batch_size": BATCH, "lr": lr, "warmup": 5},
        "task": {"reward": "exact"},
        "schedule": {"kind": "sync"} if arm == "sync" else {"kind": "async", "tau": tau},
        "eval": {"every": every, "prompts": 100},
        "health": {"stop": False},
        "log": {"samples": 0, "trace": False},
        **({"freshness": freshness} if freshness is not None else {}),
    }


def train(config: dict[str, Any]) -> slipstream.Run:
    path = Path(tempfile.mkdtemp(prefix="freshness-")) / "run"
    return slipstream.train(config | {"output": str(path)}, quiet=True, checks=False)


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} [{low} … {high}]"


# --- ladder -----------------------------------------------------------------------------------------------------------


def ladder(args: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.only}
    for seed in range(args.seeds):
        for arm, runs in found.items():
            began = time.perf_counter()
            run = train(
                config_of(
                    arm,
                    seed=seed,
                    updates=args.updates,
                    lr=args.lr,
                    tau=args.tau,
                    kappa_f=args.kappa_f,
                    every=args.updates // 10,
                    loss=args.loss,
                )
            )
            runs.append(told(run))
            print(
                json.dumps({"seed": seed, "arm": arm, "s": round(time.perf_counter() - began)} | runs[-1]), flush=True
            )
    print(
        f"\n{args.seeds} seeds, medians [range]: {args.updates} updates, {args.loss}, lr {args.lr:g}, tau {args.tau:g}"
    )
    print(
        f"{'':26} {'accuracy at the end':>24} {'peak less end':>24} {'collapsed':>9} {'lag':>5} {'k3':>7} "
        f"{'refreshes':>9}"
    )
    for arm, runs in found.items():
        collapsed = f"{sum(run['collapsed'] for run in runs):.0f}/{len(runs)}"
        lag, k3, refreshes = (statistics.median(run[name] for run in runs) for name in ("lag", "k3", "refreshes"))
        print(
            f"{arm:26} {spread([run['final'] for run in runs], '.1%'):>24} "
            f"{spread([run['peak'] - run['final'] for run in runs], '.1%'):>24} {collapsed:>9} {lag:5.1f} {k3:7.3f} "
            f"{refreshes:9.0f}"
        )


def told(run: slipstream.Run) -> dict[str, float]:
    lines, accuracy = run.metrics, [line["accuracy"] for line in run.evaluations]
    peak, final = max(accuracy), accuracy[-1]
    return {
        "final": final,
        "peak": peak,
        "collapsed": float(final < 0.6 * peak and max(accuracy[-2:]) < 0.9 * peak),
        "lag": statistics.fmean(line["lag/mean"] for line in lines),
        "k3": statistics.fmean(line["drift/k3_kl"] for line in lines[len(lines) // 2 :]),
        "f": statistics.fmean(line.get("freshness/f", 1.0) for line in lines),
        "refreshes": lines[-1].get("freshness/refreshes", 0.0),
    }


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> None:
    def config(arm: str, seed: int, tau: float) -> dict[str, Any]:
        return config_of(
            arm, seed=seed, updates=args.updates, lr=1e-3, tau=tau, kappa_f=args.kappa_f, every=0, loss=args.loss
        )

    arms = {arm: (arm, args.tau) for arm in args.only}
    arms |= {"async(4)": ("async", 4.0), "async(4), weight, anchor": ("weight, anchor", 4.0)}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(args.seeds):
        for name, (arm, tau) in arms.items():
            lines = train(config(arm, seed, tau)).metrics
            found[name].append(throughput([line["samples"] for line in lines], [line["time"] for line in lines]))
            print(f"seed {seed}  {name:26} {found[name][-1]:6.1f} samples/s", flush=True)
    print(f"\nmedians of {args.seeds} seeds [range], {args.updates} updates")
    for name, values in found.items():
        base = found["async(4)" if name.startswith("async(4)") else "sync"]
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        print(f"{name:26} {spread(values, '.0f'):>18} samples/s   {spread(ratios, '.2f')} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["ladder", "speed"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--loss", default="reverse_kl", choices=["reverse_kl", "reverse_kl_mc"])
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--tau", type=float, default=8.0)
    parser.add_argument("--kappa-f", type=float, default=0.1)
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    args.updates = args.updates or {"ladder": 120, "speed": 60}[args.what]
    {"ladder": ladder, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()
