"""How a run went so far, from its lines of metrics as they come: what `train` and `watch` draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from slipstream.reporting.terminal.readings import LATELY, SPEED, band_of, format_of
from slipstream.run_dir.writing import for_sinks

BLOCKS = "▁▂▃▄▅▆▇█"
POINTS = 128
"""Most points of a curve."""
TURN = 4.0
"""Seconds for which a sample is shown."""
Numbers = Mapping[str, float]
"""By the names that trackers get."""
Quote = Mapping[str, Any]
"""A line of samples.jsonl."""


class Curve:
    """A whole run in at most so many points: whenever they are full, two neighbours become one."""

    def __init__(self) -> None:
        self.points, self.size = list[float](), 1
        self.gathered = list[float]()
        """Values of the point that is not full yet."""

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
    """The curve in one line, older values averaged together."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in means)


class Course:
    """What another thread goes through is replaced, never changed."""

    def __init__(self) -> None:
        self.curves = dict[str, Curve]()
        self.numbers: Numbers = {}
        """The newest of each name."""
        self.lately: Sequence[Numbers] = ()
        """What the newest updates were."""

    def recall(self, line: Mapping[str, Any]) -> Numbers:
        """A line of metrics.jsonl, as the run log tells it."""
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
        """One more, which is remembered already."""
        self.lately = [*self.lately, update][-LATELY:]

    # --- of the last updates ---------------------------------------------------------------------------------------

    @property
    def speed(self) -> float:
        """Response tokens per second."""
        return self.sum("train/tokens") / max(self.sum("seconds/update"), 1e-9)

    def left(self, updates: int, since: float) -> float | None:
        """Seconds that so many more updates take, if they are as long as those lately; the last was `since` ago."""
        if not self.lately or not updates:
            return None
        return max(0.0, self.sum("seconds/update") / len(self.lately) * updates - since)

    def sum(self, name: str) -> float:
        return sum(update.get(name, 0.0) for update in self.lately)

    def share(self, name: str) -> float:
        """Of the wall clock, from what each update says of its own."""
        time = sum(update[name] * update.get("seconds/update", 0.0) for update in self.lately if name in update)
        return time / max(self.sum("seconds/update"), 1e-9)

    def mean(self, name: str) -> float | None:
        values = [update[name] for update in self.lately if isfinite(update.get(name, float("nan")))]
        return fmean(values) if values else None

    @property
    def lags(self) -> Counter[int]:
        """Tokens of every lag."""
        found = Counter[int]()
        for update in self.lately:
            for name, count in update.items():
                if name.startswith("lag/tokens_") and isfinite(count) and name.removeprefix("lag/tokens_").isdecimal():
                    found[int(name.removeprefix("lag/tokens_"))] += round(count)
        return found


class Turning:
    """One sample at a time, each long enough to be read: those of the newest update in turn, or, for who leafs through
    them, all that are here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.quotes: Sequence[Quote] = ()
        self.newest: Sequence[Quote] = ()
        self.shown: Quote | None = None
        self.turn, self.until = 0, 0.0
        self.held = False
        """Nothing turns by itself."""

    def gather(self, quotes: Iterable[Quote], *, newest: Iterable[Quote]) -> None:
        self.quotes, self.newest = list(quotes), list(newest)

    def now(self) -> Quote | None:
        if self.newest and (self.shown is None or (self.clock() >= self.until and not self.held)):
            self._show(self.newest[self.turn % len(self.newest)])
            self.turn += 1
        return self.shown

    def step(self, by: int) -> None:
        """To the next or the one before, and stay there."""
        if self.quotes:
            self.held = True
            self._show(self.quotes[(self.place() + by) % len(self.quotes)])

    def place(self) -> int:
        """Of the one that is shown among all that are here; the last, if it is not there any more."""
        return next((i for i, quote in enumerate(self.quotes) if quote is self.shown), len(self.quotes) - 1)

    def _show(self, quote: Quote) -> None:
        self.shown, self.until = quote, self.clock() + TURN
