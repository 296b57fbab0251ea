"""Names and number formats of a run's metrics in all displays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from statistics import fmean
from typing import Any

from slipstream.metric_names import Band, band, label

Format = Callable[[float], str]
SHARES = ("reward/exact", "reward/math")
"""Rewards that are always 0 or 1. User-defined rewards may have any value."""
SPEED = "train/tokens_per_s"
LATELY = 10
"""Number of updates in recent means, and in means at the start and end of a run."""


PERCENT: Format = "{:.1%}".format

WATCHED: tuple[tuple[str, Format], ...] = (
    (r"reward/\w+", "{:.3g}".format),
    (r"eval/(\w+/)?accuracy", PERCENT),
    (r"eval/(\w+/)?kl", "{:.3f}".format),
    (r"teacher/(\w+/)?kl", "{:.3f}".format),
    (r"reference/kl", "{:.3f}".format),
    (r"train/loss", "{:.4f}".format),
    (r"length/mean", "{:,.1f}".format),
    (r"train/truncated", PERCENT),
    (r"episode/turns", "{:.1f}".format),
    (r"episode/invalid", PERCENT),
    (r"episode/seconds", "{:.2f}".format),
    (r"student/entropy", "{:.3f}".format),
    (r"train/grad_norm", "{:.3g}".format),
    (r"freshness/f", "{:.3f}".format),
    (r"lag/mean", "{:.1f}".format),
)
"""Displayed metrics (patterns of tracker names) and their formats, from top to bottom."""
GAINS = re.compile(r"reward/\w+|teacher/(\w+/)?kl")
"""Metrics of updates that are compared between the start and the end of a run."""


@cache
def format_of(name: str) -> Format | None:
    """Return the format of a displayed metric, by tracker name; None for other metrics."""
    if name in SHARES:
        return PERCENT
    return next((form for pattern, form in WATCHED if re.fullmatch(pattern, name)), None)


@cache
def band_of(name: str) -> Band | None:
    """Return the healthy range of a metric, by tracker name; None if it has no numeric range."""
    return band(name.removeprefix("train/"))


def value_text(name: str, value: float) -> str:
    return (format_of(name) or "{:.3g}".format)(value)


def title_of(name: str) -> str:
    """Return the display name of a metric, with the teacher or held-out set if there are several."""
    kind, *between, last = name.split("/")
    if between:
        return f"{label(f'{kind}/{last}' if kind == 'teacher' else last)} {between[0]}"
    return label(last if kind in ("train", "eval") else name)


def displayed(numbers: Iterable[str]) -> list[str]:
    """Return the displayed metrics among these names, from top to bottom."""
    names = list(numbers)
    return [name for pattern, _ in WATCHED for name in names if re.fullmatch(pattern, name)]


def readings(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return name and value of the most important metrics of an update."""
    found = [("stage", "supervised")] if numbers.get("train/sft") else []
    if "train/loss" in numbers:
        found.append((label("loss"), value_text("train/loss", numbers["train/loss"])))
    rewards = [name for name in numbers if re.fullmatch(r"reward/\w+", name)]
    found += [(title_of(name), value_text(name, numbers[name])) for name in rewards]
    if "lag/mean" in numbers:
        found.append((label("lag/mean"), f"{numbers['lag/mean']:.1f} (max {numbers['lag/max']:.0f})"))
    if SPEED in numbers:
        found.append((label("tokens_per_s"), f"{numbers[SPEED]:,.0f}"))
        found.append((label("samples_per_s"), f"{numbers['train/samples_per_s']:,.1f}"))
    held_out = [name for name in numbers if re.fullmatch(r"eval/(\w+/)?(accuracy|kl)", name)]
    return found + [(title_of(name), value_text(name, numbers[name])) for name in held_out]


def from_to(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a line that compares the first and last updates of a run; empty for a run that is too short."""

    def change(name: str, first: float, last: float) -> str:
        return f"{title_of(name)} {value_text(name, first)} → {value_text(name, last)}"

    known = list(lines)
    train, held_out = ([line for line in known if line["kind"] == kind] for kind in ("train", "eval"))
    ends = min(LATELY, len(train) // 2)
    if not ends:
        return ""
    found = [
        change(name, *(fmean(line.get(name, 0.0) for line in part) for part in (train[:ends], train[-ends:])))
        for name in train[-1]
        if GAINS.fullmatch(name) and name in train[0]
    ]
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
        names = [name for name in last if re.fullmatch(r"(\w+/)?(accuracy|kl)", name) and name in first]
        found += [change(f"eval/{name}", first[name], last[name]) for name in names]
    updates = "first update → last" if ends == 1 else f"first {ends} updates → last {ends}"
    return f"{updates}: {', '.join(found)}" if found else ""


def hours(seconds: float) -> str:
    """Format a duration as h:mm, or in seconds below one minute."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if seconds >= 60 else f"{seconds:.0f} s"


def listed(counts: Iterable[tuple[str, float]]) -> str:
    """Join the counts that are not zero, such as `94 rolling out, 10 scoring`."""
    return ", ".join(f"{count:,.0f} {what}" for what, count in counts if count)
