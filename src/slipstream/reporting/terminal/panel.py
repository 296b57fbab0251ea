"""Terminal display of a run, drawn from a `View` of an active run or of a run directory.

Its blocks share the lines of the terminal: less important blocks get fewer lines, or none.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from rich.cells import cell_len
from rich.text import Text

from slipstream.errors import printable
from slipstream.reporting.terminal.charts import (
    BAR_WIDTH,
    PROMPT_LINES,
    SAMPLE_LINES,
    Lines,
    choose_rows,
    displayed_rows,
    lag_text,
    loss_text,
    row_lines,
    sample_lines,
    share_bar,
    stage_bars,
    stage_shares,
    unhealthy_rows,
    wait_text,
)
from slipstream.reporting.terminal.progress import Quote, RunProgress, hours

UNLIMITED = 10_000
"""Number of lines of a display that is not limited by a terminal."""
WITH_BAR, TWO_COLUMNS = 80, 120
"""Smallest terminal width in columns for a progress bar, and for two columns of blocks."""
GUTTER = 4
"""Columns between two columns of blocks."""
NAME_WIDTH = 18
"""Width of a metric's name, in columns."""
SHORTEST_BAR = 10
"""Smallest useful width of a bar, in columns."""
LONG_SAMPLE = 12
"""Lines of a sample if there is room for several samples."""


@dataclass(frozen=True)
class Block:
    rank: int
    """Priority: blocks with a lower rank get lines first."""
    least: int
    """Smallest useful number of lines."""
    good: int
    most: int
    draw: Callable[[int], Sequence[Text]]
    """Function that draws the block in at most the given number of lines."""


BLANK = Block(9, 0, 0, 1, lambda _: [Text()])


def allot(blocks: Sequence[Block], room: int) -> list[int]:
    """Return the number of lines per block: first `least` in order of rank, then up to `good`, then up to `most`."""
    given, shown = [0] * len(blocks), list[int]()
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].rank):
        if blocks[i].least <= room:
            given[i] = blocks[i].least
            room -= given[i]
            shown.append(i)
    for wanted in ("good", "most"):
        for i in shown:
            more = max(0, min(room, getattr(blocks[i], wanted) - given[i]))
            given[i] += more
            room -= more
    return given


def stack(blocks: Sequence[Block], room: int) -> Lines:
    """Return the lines of all blocks, one below the other; unused lines of a block go to the others."""
    while True:
        given = allot(blocks, room)
        drawn = [list(block.draw(count)) if count else [] for block, count in zip(blocks, given, strict=True)]
        used = [len(lines) for lines in drawn]
        if used == given:
            return [line for lines in drawn for line in lines]
        blocks = [
            replace(block, least=min(block.least, n), good=min(block.good, n), most=n) if n < count else block
            for block, count, n in zip(blocks, given, used, strict=True)
        ]


def beside(left: Iterable[Text], right: Iterable[Text], width: int) -> Lines:
    """Join lines as two columns, the left one `width` wide."""
    both: Lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.truncate(width, overflow="ellipsis", pad=bool(other.plain))
        both.append(line.append_text(other))
    return both


def fit_width(lines: Iterable[Text], width: int) -> Lines:
    cut = list(lines)
    for line in cut:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return cut


# --- the whole display ------------------------------------------------------------------------------------------------


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
    return fit_width(stack(blocks, height), width)


def screen(view: View, width: int, height: int) -> Lines:
    """Return the display for a full terminal."""
    if width >= TWO_COLUMNS:
        half = (width - GUTTER) // 2
        parts = [*middle(view, half), BLANK, outer(view, half), news(view, half)]
        body = [columns(parts[0], parts[1:], half)]
    else:
        body = [*middle(view, width), outer(view, width), news(view, width)]
    room = height - bool(view.keys)
    lines = stack([*top(view, width), BLANK, *body, BLANK, sample(view, width, height)], room)
    keys = [*[Text()] * (room - len(lines)), Text(view.keys, style="dim")] if view.keys else []
    return fit_width([*lines, *keys], width)


def page(view: View, width: int) -> Lines:
    """Return the complete display, with as many lines as needed."""
    body = [*top(view, width), *middle(view, width), outer(view, width), news(view, width)]
    return fit_width(stack([*body, sample(view, width, PROMPT_LINES + SAMPLE_LINES + 1)], UNLIMITED), width)


def columns(left: Block, right: list[Block], width: int) -> Block:
    least, good, most = (
        max(getattr(left, what), sum(getattr(block, what) for block in right)) for what in ("least", "good", "most")
    )
    return Block(1, min(4, least), good, most, lambda n: beside(stack([left], n), stack(right, n), width + GUTTER))


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
    bar = min(BAR_WIDTH, max(SHORTEST_BAR, room - title.cell_len - 2)) if width >= WITH_BAR else 0
    title.truncate(room - bar - 2 * bool(bar), overflow="ellipsis", pad=True)
    if bar:
        title.append("  ").append_text(share_bar(view.update / max(view.updates, 1), bar, "━", "─", "green"))
    return title.append(f"  {right}")


# --- metrics ----------------------------------------------------------------------------------------------------------


def middle(view: View, width: int) -> list[Block]:
    """Return the blocks of displayed metrics, stages, lost work, lags and waits."""
    rows, bars = displayed_rows(view.course), stage_shares(view.course)
    count = len(rows)

    def draw(room: int) -> Lines:
        return row_lines(choose_rows(rows, room), width, NAME_WIDTH)

    blocks = [Block(1, min(4, count), min(10, count), count, draw)]
    if bars:
        blocks.append(Block(3, 1, 1, len(bars), partial(stage_bars, bars, width)))
    texts = (loss_text(view.course), "yellow"), (lag_text(view.course), ""), (wait_text(view.course), "dim")
    return blocks + [text_block(rank, text, width, style) for rank, (text, style) in enumerate(texts, 4) if text]


def outer(view: View, width: int) -> Block:
    rows = unhealthy_rows(view.course)
    return Block(7, 0, min(3, len(rows)), min(8, len(rows)), lambda n: row_lines(rows[:n], width, 2 * NAME_WIDTH))


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


def text_block(rank: int, text: str, width: int, style: str) -> Block:
    lines = [Text(line, style=style) for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return Block(rank, 1, len(lines), len(lines), lambda n: lines[:n])


# --- samples ----------------------------------------------------------------------------------------------------------


def sample(view: View, width: int, most: int) -> Block:
    def draw(room: int) -> Lines:
        lines: Lines = []
        each = max(LONG_SAMPLE, room // max(1, min(3, len(view.quotes))))
        for quote in view.quotes:
            left = room - len(lines)
            drawn = partial(sample_lines, quote, width, beside="" if lines else view.place)
            whole = drawn(each)
            if len(whole) > left:
                return lines if lines and left < LONG_SAMPLE // 2 else lines + drawn(left)
            lines += whole
        return lines

    return Block(2, 3, 5, most, draw) if view.quotes else Block(2, 0, 0, 0, lambda _: [])
