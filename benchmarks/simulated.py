"""Schedules on the eight GPUs of AsyncOPD (2606.24143), which are not here: the real pipeline on a virtual clock.

    python benchmarks/simulated.py [--updates 30] [--sensitivity]

One teacher, four rollout workers, three trainers; strictly synchronous runs share seven devices in turn between rollout
and training. 256 responses per update in four mini-batches, cut at 16,384 tokens. What a stage costs follows from what
the models weigh and what a B200 reads and multiplies (`benchmarks/roofline.py`); which part of that programs reach
is assumed, and so is how long responses are: a log-normal, of which some do not end before they are cut. Where each
number is from, and what the ratios say of it, is in docs/planning.md. `--sensitivity` changes one assumption at a time.
"""

import argparse
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from roofline import (
    B200,
    H100,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    Model,
    Reached,
    costs_on,
    room,
)
from slipstream.config.costs import Lengths
from slipstream.config.schedule import Async, Periodic, StepOff, Sync
from slipstream.planning.simulate import Forecast, Split, Work, forecast

BATCH, MINIBATCHES, LONGEST, PROMPT, MOST_ROWS = 256, 4, 16384, 200, 512
STUDENTS = {"1.7B": QWEN3_1_7B, "4B": QWEN3_4B, "8B": QWEN3_8B}
APART, IN_TURN = Split(4, 1, 3), Split(7, 1, 7)
LENGTHS = ((1000, 0.7, 0.0), (1000, 0.7, 0.01), (2000, 0.7, 0.0), (2000, 0.7, 0.01), (4000, 0.7, 0.01))
"""Mean, σ of the logarithm, and the share that is cut."""
SCHEDULES: dict[str, Any] = {
    "sync": Sync(),
    "periodic": Periodic(),
    "step_off(1)": StepOff(k=1),
    "step_off(2)": StepOff(k=2),
    "async(1)": Async(tau=1),
    "async(4)": Async(tau=4),
}


def lengths(mean: float, sigma: float, endless: float, count: int = 2000) -> Lengths:
    """Log-normal, and a share that is cut."""
    normal, mu = NormalDist(), math.log(mean) - sigma**2 / 2
    cut = round(endless * count)
    body = [math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / (count - cut))) for i in range(count - cut)]
    return Lengths(prompt=PROMPT, responses=tuple(max(1, min(LONGEST, round(n))) for n in body) + (LONGEST,) * cut)


def found(
    student: Model, said: Lengths, reached: Reached, *, updates: int, device: Any = B200, group: int = 1
) -> dict[str, Forecast]:
    mean = sum(said.responses) / len(said.responses)
    slots = min(MOST_ROWS, room(device, student, context=PROMPT + mean))
    work = Work(batch=BATCH, group=group, max_tokens=LONGEST, slots=slots, minibatches=MINIBATCHES)
    costs = costs_on(device, student, QWEN3_30B_A3B, said, reached)
    return {
        name: forecast(
            costs,
            IN_TURN if name == "sync" else APART,
            schedule,
            replace(work, minibatches=1) if name == "periodic" else work,  # it makes one step of an update
            updates=updates,
        )
        for name, schedule in SCHEDULES.items()
    }


def row(label: str, forecasts: dict[str, Forecast]) -> str:
    sync = forecasts["sync"]
    ratios = "".join(
        f"{f'{each.tokens_per_s / sync.tokens_per_s:.2f} ({each.overlap:.1f}, {each.lag:.1f})':>18}"
        for name, each in forecasts.items()
        if name != "sync"
    )
    return f"{label:34}{sync.tokens_per_s:8,.0f} ({sync.overlap:.1f}){ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--sensitivity", action="store_true", help="one assumption at a time, 4B student")
    args = parser.parse_args()
    print(f"{'tokens/s over sync (overlap, lag)':34}{'sync':>14}" + "".join(f"{n:>18}" for n in list(SCHEDULES)[1:]))
    if args.sensitivity:
        usual = {"student": QWEN3_4B, "said": lengths(2000, 0.7, 0.01), "reached": Reached()}
        changes: dict[str, dict[str, Any]] = {
            "as assumed": {},
            "no response is cut": {"said": lengths(2000, 0.7, 0.0)},
            "all are equally long": {"said": lengths(2000, 0.0, 0.0)},
            "3 % are cut": {"said": lengths(2000, 0.7, 0.03)},
            "teacher twice as fast": {"reached": Reached(score=0.2)},
            "teacher half as fast": {"reached": Reached(score=0.05)},
            "learner half as fast": {"reached": Reached(learn=0.125)},
            "learner twice as fast": {"reached": Reached(learn=0.5)},
            "one draw a position, not 64": {"reached": Reached(per_row=1e-5)},
            "a step costs 10 ms more": {"reached": Reached(overhead=13e-3)},
            "a publish takes 10 s": {"reached": Reached(publish=10.0)},
            "H100": {"device": H100},
            "groups of 8": {"group": 8},
            "groups of 8, scoring takes no time": {"group": 8, "reached": Reached(score=1e6)},
        }
        for label, change in changes.items():
            print(row(label, found(**(usual | change), updates=args.updates)), flush=True)
        return
    for name, student in STUDENTS.items():
        for mean, sigma, endless in LENGTHS:
            said = lengths(mean, sigma, endless)
            label = f"{name}, mean {mean:,}, {endless:.0%} cut"
            print(row(label, found(student, said, Reached(), updates=args.updates)), flush=True)


if __name__ == "__main__":
    main()
