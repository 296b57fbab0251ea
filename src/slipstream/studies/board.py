"""Progress and results of a study, as a table for a terminal and as lines. A cell is one run of the study.

This module knows cells and events, but no processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import wrap
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from slipstream.statistics import Estimate
from slipstream.studies.cells import Event
from slipstream.studies.results import Aggregate, Sweep, SweepCell
from slipstream.studies.study import value_text

MARKS = {"waiting": "·", "begun": "▸", "done": "✓", "failed": "✗"}
HEAD = 16
"""Maximum width of a column's title in characters; longer titles are wrapped."""
GAP = 2
"""Spaces between two columns."""
ENOUGH = 0.1
"""Share of a cell's updates that must be done before its total duration is estimated."""


class Board:
    def __init__(
        self, sweep: Sweep, todo: Sequence[SweepCell], at_a_time: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sweep, self.at_a_time, self.clock = sweep, at_a_time, clock
        self.states = {cell.path: "done" if cell.finished else "waiting" for cell in sweep.cells}
        self.updates = dict[Any, int]()
        self.todo = list(todo)
        self.since = dict[Any, float]()
        self.took = {cell.path: float(cell.done["seconds"]) for cell in sweep.finished}
        self.began = clock()
        self.tables: list[list[Aggregate]] = []
        self.count()

    def count(self) -> None:
        self.tables = [self.sweep.table(measure) for measure in self.sweep.measures]

    def handle(self, event: Event) -> None:
        cell: SweepCell = event.job.key
        if event.kind == "moved":
            self.updates[cell.path] = event.value
            return
        self.states[cell.path] = event.kind
        self.since[cell.path] = self.clock()
        if event.kind == "done":
            self.took[cell.path] = event.seconds
            self.count()

    def line(self, event: Event) -> str:
        cell: SweepCell = event.job.key
        if event.kind == "failed":
            what = f"failed: {event.value}; {event.job.log}"
        else:
            values = [(measure, self.sweep.value(cell, measure)) for measure in self.sweep.measures]
            what = "  ".join(f"{name} {'–' if value is None else f'{value:.4g}'}" for name, value in values)
        ended = sum(state in ("done", "failed") for state in self.states.values())
        return f"{ended}/{len(self.states)}  {cell.name}: {what}  ({event.seconds:.0f} s{self.remaining()})"

    def remaining(self) -> str:
        """Return the time left as text, estimated from the durations of similar cells; empty if unknown."""
        unfinished = [cell for cell in self.todo if self.states[cell.path] in ("waiting", "begun")]
        durations = dict(self.took)
        for cell in unfinished:
            if (share := self.share(cell)) >= ENOUGH:
                durations[cell.path] = (self.clock() - self.since[cell.path]) / share
        if not durations or not unfinished:
            return ""
        seconds = []
        for cell in unfinished:
            similar = [other.path for other in self.sweep.cells if other.point is cell.point]
            known = [durations[path] for path in similar if path in durations]
            seconds.append(fmean(known or durations.values()) * (1 - self.share(cell)))
        return f", about {clock_time(seconds_left(seconds, self.at_a_time))} left"

    def share(self, cell: SweepCell) -> float:
        return self.updates.get(cell.path, 0) / cell.config.updates

    def panel(self) -> RenderableType:
        counts = Counter(self.states.values())
        head = Text(self.sweep.study.sweep.title or self.sweep.path.name, style="bold")
        doing = ", ".join(
            f"{cell.name} {self.updates.get(cell.path, 0)}/{cell.config.updates}"
            for cell in self.todo
            if self.states[cell.path] == "begun"
        )
        state = (
            f"{counts['done']} of {len(self.states)} cells finished, {counts['begun']} running, "
            f"{counts['failed']} failed, {clock_time(self.clock() - self.began)}{self.remaining()}"
        )
        running = Text(doing, style="cyan", no_wrap=True, overflow="ellipsis")
        return Group(head, Text(state), self.table(), running)

    def table(self) -> Columns:
        rows = []
        for index, point in enumerate(self.sweep.study.points):
            marks = [MARKS[self.states[cell.path]] for cell in self.sweep.cells if cell.point is point]
            rows.append((point.name, "".join(marks), *(text_of(table[index]) for table in self.tables)))
        return Columns(["", "seeds", *self.sweep.measures], rows)


def seconds_left(seconds: Sequence[float], at_a_time: int) -> float:
    """Return the seconds to run all cells, `at_a_time` in parallel; at least the seconds of the longest cell."""
    return max(sum(seconds) / at_a_time, *seconds) if seconds else 0.0


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def text_of(found: Estimate) -> str:
    if found.mean is None:
        return "–"
    return f"{digits(found.mean, 4)} ± {'–' if found.se is None else digits(found.se, 2)}"


def digits(value: float, count: int) -> str:
    """Format a number with `count` significant digits, or with all digits of its integer part."""
    return f"{value:.0f}" if abs(value) >= 10**count else f"{value:.{count}g}"


def summary(sweep: Sweep) -> Iterator[RenderableType]:
    lone = [point for point in sweep.table() if point.n == 1]
    for measure in sweep.measures:
        yield Text(f"\n{measure}, mean ± standard error over seeds", style="bold")
        yield estimates(sweep, measure)
        if lacking := [cell.name for cell in sweep.finished if sweep.value(cell, measure) is None]:
            cells = "1 finished cell has" if len(lacking) == 1 else f"{len(lacking)} finished cells have"
            yield f"{cells} no value of {measure}: {lacking[0]}{' …' * (len(lacking) > 1)}"
        if slopes := sweep.slopes(measure):
            yield Text(f"\nslopes of {measure} against {sweep.doublings}", style="bold")
            yield Columns(["", "slope", "seeds"], [(name, text_of(found), found.n) for name, found in slopes.items()])
    if lone:
        yield Text(f"\n± –: only one seed, so no standard error ({lone[0].series} …)")
    if claims := sweep.claims():
        yield Text("\nclaims", style="bold")
        for each in claims:
            seen = f"{each.measure}: {text_of(each.difference)}, {each.difference.n} seeds, p = {each.p_text} (Holm)"
            yield f"{each.verdict}: {each.claim.says} ({seen})"


def estimates(sweep: Sweep, measure: str) -> Columns:
    first = sweep.study.points[0].arm
    deltas = {(each.series, value_text(each.x)): each.difference for each in sweep.differences(measure)}
    titles = ["", "seeds", measure, *([f"minus {first}, by seed", "pairs"] if deltas else [])]
    rows = list[Sequence[Any]]()
    for point, row in zip(sweep.study.points, sweep.table(measure), strict=True):
        d = deltas.get((point.series, value_text(point.x)))
        rows.append((point.name, row.n, text_of(row), *((text_of(d), d.n) if d else ("", "") if deltas else ())))
    return Columns(titles, rows)


@dataclass(frozen=True)
class Columns:
    """A table that leaves out its last columns if a terminal is too narrow."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [[str(value) for value in row] for row in self.rows]
        heads = [wrap(title, HEAD, break_long_words=False, break_on_hyphens=False) for title in self.titles]
        cells = [[*head, *(row[index] for row in rows)] for index, head in enumerate(heads)]
        widths = [max(map(len, column), default=0) + GAP for column in cells]
        name = min(widths[0], options.max_width // 2)
        shown = [i for i in range(1, len(widths)) if name + sum(widths[1 : i + 1]) - GAP <= options.max_width]
        table = Table(box=None, pad_edge=False)
        table.add_column("", overflow="fold", min_width=name - GAP)
        for index in shown:
            table.add_column("\n".join(heads[index]), justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[index]) for index in (0, *shown)))
        yield table
        if left_out := self.titles[1 + len(shown) :]:
            yield Text(f"columns left out: {', '.join(left_out)}", style="dim")
