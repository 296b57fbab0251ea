"""Figures as SVG files on white, drawn in a browser by the same code as in a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

from slipstream.reporting.report.browser import browser
from slipstream.reporting.report.figures import Figure
from slipstream.reporting.report.page import numbered, shell

WIDTH = 800
CHANCE = re.compile(r"\b(defs-|topdefs-|clip|legend|trace|g)([0-9a-f]{6})")
"""Names of SVG parts that contain random digits."""


def draw(figures: Sequence[Figure]) -> list[str]:
    """Return each figure as SVG text; the same figure always gives the same text."""
    named = dict(numbered(figures))
    hidden = "".join(f'<div id="{name}"></div>' for name in named)
    with TemporaryDirectory() as directory, browser() as program:
        path = Path(directory) / "figures.html"
        path.write_text(shell("figures", hidden, named), "utf-8")
        tab = program.tab()
        tab.look(WIDTH)
        tab.open(path)
        tab.run("slipstream.drawn")
        return [settled(tab.run(f"slipstream.svg({name!r}, {WIDTH})")) for name in named]


def settled(url: str) -> str:
    """Return the SVG of a data URL, with random names replaced by numbers."""
    text = unquote(url.partition(",")[2]).replace(' style=""', "")
    names = dict.fromkeys(name for _, name in CHANCE.findall(text))
    numbers = {name: f"{number:06x}" for number, name in enumerate(names)}
    return CHANCE.sub(lambda match: match[1] + numbers[match[2]], text) + "\n"
