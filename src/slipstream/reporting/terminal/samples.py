"""Display of a sample (prompt and response) in a limited number of lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.cells import chop_cells
from rich.text import Text

from slipstream.errors import printable
from slipstream.run_dir.writing import heading

SAMPLE_LINES, PROMPT_LINES = 6, 2
"""Largest number of lines of a response, and of the end of its prompt, in a small display."""
SEEN = "│ "
"""Prefix of lines that an environment returned."""


def sample_lines(quote: Mapping[str, Any], width: int, most: int, *, beside: str = "") -> list[Text]:
    """Return a sample in at most `most` lines: heading, end of the prompt, start and end of the response."""
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
    """Return the response in at most `most` lines; a single line shows only the beginning."""
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
    """Yield the lines of an episode; observations have the prefix SEEN."""
    for kind, text in quote["turns"]:
        stroke = SEEN if kind == "seen" else ""
        for line in folded(plain(text), width - len(stroke)):
            yield stroke + line


def plain(text: str) -> str:
    return printable(text).expandtabs(4).strip("\n")


def middle_out(text: str, width: int, most: int) -> list[str]:
    """Fold text into at most `most` lines; a longer text loses its middle."""
    half = most * width  # upper bound for the characters in these lines
    return without_middle(folded(text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}", width), most)


def without_middle(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: (most - 1) // 2], "…", *lines[len(lines) - most // 2 :]]


def folded(text: str, width: int) -> list[str]:
    return [piece for line in text.split("\n") for piece in chop_cells(line, width) or [""]]
