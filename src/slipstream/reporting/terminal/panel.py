"""Terminal display of a run, drawn from a `View` of an active run or of a run directory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.text import Text

from slipstream.errors import printable
from slipstream.reporting.terminal.charts import (
    BAR,
    chosen,
    filled,
    lags,
    lost,
    outside,
    stage_bars,
    stages,
    table,
    waits,
    watched_rows,
)
from slipstream.reporting.terminal.layout import MANY, Block, Lines, beside, fitting, stack
from slipstream.reporting.terminal.metric_formats import hours
from slipstream.reporting.terminal.progress import Quote, RunProgress
from slipstream.reporting.terminal.samples import PROMPT_LINES, SAMPLE_LINES, sample_lines

WIDE, BROAD = 80, 120
"""Smallest terminal width in columns for a progress bar, and for two columns of blocks."""
GAP = 4
"""Columns between two columns of blocks."""
NAME = 18
"""Width of a metric's name, in columns."""
LEAST = 10
"""Smallest useful width of a bar, in columns."""
SAMPLE = 12
"""Lines of a sample if there is room for several samples."""
BLANK = Block(9, 0, 0, 1, lambda _: [Text()])


@dataclass(frozen=True)
class View:
    title: str
    update: int
    updates: int
    elapsed: float
    """Seconds since the run began."""
    left: float | None
    doing: str
    course: RunProgress
    state: str = ""
    style: str = ""
    """Style of the state text (rich)."""
    quotes: Sequence[Quote] = ()
    """The current sample, then samples to show if there is room."""
    place: str = ""
    """Position of the first sample, such as "3 of 50"."""
    news: Sequence[str] = ()
    keys: str = ""


def inline(view: View, width: int, height: int) -> Lines:
    """Return the display to show below a command's output."""
    blocks = [*top(view, width), *middle(view, width), sample(view, width, PROMPT_LINES + SAMPLE_LINES + 1)]
    return fitting(stack(blocks, height), width)


def screen(view: View, width: int, height: int) -> Lines:
    """Return the display for a full terminal."""
    if width >= BROAD:
        half = (width - GAP) // 2
        parts = [*middle(view, half), BLANK, outer(view, half), news(view, half)]
        body = [columns(parts[0], parts[1:], half)]
    else:
        body = [*middle(view, width), outer(view, width), news(view, width)]
    room = height - bool(view.keys)
    lines = stack([*top(view, width), BLANK, *body, BLANK, sample(view, width, height)], room)
    keys = [*[Text()] * (room - len(lines)), Text(view.keys, style="dim")] if view.keys else []
    return fitting([*lines, *keys], width)


def page(view: View, width: int) -> Lines:
    """Return the complete display, with as many lines as needed."""
    body = [*top(view, width), *middle(view, width), outer(view, width), news(view, width)]
    return fitting(stack([*body, sample(view, width, PROMPT_LINES + SAMPLE_LINES + 1)], MANY), width)


def columns(left: Block, right: list[Block], width: int) -> Block:
    least, good, most = (
        max(getattr(left, what), sum(getattr(block, what) for block in right)) for what in ("least", "good", "most")
    )
    return Block(1, min(4, least), good, most, lambda n: beside(stack([left], n), stack(right, n), width + GAP))


# --- title and state --------------------------------------------------------------------------------------------------


def top(view: View, width: int) -> list[Block]:
    doing = textwrap.wrap(printable(f"{view.state}: {view.doing}" if view.state else view.doing), width)
    lines = [Text(line, style="cyan") for line in doing]
    if lines and view.state:
        lines[0].stylize(view.style, 0, len(view.state))
    return [
        Block(0, 1, 1, 1, lambda _: [head(view, width)]),
        Block(0, 1, 2, min(3, len(lines)), lambda n: lines[:n]),
    ]


def head(view: View, width: int) -> Text:
    times = hours(view.elapsed) + (f", {hours(view.left)} to go" if view.left is not None else "")
    right = f"update {view.update}/{view.updates}  {times}"
    room = max(0, width - cell_len(right) - 2)
    title = Text(" ".join(printable(view.title).split()), style="bold")
    bar = min(BAR, max(LEAST, room - title.cell_len - 2)) if width >= WIDE else 0
    title.truncate(room - bar - 2 * bool(bar), overflow="ellipsis", pad=True)
    if bar:
        title.append("  ").append_text(filled(view.update / max(view.updates, 1), bar, "━", "─", "green"))
    return title.append(f"  {right}")


# --- metrics ----------------------------------------------------------------------------------------------------------


def middle(view: View, width: int) -> list[Block]:
    """Return the blocks of displayed metrics, stages, lost work, lags and waits."""
    rows, bars = watched_rows(view.course), stages(view.course)
    found = [Block(1, min(4, len(rows)), min(10, len(rows)), len(rows), lambda n: table(chosen(rows, n), width, NAME))]
    if bars:
        found.append(Block(3, 1, 1, len(bars), partial(stage_bars, bars, width)))
    for rank, text, style in (
        (4, lost(view.course), "yellow"),
        (5, lags(view.course), ""),
        (6, waits(view.course), "dim"),
    ):
        if text:
            found.append(wrapped(rank, text, width, style))
    return found


def outer(view: View, width: int) -> Block:
    rows = outside(view.course)
    return Block(7, 0, min(3, len(rows)), min(8, len(rows)), lambda n: table(rows[:n], width, 2 * NAME))


def news(view: View, width: int) -> Block:
    events = [textwrap.wrap(printable(text), width, subsequent_indent="  ") for text in view.news[-8:]]

    def draw(room: int) -> Lines:
        lines = events[-1][:room] if len(events[-1]) <= room else [*events[-1][: room - 1], events[-1][room - 1] + " …"]
        for each in reversed(events[:-1]):
            if len(each) + len(lines) > room:
                break
            lines = each + lines
        return [Text(line, style="magenta") for line in lines]

    count = sum(map(len, events))
    return Block(8, min(1, count), min(3, count), min(10, count), draw)


def wrapped(rank: int, text: str, width: int, style: str) -> Block:
    lines = [Text(line, style=style) for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return Block(rank, 1, len(lines), len(lines), lambda n: lines[:n])


# --- samples ----------------------------------------------------------------------------------------------------------


def sample(view: View, width: int, most: int) -> Block:
    def draw(room: int) -> Lines:
        lines: Lines = []
        each = max(SAMPLE, room // max(1, min(3, len(view.quotes))))
        for quote in view.quotes:
            left = room - len(lines)
            drawn = partial(sample_lines, quote, width, beside="" if lines else view.place)
            whole = drawn(each)
            if len(whole) > left:
                return lines if lines and left < SAMPLE // 2 else lines + drawn(left)
            lines += whole
        return lines

    return Block(2, 3, 5, most, draw) if view.quotes else Block(2, 0, 0, 0, lambda _: [])
