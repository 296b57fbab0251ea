"""Distribution of terminal lines among blocks: less important blocks get fewer lines, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.text import Text

Lines = list[Text]
MANY = 10_000


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


def fitting(lines: Iterable[Text], width: int) -> Lines:
    found = list(lines)
    for line in found:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return found
