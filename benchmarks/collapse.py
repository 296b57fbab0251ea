"""Can it be told from four metrics that a run is about to collapse?

    python benchmarks/collapse.py runs/ramp > docs/findings/collapse.md
    slipstream sweep configs/lab/ramp.toml --updates 600 --learner.warmup 600 --sweep.seeds "[1, 2, 3]" \\
        --output runs/ramp_long
    python benchmarks/collapse.py runs/ramp_long --ahead 200 --section >> docs/findings/collapse.md

Reads the finished runs of studies (configs/lab/ramp.toml). A run has collapsed where the mean reward of ten updates
is 30 % or more below its best so far, and stays there for 100 updates or to the end; rewards of stale samples count for
the student that drew them. At every tenth update before that it is asked whether it will within the next 50 (or
`--ahead`): by a logistic regression on means over ten updates, of four metrics or of all, fitted to the other arms.
AUROC: how often, among runs of the same settings, one that will is ranked above one that will not (or not yet).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from math import log1p
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from slipstream.metrics import WINDOW, collapse
from slipstream.run_dir.reading import Line
from slipstream.studies.results import Sweep, SweepCell

CLIPPED = "policy/clip_fraction"
FEW = ("drift/chi2_row_p95", "drift/ess_seq", CLIPPED, "length/mean")
MORE = ("student/entropy", "grad_norm", "drift/k3_kl")
STEP = "lr"
"""Grows from update to update, alike in runs of the same settings: what a clock would tell."""
REWARD = "reward/exact"
AHEAD = 50
"""Updates within which a collapse is predicted, unless `--ahead` says otherwise."""
ENOUGH, ADDED = 0.90, 0.03
TEXT = """# Four metrics, and whether a run is about to collapse

A conjecture of "Off-Policy Drift" (its second open problem): four metrics predict that a run will collapse. They are
χ² of tokens (95th percentile), the effective sample size of responses, the clipped share, and the response length.
The conjecture fails if they do not reach an AUROC of 0.90, or if other metrics add more than 0.03. This page tests it
on [runs that learn first](ramp.md). χ² is that of the tokens of a response, at the 95th percentile of responses. A
run has collapsed if the mean reward of ten updates is at least 30 % below its best so far, and stays there for 100
updates or to the end (at least ten). Rewards of stale samples count for the student that generated them. Every ten
updates before a collapse the metrics predict whether it comes within {n} updates; the conjecture says 200, for
longer runs. Runs of the same settings are ranked against each other, with a predictor fitted on the other arms. The
learning rate grows in all runs, so `lr` shows what the number of the update alone would predict.

```console
python benchmarks/collapse.py {words} > docs/findings/collapse.md
```
"""
SECTION = """
## The same within {n} updates

Runs of {length} updates, whose learning rate grows until the last one, so collapses come later. The metrics predict
whether one comes within {n} updates, as the conjecture says.

