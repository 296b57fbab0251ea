"""What the numbers of a run are called, and how they are written, wherever a person sees them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from statistics import fmean
from typing import Any

from slipstream.metric_names import Band, band, label

Format = Callable[[float], str]
SHARES = ("reward/exact", "reward/math")
"""Rewards that are 0 or 1. Of one's own, nobody knows."""
SPEED = "train/tokens_per_s"
LATELY = 10
"""Updates at either end of a run that are averaged, and over which its speed is a mean."""


def share(value: float) -> str:
    return f"{value:.1%}"


WATCHED: tuple[tuple[str, Format], ...] = (
    (r"reward/\w+", "{:.3g}".format),
    (r"eval/(\w+/)?accuracy", share),
    (r"teacher/(\w+/)?kl", "{:.3f}".format),
    (r"reference/kl", "{:.3f}".format),
    (r"train/loss", "{:.4f}".format),
    (r"length/mean", "{:,.1f}".format),
    (r"train/truncated", share),
    (r"episode/turns", "{:.1f}".format),
    (r"episode/invalid", share),
    (r"episode/seconds", "{:.2f}".format),
    (r"student/entropy", "{:.3f}".format),
    (r"train/grad_norm", "{:.3g}".format),
    (r"freshness/f", "{:.3f}".format),
    (r"lag/mean", "{:.1f}".format),
)
"""What is shown of a run, from top to bottom."""
GAINS = re.compile(r"reward/\w+|teacher/(\w+/)?kl|(\w+/)?accuracy")
"""What a run is for: how it was at the start and how it is at the end."""


@cache
def format_of(name: str) -> Format | None:
    """Of one that is watched; its name is the one that trackers get."""
    if name in SHARES:
        return share
    return next((form for pattern, form in WATCHED if re.fullmatch(pattern, name)), None)


@cache
def band_of(name: str) -> Band | None:
    """Where it is healthy, where that is said in numbers."""
    return band(name.removeprefix("train/"))


def told(name: str, value: float) -> str:
    form = format_of(name)
    return form(value) if form else f"{value:.3g}"


def named(name: str) -> str:
    """What a person calls it; where there are several of a kind, with its own name."""
    kind, *between, last = name.split("/")
    if between:
        return f"{label(f'{kind}/{last}' if kind == 'teacher' else last)} {between[0]}"
    return label(last if kind in ("train", "eval") else name)


def watched(numbers: Iterable[str]) -> list[str]:
    """Of these names those that are watched, from top to bottom."""
    names = list(numbers)
    return [name for pattern, _ in WATCHED for name in names if re.fullmatch(pattern, name)]


def readings(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers worth a look at every update."""
    found = []
    if "train/loss" in numbers:
        found.append((label("loss"), told("train/loss", numbers["train/loss"])))
    found += [(named(name), told(name, value)) for name, value in numbers.items() if re.fullmatch(r"reward/\w+", name)]
    if "lag/mean" in numbers:
        found.append((label("lag/mean"), f"{numbers['lag/mean']:.1f} (max {numbers['lag/max']:.0f})"))
    if SPEED in numbers:
        found.append((label("tokens_per_s"), f"{numbers[SPEED]:,.0f}"))
        found.append((label("samples_per_s"), f"{numbers['train/samples_per_s']:,.1f}"))
    for name, value in numbers.items():
        if held_out := re.fullmatch(r"eval/(?:(\w+)/)?accuracy", name):
            found.append((" ".join(filter(None, (label("accuracy"), held_out[1]))), told("eval/accuracy", value)))
    return found


def from_to(lines: Iterable[Mapping[str, Any]]) -> str:
    """What a run has brought about, from its first updates to its last; nothing for one that is too short to tell."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {"train": [], "eval": []}
    for line in lines:
        by_kind[line["kind"]].append(line)
    train, held_out = by_kind["train"], by_kind["eval"]
    ends = min(LATELY, len(train) // 2)
    if not ends:
        return ""
    found = [
        f"{named(name)} {' → '.join(told(name, fmean(line.get(name, 0.0) for line in part)) for part in parts)}"
        for parts in [(train[:ends], train[-ends:])]
        for name in train[-1]
        if GAINS.fullmatch(name) and name in train[0]
    ]
    if len(held_out) > 1:
        found += [
            f"{named(f'eval/{name}')} {told(f'eval/{name}', held_out[0][name])} → "
            f"{told(f'eval/{name}', held_out[-1][name])}"
            for name in held_out[-1]
            if GAINS.fullmatch(name) and not name.startswith("reward/") and name in held_out[0]
        ]
    updates = "first update → last" if ends == 1 else f"first {ends} updates → last {ends}"
    return f"{updates}: {', '.join(found)}" if found else ""


def hours(seconds: float) -> str:
    """h:mm, and seconds for what is over in a minute."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if seconds >= 60 else f"{seconds:.0f} s"


def listed(counts: Iterable[tuple[str, float]]) -> str:
    """Those that are not zero: `94 rolling out, 10 scoring`."""
    return ", ".join(f"{count:,.0f} {what}" for what, count in counts if count)
