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
    given = [0] * len(blocks)
    order = sorted(range(len(blocks)), key=lambda i: blocks[i].rank)
    for i in order:
        if blocks[i].least <= room:
            given[i] = blocks[i].least
            room -= given[i]
    there = [i for i in order if given[i] == blocks[i].least]
    for want in ("good", "most"):
        for i in there:
            more = max(0, min(room, getattr(blocks[i], want) - given[i]))
            given[i] += more
            room -= more
    return given


def stack(blocks: Sequence[Block], room: int) -> Lines:
    """Return the lines of all blocks, one below the other; unused lines of a block go to the others."""
    given = allot(blocks, room)
    drawn = [list(block.draw(n)) if n else [] for block, n in zip(blocks, given, strict=True)]
    if all(len(lines) == n for lines, n in zip(drawn, given, strict=True)):
        return [line for lines in drawn for line in lines]
    return stack([upto(b, len(d)) if len(d) < n else b for b, d, n in zip(blocks, drawn, given, strict=True)], room)


def upto(block: Block, lines: int) -> Block:
    return replace(block, least=min(block.least, lines), good=min(block.good, lines), most=lines)


def beside(left: Iterable[Text], right: Iterable[Text], width: int) -> Lines:
    """Join lines as two columns, the left one `width` wide."""
    both: Lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.truncate(width, overflow="ellipsis", pad=bool(other.plain))
        both.append(line.append_text(other))
    return both


def fitting(lines: Iterable[Text], width: int) -> Lines:
    found = []
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
        found.append(line)
    return found
