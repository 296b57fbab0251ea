"""Progress of a run, updated from its lines of metrics; `train` and `watch` display it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from slipstream.reporting.terminal.metric_formats import LATELY, SPEED, band_of, format_of
from slipstream.run_dir.writing import for_sinks

BLOCKS = "▁▂▃▄▅▆▇█"
POINTS = 128
TURN = 4.0
"""Seconds for which each sample is shown."""
Numbers = Mapping[str, float]
"""Metric values by the names that trackers get (such as train/loss)."""
Quote = Mapping[str, Any]
"""A line of samples.jsonl."""


class Curve:
    """Curve of a whole run in at most POINTS points; when it is full, neighbouring points are averaged in pairs."""

    def __init__(self) -> None:
        self.points, self.size = list[float](), 1
        self.gathered = list[float]()
        """Values of the newest point, which is not complete yet."""

    def add(self, value: float) -> None:
        self.gathered.append(value)
        if len(self.gathered) < self.size:
            return
        self.points = [*self.points, fmean(self.gathered)]
        self.gathered = []
        if len(self.points) == POINTS:
            self.points = [fmean(self.points[i : i + 2]) for i in range(0, POINTS, 2)]
            self.size *= 2


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as one line of block characters; neighbouring values are averaged to fit the width."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in means)


class RunProgress:
    """Newest numbers, curves and recent updates. Other threads read them: collections are replaced, never mutated."""

    def __init__(self) -> None:
        self.curves = dict[str, Curve]()
        self.numbers: Numbers = {}
        self.lately: Sequence[Numbers] = ()
        """Metric values of the last updates, at most LATELY of them."""

    def recall(self, line: Mapping[str, Any]) -> Numbers:
        """Add a line of metrics.jsonl and return its numbers under tracker names."""
        numbers = {name: value for name, value in line.items() if name not in ("kind", "update", "set")}
        named = for_sinks(line["kind"], numbers, line.get("set", ""))
        self.remember(named)
        return named

    def remember(self, numbers: Numbers) -> None:
        self.numbers = {**self.numbers, **numbers}
        for name, value in numbers.items():
            if isfinite(value) and (name == SPEED or format_of(name) or band_of(name)):
                if name not in self.curves:
                    self.curves = {**self.curves, name: Curve()}
                self.curves[name].add(value)

    def made(self, update: Numbers) -> None:
        """Append the numbers of an update to `lately`; `numbers` and `curves` are not changed."""
        self.lately = [*self.lately, update][-LATELY:]

    # --- recent updates --------------------------------------------------------------------------------------------

    @property
    def speed(self) -> float:
        """Response tokens per second over recent updates."""
        return self.sum("train/tokens") / max(self.sum("seconds/update"), 1e-9)

    def left(self, updates: int, since: float) -> float | None:
        """Return the estimated seconds until `updates` more updates are done; None if unknown or `updates` is 0."""
        if not self.lately or not updates:
            return None
        return max(0.0, self.sum("seconds/update") / len(self.lately) * updates - since)

    def sum(self, name: str) -> float:
        return sum(update.get(name, 0.0) for update in self.lately)

    def share(self, name: str) -> float:
        """Return a share of time over recent updates, weighted by their duration."""
        time = sum(update[name] * update.get("seconds/update", 0.0) for update in self.lately if name in update)
        return time / max(self.sum("seconds/update"), 1e-9)

    def mean(self, name: str) -> float | None:
        values = [update[name] for update in self.lately if isfinite(update.get(name, float("nan")))]
        return fmean(values) if values else None

    @property
    def lags(self) -> Counter[int]:
        """Number of recent tokens by lag."""
        found = Counter[int]()
        for update in self.lately:
            for name, count in update.items():
                lag = name.removeprefix("lag/tokens_")
                if lag != name and isfinite(count):
                    found[int(lag)] += round(count)
        return found


class SampleSelector:
    """Selection of the sample to show: the newest update's samples in turn, or any sample after `step`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.quotes: Sequence[Quote] = ()
        self.newest: Sequence[Quote] = ()
        self.shown: Quote | None = None
        self.turn, self.until = 0, 0.0
        self.held = False
        """True after `step`: the sample no longer changes by itself."""

    def gather(self, quotes: Iterable[Quote], *, newest: Iterable[Quote]) -> None:
        self.quotes, self.newest = list(quotes), list(newest)

    def now(self) -> Quote | None:
        if self.newest and (self.shown is None or (self.clock() >= self.until and not self.held)):
            self._show(self.newest[self.turn % len(self.newest)])
            self.turn += 1
        return self.shown

    def step(self, by: int) -> None:
        """Move forwards or backwards by a number of samples, and stop changing automatically."""
        if self.quotes:
            self.held = True
            self._show(self.quotes[(self.place() + by) % len(self.quotes)])

    def place(self) -> int:
        """Return the index of the shown sample, or the last index if that sample is gone."""
        return next((i for i, quote in enumerate(self.quotes) if quote is self.shown), len(self.quotes) - 1)

    def _show(self, quote: Quote) -> None:
        self.shown, self.until = quote, self.clock() + TURN
