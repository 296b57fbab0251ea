"""Below which mismatch of sampler and learner do corrections bring nothing?

    python benchmarks/budget.py runs/mismatch > docs/findings/budget.md
    python benchmarks/budget.py runs/precision --precisions >> docs/findings/budget.md

Reads a finished study (configs/lab/mismatch.toml). Under every condition: how far sampler and learner are apart without
a correction, and what the best one adds to the accuracy, seed by seed. With `--precisions` (configs/lab/precision.toml)
the gain of agreeing engines stands beside that. Before, short runs measure which precisions of rollouts keep the
budget, for a dense student and for a mixture of experts.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import slipstream
from slipstream.models.resolve import model_path
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import SIGNIFICANT, Estimate, difference, estimate, p_value
from slipstream.studies.results import Sweep
from small_policy import small_policy

PLAIN = "draws, not weighed"
REJECTING, REJECTED = "draws, responses rejected", "correction/rollout_rs_masked_fraction"
CORRECTED = ("draws, weighed", "draws, weights capped", "draws, M2PO", REJECTING)
AGREE, UNSEEN = "agree", ("temperature 1.3",)
"""Drift is measured at the temperature of the sampler."""
TV, CHI2, GAIN = 1e-4, 0.1, 0.003
"""Numbers of the conjecture: the budget, and the most that corrections add within it."""
TEXT = """# A budget of mismatch within which corrections bring nothing

A conjecture of "Off-Policy Drift" (its fourth open problem) names a budget for the difference between sampler and
learner: total variation below 1e-4 (95th percentile over tokens) and χ² of responses below 0.1. Within this budget,
importance weights, rejection and masks are said to add less than 0.3 points of accuracy. This page tests it on [the
mismatch study](mismatch.md), with the mean of total variation over tokens, which is below its percentile. The row
`agree` differs by rounding only. The row `bfloat16` is a sampler at lower precision than the learner. Another
temperature is left out, because drift is measured at the sampler's temperature and does not show it. The conjecture
fails if the best correction within the budget adds more than 0.3 points, and holds if it adds less, both with p at most
0.05 (Student's t over seeds). The best of up to four corrections is taken, so chance favours it.

```console
python benchmarks/budget.py {path} > docs/findings/budget.md
```

| | total variation | χ² of responses | within | best correction | adds | tokens rejected, if responses are |
| --- | --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True)
class Condition:
    name: str
    tv: Estimate
    chi2: Estimate
    best: str
    gain: Estimate
    repair: Estimate
    """Gain of engines that agree, without a correction."""
    both: Estimate
    rejected: Estimate

    @property
    def within(self) -> bool:
        return (self.tv.mean or 0.0) < TV and (self.chi2.mean or 0.0) < CHI2


def conditions(sweep: Sweep, variation: str = "drift/tv") -> Iterator[Condition]:
    points = sweep.study.points

    def by_seed(measure: str) -> dict[tuple[str, str], dict[int, float]]:
        return {(p.arm, p.x): found for p, found in zip(points, sweep.by_seed(points, measure), strict=True)}

    accuracy, tv, chi2, rejected = map(by_seed, ("eval/accuracy", variation, "drift/chi2_seq", REJECTED))
    for name in dict.fromkeys(p.x for p in points if p.x not in UNSEEN):
        plain = accuracy[PLAIN, name]
        there = [arm for arm in CORRECTED if (arm, name) in accuracy]
        gains = {arm: difference(own, plain) for arm in there if (own := accuracy[arm, name]) != plain}
        if not gains:
            continue
        best = max(gains, key=lambda arm: gains[arm].mean or 0.0)
        apart = (estimate(list(each[PLAIN, name].values())) for each in (tv, chi2))
        repaired = [difference(accuracy[arm, AGREE], plain) for arm in (PLAIN, best)]
        lost = estimate(list(rejected[REJECTING, name].values()))
        yield Condition(name, *apart, best, gains[best], *repaired, lost)


def verdict(gains: Mapping[str, Estimate]) -> str:
    """Return the verdict on the conjecture, by the gain of corrections where the budget is kept."""
    beyond = [Estimate(each.n, each.mean - GAIN, each.se) for each in gains.values() if each.mean is not None]
    tested = [(each, p) for each in beyond if (p := p_value(each)) is not None]
    if not tested:
        return "is not tested"
    decided = [(each.mean or 0.0) > 0 for each, p in tested if p <= SIGNIFICANT]
    if any(decided):
        return "fails"
    return "holds" if len(decided) == len(tested) else "is open"


