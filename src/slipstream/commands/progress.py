"""What a person sees of a run while it goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.cells import chop_cells
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.commands.samples import printable
from slipstream.pipeline.admission import Admission
from slipstream.runlog import for_sinks, heading
from slipstream.vocabulary import label

Format = Callable[[float], str]
SHARES = ("reward/exact", "reward/math")
"""Rewards that are 0 or 1. Of one's own, nobody knows."""
SPEED = "train/tokens_per_s"
BLOCKS = "▁▂▃▄▅▆▇█"
POINTS = 128
"""Most points of a curve."""
LATELY = 10
"""Updates over which speed is a mean."""
TURN = 4.0
"""Seconds for which a sample is shown."""
SAMPLE_LINES, PROMPT_LINES = 6, 2
"""Most lines of a response, and of the end of its prompt."""
WIDE, BAR = 100, 30
"""Columns that have room for a bar, and its own."""
BESIDE = 36
"""Columns that a name and a number take beside their curve."""


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
    (r"lag/mean", "{:.1f}".format),
)
"""What the panel shows, from top to bottom."""
GAINS = re.compile(r"reward/\w+|teacher/(\w+/)?kl|(\w+/)?accuracy")
"""What a run is for: how it was at the start and how it is at the end."""


class Progress:
    """A sink of the run log; the panel also looks at where the groups are."""

    every = 1

    def __init__(
        self,
        console: Console,
        *,
        updates: int,
        title: str,
        admission: Admission,
        evaluates: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.updates, self.title, self.evaluates = console, updates, title, evaluates
        self.admission, self.clock = admission, clock
        self.start = self.update = admission.version
        self.curves = dict[str, Curve]()
        self.numbers = dict[str, float]()
        self.lately: Sequence[Mapping[str, float]] = ()
        """What the newest updates were. What the display's own thread goes through is replaced, never changed."""
        self.began = self.updated = clock()
        self.quotes: Sequence[Mapping[str, Any]] = ()
        """The samples of the newest update, of which one is shown in turn."""
        self.shown: Mapping[str, Any] | None = None
        self.turn, self.until = 0, 0.0
        self.live = Live(get_renderable=self.panel, console=console, refresh_per_second=2) if lively(console) else None

    def __enter__(self) -> Progress:
        self.began = self.updated = self.clock()
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the panel as it is; what is printed next comes below it."""
        if self.live:
            self.live.stop()

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """What the run was before this part of it, from its metrics.jsonl."""
        for line in lines:
            numbers = {name: value for name, value in line.items() if name not in ("kind", "update", "set")}
            self.remember(for_sinks(line["kind"], numbers, line.get("set", "")))

    def remember(self, numbers: Mapping[str, float]) -> None:
        self.numbers = {**self.numbers, **numbers}
        for name, value in numbers.items():
            if isfinite(value) and (name == SPEED or format_of(name)):
                self.curves.setdefault(name, Curve()).add(value)

    # --- told by the run log -----------------------------------------------------------------------------------

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.remember(numbers)
        if step > self.update:
            self.update, self.updated = step, self.clock()
            self.lately = [*self.lately, numbers][-LATELY:]
        if not self.live:
            self.console.print(self.line(numbers, step), highlight=False, soft_wrap=True)

    def samples(self, quotes: Sequence[Mapping[str, Any]], step: int) -> None:
        self.quotes = quotes

    def close(self) -> None:
        pass

    # --- for a person ------------------------------------------------------------------------------------------

    def line(self, numbers: Mapping[str, float], step: int) -> str:
        parts = [f"update {step}/{self.updates}", *(f"{name} {text}" for name, text in readings(numbers))]
        return "  ".join(parts)

    def panel(self) -> RenderableType:
        rows = list(self.rows())
        parts = [self.head(), Text(self.doing(), style="cyan", no_wrap=True, overflow="ellipsis")]
        if rows:
            parts.append(self.table(rows))
        if quote := self.sample():
            room = self.console.height - len(rows) - PROMPT_LINES - len(parts) - 2
            parts.append(said(quote, self.console.width, max(1, min(SAMPLE_LINES, room))))
        return Group(*parts)

    def head(self) -> RenderableType:
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        left = self.left()
        cells: list[RenderableType] = [
            Text(self.title, style="bold"),
            f"update {self.update}/{self.updates}",
            f"{hours(self.clock() - self.began)}" + (f", {hours(left)} to go" if left is not None else ""),
        ]
        if self.console.width >= WIDE:
            cells.insert(2, ProgressBar(total=self.updates, completed=self.update, width=BAR))
        for _ in cells[1:]:
            line.add_column(no_wrap=True)
        line.add_row(*cells)
        return line

    def left(self) -> float | None:
        """Seconds, if it goes on as it did lately."""
        if not self.lately or self.update == self.updates:
            return None
        each = fmean(update["seconds/update"] for update in self.lately)
        return max(0.0, each * (self.updates - self.update) - (self.clock() - self.updated))

    def doing(self) -> str:
        """Where the groups are; before there are any, what comes first."""
        where = ", ".join(f"{count} {stage}" for stage, count in self.stages() if count)
        if self.update > self.start:
            return f"groups: {where or 'none'}"
        first = "samplers take the first weights" + self.evaluates * " and answer held-out prompts"
        return f"first rollouts: {where}" if where else first

    def stages(self) -> list[tuple[str, int]]:
        a = self.admission
        return [
            ("rolling out", len(a.rolling)),
            ("scoring", len(a.waiting) + len(a.scoring)),
            ("scored", len(a.ready)),
            ("learning", len(a.learning)),
            ("dropped", a.dropped.total()),
        ]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """What there is to watch: its name, how it is now, and how it was so far."""
        width = max(8, min(POINTS // 2, self.console.width - BESIDE))
        for pattern, _ in WATCHED:
            for name in self.numbers:
                if name in self.curves and re.fullmatch(pattern, name):
                    yield named(name), told(name, self.numbers[name]), sparkline(self.curves[name].points, width)
        if self.lately:
            yield label("tokens_per_s"), f"{speed(self.lately):,.0f}", sparkline(self.curves[SPEED].points, width)

    def table(self, rows: Iterable[tuple[str, str, str]]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(max_width=18, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True, style="green")
        table.add_column(no_wrap=True)
        for name, value, curve in rows:
            table.add_row(Text(name), value, curve)
        return table

    def sample(self) -> Mapping[str, Any] | None:
        """One at a time, each long enough to be read."""
        if self.quotes and (self.shown is None or self.clock() >= self.until):
            self.shown, self.until = self.quotes[self.turn % len(self.quotes)], self.clock() + TURN
            self.turn += 1
        return self.shown


def lively(console: Console) -> bool:
    """Whether what was printed there can be replaced."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def waiting(console: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is waited for, and since when, as long as that lasts; it can be told otherwise.

    Only where it can be replaced. The cursor stays: who is killed here could not bring it back.
    """
    began, now = time.monotonic(), [doing]

    def line() -> Text:
        text = f"{now[0]}, {time.monotonic() - began:.0f} s"
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

    if not lively(console):
        yield lambda text: None
        return
    with Live(get_renderable=line, console=console, refresh_per_second=2, transient=True):
        console.show_cursor(True)
        yield lambda text: now.__setitem__(0, text)


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


def format_of(name: str) -> Format | None:
    if name in SHARES:
        return share
    return next((form for pattern, form in WATCHED if re.fullmatch(pattern, name)), None)


def told(name: str, value: float) -> str:
    form = format_of(name)
    assert form is not None
    return form(value)


def named(name: str) -> str:
    """What a person calls it; where there are several of a kind, with its own name."""
    kind, *between, last = name.split("/")
    if between:
        return f"{label(f'{kind}/{last}' if kind == 'teacher' else last)} {between[0]}"
    return label(last if kind in ("train", "eval") else name)


def speed(updates: Iterable[Mapping[str, float]]) -> float:
    """Response tokens per second over several updates."""
    return sum(each["train/tokens"] for each in updates) / max(sum(each["seconds/update"] for each in updates), 1e-9)


def hours(seconds: float) -> str:
    """h:mm, and seconds for what is over in a minute."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if seconds >= 60 else f"{seconds:.0f} s"


def said(quote: Mapping[str, Any], width: int, most: int) -> RenderableType:
    """A sample in so many lines: the end of its prompt, and of its response the beginning and the end."""
    prompt, response = (printable(quote[name]).expandtabs(4).strip("\n") for name in ("prompt", "response"))
    end = folded(prompt[-PROMPT_LINES * width :], width)[-PROMPT_LINES:]
    return Group(
        Text(f"── {heading(quote)} ".ljust(width, "─"), style="dim", no_wrap=True, overflow="ellipsis"),
        *(Text(line, style="dim", no_wrap=True) for line in end),
        *(Text(line, no_wrap=True) for line in middle_out(response, width, most)),
    )


def middle_out(text: str, width: int, most: int) -> list[str]:
    """In at most so many lines, without the middle if need be."""
    half = most * width  # characters in which these lines are, however few of them make one
    lines = folded(text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}", width)
    if len(lines) <= most:
        return lines
    return [*lines[: (most - 1) // 2], "…", *lines[len(lines) - most // 2 :]]


def folded(text: str, width: int) -> list[str]:
    return [piece for line in text.split("\n") for piece in chop_cells(line, width) or [""]]


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
