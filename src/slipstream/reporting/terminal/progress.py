"""Progress of a run, updated from its lines of metrics, and its numbers as text; `train` and `watch` display them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import isfinite
from statistics import fmean
from typing import Any

from slipstream.metric_names import Band, Metric, describe
from slipstream.run_dir.writing import for_sinks

Numbers = Mapping[str, float]
"""Metric values by the names that trackers get (such as train/loss)."""
Quote = Mapping[str, Any]
"""A line of samples.jsonl."""
DISPLAYED = (
    *(r"reward/\w+", r"eval/(\w+/)?accuracy", r"eval/(\w+/)?kl", r"teacher/(\w+/)?kl", "reference/kl", "train/loss"),
    *("length/mean", "train/truncated", "episode/turns", "episode/invalid", "episode/seconds", "student/entropy"),
    *("train/grad_norm", "freshness/f", "lag/mean"),
)
"""Displayed metrics (patterns of tracker names), from top to bottom."""
GAINS = re.compile(r"reward/\w+|teacher/(\w+/)?kl")
"""Metrics of updates that are compared between the start and the end of a run."""
HELD_OUT = re.compile(r"(?:eval/)?(?:\w+/)?(?:accuracy|kl)")
SPEED = "train/tokens_per_s"
RECENT = 10
"""Number of updates in recent means, and in means at the start and end of a run."""
SPARK_BARS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 128
SAMPLE_SECONDS = 4.0
"""Seconds for which each sample is shown."""


# --- numbers as text --------------------------------------------------------------------------------------------------


@cache
def row_of(name: str) -> Metric:
    """Return the row of a metric by its tracker name; a row without a label for an unknown metric."""
    kind, _, rest = name.partition("/")
    bare = {"train": rest, "eval": rest.rpartition("/")[2]}.get(kind, name)
    return describe(bare) or Metric(name, "", "–", "")


@cache
def band_of(name: str) -> Band | None:
    """Return the healthy range of a metric of updates, by tracker name; None if it has no numeric range."""
    return None if name.startswith("eval/") else row_of(name).band


def title_of(name: str) -> str:
    """Return the display name of a metric, with the held-out set if there are several."""
    kind, *sets, _ = name.split("/")
    return " ".join([*(sets if kind == "eval" else ()), row_of(name).label])


@cache
def is_displayed(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in DISPLAYED)


def displayed_names(numbers: Iterable[str]) -> list[str]:
    """Return the displayed metrics among these names, from top to bottom."""
    names = list(numbers)
    return [name for pattern in DISPLAYED for name in names if re.fullmatch(pattern, name)]


def key_readings(numbers: Numbers) -> list[tuple[str, str]]:
    """Return name and value of the most important metrics of an update."""

    def readings_of(names: Iterable[str]) -> list[tuple[str, str]]:
        return [(title_of(name), row_of(name).text(numbers[name])) for name in names if name in numbers]

    shown = [("stage", "supervised")] if numbers.get("train/sft") else []
    shown += readings_of(["train/loss", *(name for name in numbers if re.fullmatch(r"reward/\w+", name))])
    if "lag/mean" in numbers:
        shown.append((title_of("lag/mean"), f"{numbers['lag/mean']:.1f} (max {numbers['lag/max']:.0f})"))
    if SPEED in numbers:
        shown.append((title_of(SPEED), f"{numbers[SPEED]:,.0f}"))
        shown.append((title_of("train/samples_per_s"), f"{numbers['train/samples_per_s']:,.1f}"))
    return shown + readings_of(name for name in numbers if name.startswith("eval/") and HELD_OUT.fullmatch(name))


def from_to(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a line that compares the first and last updates of a run; empty for a run that is too short."""

    def change(name: str, first: float, last: float) -> str:
        text = row_of(name).text
        return f"{title_of(name)} {text(first)} → {text(last)}"

    known = list(lines)
    train, held_out = ([line for line in known if line["kind"] == kind] for kind in ("train", "eval"))
    count = min(RECENT, len(train) // 2)
    if not count:
        return ""
    changes = [
        change(name, *(fmean(line[name] for line in part if name in line) for part in (train[:count], train[-count:])))
        for name in train[-1]
        if GAINS.fullmatch(name) and name in train[0]
    ]
    for held in dict.fromkeys(line.get("set", "") for line in held_out):
        its = [line for line in held_out if line.get("set", "") == held]
        if len(its) > 1:
            first, last, where = its[0], its[-1], f"eval/{held}/" if held else "eval/"
            names = [name for name in last if HELD_OUT.fullmatch(name) and name in first]
            changes += [change(where + name, first[name], last[name]) for name in names]
    updates = "first update → last" if count == 1 else f"first {count} updates → last {count}"
    return f"{updates}: {', '.join(changes)}" if changes else ""


def hours(seconds: float) -> str:
    """Format a duration as h:mm, or in seconds below one minute."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if seconds >= 60 else f"{seconds:.0f} s"


def counts_text(counts: Iterable[tuple[str, float]]) -> str:
    """Join the counts that are not zero, such as `94 rolling out, 10 scoring`."""
    return ", ".join(f"{count:,.0f} {what}" for what, count in counts if count)


# --- curves -----------------------------------------------------------------------------------------------------------


class Curve:
    """Curve of a whole run in at most CURVE_POINTS points; if it is full, neighbouring points are averaged in pairs."""

    def __init__(self) -> None:
        self.points, self.size = list[float](), 1
        self.pending = list[float]()
        """Values of the newest point, which is not complete yet."""

    def add(self, value: float) -> None:
        self.pending.append(value)
        if len(self.pending) < self.size:
            return
        self.points = [*self.points, fmean(self.pending)]
        self.pending = []
        if len(self.points) == CURVE_POINTS:
            self.points = [fmean(self.points[i : i + 2]) for i in range(0, CURVE_POINTS, 2)]
            self.size *= 2


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as one line of block characters; neighbouring values are averaged to fit the width."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(SPARK_BARS[int((value - low) / span * (len(SPARK_BARS) - 1))] for value in means)


class RunProgress:
    """Newest numbers, curves and recent updates. Other threads read them: collections are replaced, never mutated."""

    def __init__(self) -> None:
        self.curves = dict[str, Curve]()
        self.numbers: Numbers = {}
        self.recent: Sequence[Numbers] = ()
        """Metric values of the last updates, at most RECENT of them."""

    def recall(self, line: Mapping[str, Any]) -> Numbers:
        """Add a line of metrics.jsonl and return its numbers under tracker names."""
        numbers = {name: value for name, value in line.items() if name not in ("kind", "update", "set")}
        by_tracker_name = for_sinks(line["kind"], numbers, line.get("set", ""))
        self.remember(by_tracker_name)
        return by_tracker_name

    def remember(self, numbers: Numbers) -> None:
        self.numbers = {**self.numbers, **numbers}
        for name, value in numbers.items():
            if isfinite(value) and (name == SPEED or is_displayed(name) or band_of(name)):
                if name not in self.curves:
                    self.curves = {**self.curves, name: Curve()}
                self.curves[name].add(value)

    def add_update(self, update: Numbers) -> None:
        """Append the numbers of an update to `recent`; `numbers` and `curves` are not changed."""
        self.recent = [*self.recent, update][-RECENT:]

    # --- recent updates --------------------------------------------------------------------------------------------

    @property
    def speed(self) -> float:
        """Response tokens per second over recent updates."""
        return self.sum("train/tokens") / max(self.sum("seconds/update"), 1e-9)

    def left(self, updates: int, since: float) -> float | None:
        """Return the estimated seconds until `updates` more updates are done; None if unknown or `updates` is 0."""
        if not self.recent or not updates:
            return None
        return max(0.0, self.sum("seconds/update") / len(self.recent) * updates - since)

    def sum(self, name: str) -> float:
        return sum(update.get(name, 0.0) for update in self.recent)

    def share(self, name: str) -> float:
        """Return a share of time over recent updates, weighted by their duration."""
        time = sum(update[name] * update.get("seconds/update", 0.0) for update in self.recent if name in update)
        return time / max(self.sum("seconds/update"), 1e-9)

    def mean(self, name: str) -> float | None:
        values = [update[name] for update in self.recent if isfinite(update.get(name, float("nan")))]
        return fmean(values) if values else None

    @property
    def lags(self) -> Counter[int]:
        """Number of recent tokens by lag."""
        tokens = Counter[int]()
        for update in self.recent:
            for name, count in update.items():
                lag = name.removeprefix("lag/tokens_")
                if lag != name and isfinite(count):
                    tokens[int(lag)] += round(count)
        return tokens


class SampleSelector:
    """Selection of the sample to show: the newest update's samples in turn, or any sample after `step`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.quotes: Sequence[Quote] = ()
        self.newest: Sequence[Quote] = ()
        self.current: Quote | None = None
        self.turn, self.until = 0, 0.0
        self.paused = False
        """True after `step`: the sample no longer changes by itself."""

    def gather(self, quotes: Iterable[Quote], *, newest: Iterable[Quote]) -> None:
        self.quotes, self.newest = list(quotes), list(newest)

    def now(self) -> Quote | None:
        if self.newest and (self.current is None or (self.clock() >= self.until and not self.paused)):
            self._show(self.newest[self.turn % len(self.newest)])
            self.turn += 1
        return self.current

    def step(self, by: int) -> None:
        """Move forwards or backwards by a number of samples, and stop changing automatically."""
        if self.quotes:
            self.paused = True
            self._show(self.quotes[(self.place() + by) % len(self.quotes)])

    def place(self) -> int:
        """Return the index of the shown sample, or the last index if that sample is gone."""
        return next((i for i, quote in enumerate(self.quotes) if quote is self.current), len(self.quotes) - 1)

    def _show(self, quote: Quote) -> None:
        self.current, self.until = quote, self.clock() + SAMPLE_SECONDS