# --- which precisions keep the budget ---------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantisation": "int8"},
    "fp8": {"quantisation": "fp8"},
}
STUDENTS, EXPERTS, UPDATES = ("dense", "mixture of experts"), 8, 8
FLIPS, ROUTER = 1e-3, "router/flips"
APART = ("drift/tv_p95", "drift/chi2_seq", ROUTER)
"""Quantities that the budget bounds, in the order of its bounds."""
PRECISE = f"""
## Which precisions of rollouts keep the budget

The conjecture bounds the 95th percentile of total variation over tokens by {TV:g}, χ² of responses by {CHI2:g}, and
flips of routers by {FLIPS:g}. Here a float32 learner meets rollouts of other precisions, {UPDATES} batches of 64
responses each, drawn by the current weights. The dense student is the built-in one. The mixture of experts has random
weights and two layers of {EXPERTS} experts, of which a token uses two. Its flips are those that precision causes; none
are planted. Flips are the share of tokens and layers whose experts differ. Errors are over batches.

```console
python benchmarks/budget.py runs/precision --precisions >> docs/findings/budget.md
```

| | {" | ".join(f"`{name}`" for name in APART)} | within |
| --- | --- | --- | --- | --- |"""
FACTORIAL = """
The [study of precisions](precision.md) trains the dense student on such rollouts, with two seeds. `correction` is what
the best of its corrections adds to no correction, `repair` is what engines that agree add without a correction, and
`both` is what both add, all in points of accuracy and by seed.

| | `drift/tv_p95` | `drift/chi2_seq` | within | best correction | correction | repair | both |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
HONEST = """
Errors are of two seeds in this table, and of five in the first one. With engines that agree, importance weights differ
from 1 by rounding only, so what they add in the row `agree` is chance. A gain of 0.3 points is visible if its error is
below 0.15 points. With five seeds the errors of gains are 0.3 to 0.8 points, so that takes some 20 to 130 seeds.
"""


def mixture(path: Path) -> str:
    """Write a student with experts and the tokenizer of the built-in one; return its path."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin:student"))
    model = small_policy(1, len(tokenizer) - 1, 160, experts=EXPERTS).model
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def apart(student: str, precision: str, directory: Path) -> dict[str, Estimate]:
    """Return how far rollouts are from the learner, over the batches of a run."""
    experts = student != STUDENTS[0]
    run = slipstream.train(
        {
            "student": mixture(directory / "student") if experts else "builtin:student",
            "updates": UPDATES,
            "output": str(directory / "run"),
            "data": {"train": "builtin:arithmetic"},
            "sampler": {"max_tokens": 80, "group": 4, **PRECISIONS[precision]},
            "loss": {"weight": 0.0},
            "policy": {"loss": "reinforce"},
            "task": {"reward": "exact"},
            "learner": {"batch_size": 64, "lr": 1e-5, **({"router": "measure"} if experts else {})},
            "schedule": {"kind": "sync"},
            "health": {"stop": False},
            "runtime": {"kind": "inline", "device": "cpu"},
            "log": {"samples": 0, "trace": False},
        },
        quiet=True,
        checks=False,  # sampler and learner differ on purpose
    )
    return {name: estimate([line[name] for line in run.metrics]) for name in APART if experts or name != ROUTER}


def with_precisions(path: Path) -> None:
    print(PRECISE)
    began, within = time.process_time(), list[str]()
    for student, precision in product(STUDENTS, PRECISIONS):
        with tempfile.TemporaryDirectory() as directory:
            found = apart(student, precision, Path(directory))
        bounds = dict(zip(APART, (TV, CHI2, FLIPS), strict=True))
        keeps = all((each.mean or 0.0) < bounds[name] for name, each in found.items())
        if keeps:
            within.append(f"{student} in {precision}")
        cells = [f"{found[name].mean:.2g} ± {found[name].se:.1g}" if name in found else "–" for name in APART]
        print(f"| {student}, {precision} | {' | '.join(cells)} | {'yes' if keeps else 'no'} |")
    print(f"\nIn short: of these rollouts, the budget is kept by {' and '.join(within) or 'none'}.\n{FACTORIAL}")
    gains = dict[str, Estimate]()
    for each in conditions(Sweep(path), "drift/tv_p95"):
        if each.within:
            gains[each.name] = each.gain
        numbers = [f"{of.mean:.2g}" for of in (each.tv, each.chi2)]
        adds = [points(of) for of in (each.gain, each.repair, each.both)]
        print(f"| {' | '.join([each.name, *numbers, 'yes' if each.within else 'no', each.best, *adds])} |")
    names = " and ".join(gains) or "no condition"
    print(f"\nThe conjecture {verdict(gains)} here: {names} keeps the budget.\n{HONEST}")
    print(f"{time.process_time() - began:.0f} s on one core, torch {torch.__version__}.")


def with_study(path: Path) -> None:
    print(TEXT.format(path=path))
    within = dict[str, Estimate]()
    for each in conditions(Sweep(path)):
        if each.within:
            within[each.name] = each.gain
        apart = [f"{found.mean:.2g}" for found in (each.tv, each.chi2)]
        lost = mean_text(each.rejected.mean, each.rejected.se, share=True)
        cells = [each.name, *apart, "yes" if each.within else "no", each.best, points(each.gain), lost]
        print(f"| {' | '.join(cells)} |")
    adds = f": within the budget the best adds {', '.join(map(points, within.values()))}" if within else ""
    print(f"\nThe conjecture {verdict(within)} here{adds}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument(
        "--precisions", action="store_true", help="measure which precisions of rollouts keep the budget"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    (with_precisions if args.precisions else with_study)(args.sweep)


def points(gain: Estimate) -> str:
    return f"{mean_text(100 * (gain.mean or 0.0), gain.se and 100 * gain.se)} points"


if __name__ == "__main__":
    main()