```console
slipstream sweep configs/lab/ramp.toml --updates {length} --learner.warmup {length} --sweep.seeds "[1, 2, 3]" \\
    --output {path}
python benchmarks/collapse.py {words} --section >> docs/findings/collapse.md
```
"""
ALL = (*FEW, *MORE, STEP)
Sample = tuple[list[float], bool]


def aged(lines: Sequence[Line]) -> int:
    """Rewards are of the student so many updates before."""
    return round(lines[-1]["lag/mean"])


def collapsed(lines: Sequence[Line]) -> int | None:
    """The update at which the student has."""
    end = collapse([line[REWARD] for line in lines])
    return None if end is None else end - aged(lines)


def samples(cell: SweepCell, ahead: int) -> list[Sample]:
    lines = cell.run.metrics
    end = collapsed(lines)

    def mean(name: str, update: int) -> float:
        if name not in lines[0] and name != CLIPPED:
            sys.exit(f"{cell.path} has no {name}: it is of an older version, run it again")
        value = fmean(line.get(name, 0.0) for line in lines[update - WINDOW : update])  # 0: a loss that clips nothing
        return log1p(abs(value))

    last = len(lines) - aged(lines) - ahead if end is None else end  # what comes after that nobody knows
    return [
        (
            [mean(name, update) for name in ALL],
            end is not None and end - update <= ahead,
        )
        for update in range(2 * WINDOW, last, WINDOW)
    ]


def inputs(of: Sequence[Sample], names: Sequence[str]) -> Tensor:
    return torch.tensor([[values[ALL.index(name)] for name in names] for values, _ in of], dtype=torch.float64)


def auroc(scores: Tensor, labels: Tensor) -> float:
    """Ties count half."""
    above, below = scores[labels][:, None], scores[~labels][None, :]
    return ((above > below).double() + 0.5 * (above == below)).mean().item()


def fitted(x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
    """Logistic regression with a little weight decay, on standardised inputs."""
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def logits(of: Tensor) -> Tensor:
        return (of - mean) / scale @ weights[:-1] + weights[-1]

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(x), y.double())
        loss = loss + 1e-3 * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    return logits(asked).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--ahead", type=int, default=AHEAD, help="updates within which a collapse is predicted")
    parser.add_argument("--section", action="store_true", help="write a section about longer runs, not a page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = [(path, cell) for path in args.sweeps for cell in Sweep(path).finished]
    if not cells:
        sys.exit(f"{args.sweeps[0]} has no finished run")
    asked = defaultdict[tuple[Path, str, str], list[Sample]](list)
    for path, cell in cells:
        asked[path, cell.point.arm, cell.point.name] += samples(cell, args.ahead)
    ends = sorted(end for _, cell in cells if (end := collapsed(cell.run.metrics)) is not None)
    words = [*map(str, args.sweeps), *([] if args.ahead == AHEAD else ["--ahead", str(args.ahead)])]
    length = len(cells[0][1].run.metrics)
    text = SECTION if args.section else TEXT
    print(text.format(words=" ".join(words), n=args.ahead, path=args.sweeps[0], length=length))
    judged = {point: own for point, own in asked.items() if len({soon for _, soon in own}) == 2}
    if not judged:
        when = f", the last of them after {ends[-1]} updates: nothing could be asked before" if ends else ""
        print(f"{len(ends)} of {len(cells)} runs have collapsed{when}. The conjecture is not tested here.")
        return
    print(f"| | AUROC, mean over {len(judged)} settings | least of one |\n| --- | --- | --- |")
    columns = {"these four": FEW, f"and {', '.join(f'`{name}`' for name in MORE)}": (*FEW, *MORE)}
    columns |= {f"`{name}` alone": (name,) for name in (STEP, *FEW)}
    reached = list[float]()
    for label, names in columns.items():
        found = list[float]()
        for point, own in judged.items():
            others = [sample for other, each in asked.items() if other[:2] != point[:2] for sample in each]
            labels, truth = (torch.tensor([soon for _, soon in of]) for of in (others, own))
            found.append(auroc(fitted(inputs(others, names), labels, inputs(own, names)), truth))
        print(f"| {label} | {fmean(found):.3f} | {min(found):.3f} |")
        reached.append(fmean(found))
    few, more, clock = reached[:3]
    holds = few >= ENOUGH and more - few <= ADDED
    verdict = "holds" if holds else "fails"
    print(
        f"\nThe conjecture {verdict} here within {args.ahead} updates: AUROC {few:.2f}, to which the others add "
        f"{more - few:.3f}; a clock alone tells {clock:.2f}."
    )
    count = sum(map(len, asked.values()))
    shortly = sum(soon for each in asked.values() for _, soon in each)
    print(
        f"{len(ends)} of {len(cells)} runs have collapsed; asked {count} times, of which {shortly} shortly before one."
    )


if __name__ == "__main__":
    main()
