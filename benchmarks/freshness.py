"""Cost of freshness weights, and the rest of async's throughput. (Their benefit is a study: configs/lab/fopd.toml.)

    python benchmarks/freshness.py [--seeds 5] [--updates 60] [--lr 1e-3] [--tau 8] [--only sync async …]

The built-in student learns the built-in teacher's arithmetic, 32 samples per update, in turns for every seed, with the
study's arms and settings. All that is in flight rolls out at the same time (sampler.slots), so that tokens are as stale
as tau allows. Throughput is after five updates; async(4) with freshness is compared to that without, too.
"""

import argparse
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import slipstream
from slipstream.metrics import throughput

with Path(__file__).parents[1].joinpath("configs/lab/fopd.toml").open("rb") as file:
    STUDY = tomllib.load(file)
ARMS: dict[str, dict[str, Any]] = STUDY.pop("sweep")["arms"]


def config_of(arm: str, *, seed: int, updates: int, lr: float, tau: float) -> dict[str, Any]:
    schedule = {**STUDY["schedule"], "tau": tau}
    return {
        **STUDY,
        "updates": updates,
        "seed": seed,
        "learner": {**STUDY["learner"], "lr": lr},
        "runtime": {"device": "cpu"},
        "schedule": schedule,
        **ARMS[arm],
    }


def train(config: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="freshness-") as path:
        return slipstream.train(config | {"output": f"{path}/run"}, quiet=True, checks=False).metrics


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} [{low} … {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tau", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    arms = {arm: (arm, args.tau) for arm in args.only}
    arms |= {"async(4)": ("async", 4.0), "async(4), weight, anchor": ("weight, anchor", 4.0)}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(args.seeds):
        for name, (arm, tau) in arms.items():
            lines = train(config_of(arm, seed=seed, updates=args.updates, lr=args.lr, tau=tau))
            found[name].append(throughput([line["samples"] for line in lines], [line["time"] for line in lines]))
            print(f"seed {seed}  {name:26} {found[name][-1]:6.1f} samples/s", flush=True)
    print(f"\nmedians of {args.seeds} seeds [range], {args.updates} updates")
    for name, values in found.items():
        base = found["async(4)" if name.startswith("async(4)") else args.only[0]]
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        print(f"{name:26} {spread(values, '.0f'):>18} samples/s   {spread(ratios, '.2f')} x")


if __name__ == "__main__":
    main()
