"""What a student said, in as many lines as there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.cells import chop_cells
from rich.text import Text

from slipstream.errors import printable
from slipstream.run_dir.writing import heading

SAMPLE_LINES, PROMPT_LINES = 6, 2
"""Most lines of a response, and of the end of its prompt, where space is short."""
SEEN = "│ "
"""Before what an environment said."""


def said(quote: Mapping[str, Any], width: int, most: int, *, beside: str = "") -> list[Text]:
    """A sample in so many lines: the end of its prompt, and of its response the beginning and the end.

    `beside` is told at the right of its heading.
    """
    first, room = title(quote, width, beside), most - 1
    if room < 2:
        return [first][:most]
    end = folded(plain(quote["prompt"])[-most * width :], width)[-min(max(PROMPT_LINES, most // 4), room - 1) :]
    response = shortened(quote, width, room - len(end))
    return [
        first,
        *(Text(line, style="dim", no_wrap=True) for line in end),
        *(Text(line, style="dim" if line.startswith(SEEN) else "", no_wrap=True) for line in response),
    ]


def shortened(quote: Mapping[str, Any], width: int, most: int) -> list[str]:
    """Its response; where there is one line for more than one, their beginning."""
    if quote.get("turns"):
        lines = list(turns(quote, width))
    else:
        lines = middle_out(plain(quote["response"]), width, max(3, most))
    return [lines[0][: width - 1] + "…"] if len(lines) > most == 1 else without_middle(lines, most)


def title(quote: Mapping[str, Any], width: int, beside: str = "") -> Text:
    line = Text(f"── {printable(heading(quote))} ", style="dim", no_wrap=True)
    tail = f" {beside} ──" if beside else ""
    line.truncate(max(0, width - len(tail)), overflow="ellipsis")
    return line.append("─" * (width - len(tail) - line.cell_len) + tail)


def turns(quote: Mapping[str, Any], width: int) -> Iterator[str]:
    """Of an episode: what was said, and, set off by a stroke, what was seen."""
    for kind, text in quote["turns"]:
        stroke = SEEN if kind == "seen" else ""
        for line in folded(plain(text), width - len(stroke)):
            yield stroke + line


def plain(text: str) -> str:
    return printable(text).expandtabs(4).strip("\n")


def middle_out(text: str, width: int, most: int) -> list[str]:
    """In at most so many lines, without the middle if need be."""
    half = most * width  # characters in which these lines are, however few of them make one
    return without_middle(folded(text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}", width), most)


def without_middle(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: (most - 1) // 2], "…", *lines[len(lines) - most // 2 :]]


def folded(text: str, width: int) -> list[str]:
    return [piece for line in text.split("\n") for piece in chop_cells(line, width) or [""]]
