"""Self-contained HTML page: text, tables, figures as JSON, style, and one copy of plotly.js, by the template page.html.

The template escapes all text, and makes control characters visible: generated text can contain anything.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple
from unicodedata import category

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

import slipstream
from slipstream.reporting.report.figures import COLOURS, Figure, Json, plain

TITLE_WIDTH = 88
"""Largest number of characters in a line of a figure's title."""


class Paragraph(NamedTuple):
    text: str


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = False
    """True to align all columns except the first to the right."""


class Facts(NamedTuple):
    """A few numbers in large type, each with a label."""

    facts: Sequence[tuple[str, str]]


class Folded(NamedTuple):
    """Text that is shown after a click on its title."""

    title: str
    text: str


class Span(NamedTuple):
    """Text of a token, coloured if student and teacher differ."""

    text: str
    hint: str = ""
    side: str = ""
    """Colour: "less" or "more" likely to the teacher than to the student; empty for none."""
    strength: float = 0.0


class Turn(NamedTuple):
    who: str
    spans: Sequence[Span]
    left_out: int = 0
    """Number of further tokens, which are not shown."""


class Sample(NamedTuple):
    heading: str
    turns: Sequence[Turn]
    note: str


class Samples(NamedTuple):
    samples: Sequence[Sample]
    strongest: float
    """Log-prob gap in nats from which a token has the strongest colour."""


Part = Figure | Paragraph | Table | Facts | Folded | Samples


class Section(NamedTuple):
    title: str
    intro: str
    parts: Sequence[Part]

    @property
    def anchor(self) -> str:
        return "-".join("".join(char if char.isalnum() else " " for char in self.title.lower()).split())

    @property
    def groups(self) -> list[tuple[bool, list[Part]]]:
        """Parts in order, grouped into figures (True), which stand side by side, and others."""
        return [(drawn, list(parts)) for drawn, parts in groupby(self.parts, lambda part: isinstance(part, Figure))]


class Page(NamedTuple):
    kicker: str
    title: str
    lead: str
    sections: Sequence[Section]
    legend: Mapping[int, str]
    """Names by colour number, for all figures; empty for no common legend."""
    command: str
    """Command that makes the page."""


def document(page: Page) -> str:
    sections = [section for section in page.sections if section.parts]
    figures = number_figures(part for section in sections for part in section.parts if isinstance(part, Figure))
    names = {id(figure): name for name, figure in figures.items()}
    text = template().render(
        page=page,
        sections=sections,
        name_of=lambda figure: names[id(figure)],
        colours=COLOURS,
        version=slipstream.__version__,
        style=Markup(asset("page.css")),
        script=Markup(asset("page.js")),
        figures=Markup(as_json({name: page_figure(figure) for name, figure in figures.items()})),
        plotly=Markup(compressed_plotly() if figures else ""),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # replace lone surrogates, which UTF-8 cannot encode


@cache
def template() -> Template:
    environment = Environment(
        autoescape=True, finalize=finalize, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(asset("page.html"))


def finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else make_visible(str(value))


def make_visible(text: str) -> str:
    """Replace control and direction characters by visible symbols or numbers."""
    return "".join(map(visible_char, text))


def visible_char(char: str) -> str:
    if char in "\n\t":
        return char
    match category(char):
        case "Cc":
            return chr(0x2400 + ord(char)) if ord(char) < 32 else "␡" if char == "\x7f" else f"\\x{ord(char):02x}"
        case "Cf" | "Cs" | "Zl" | "Zp":
            return f"\\u{ord(char):04x}"
        case _:
            return char


def number_figures(figures: Iterable[Figure]) -> dict[str, Figure]:
    return {f"figure-{number}": figure for number, figure in enumerate(figures, 1)}


def page_figure(figure: Figure) -> Json:
    """Return the fields of a figure that page.js needs; the HTML itself contains the note and the width."""
    fields = {name: value for name, value in asdict(figure).items() if name not in ("note", "wide")}
    return fields | {"title": "<br>".join(wrap(plain(figure.title), TITLE_WIDTH))}


def as_json(data: object) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def asset(name: str) -> str:
    return files("slipstream.reporting.report").joinpath(name).read_text("utf-8")


def compressed_plotly() -> str:
    """Return plotly.js, compressed by gzip, in base64. page.js unpacks it.

    plotly.js.gz is `gzip -9n` of plotly-cartesian.min.js from the npm package plotly.js-cartesian-dist-min 4.1.1 (MIT).
    """
    return base64.b64encode(files("slipstream.reporting.report").joinpath("plotly.js.gz").read_bytes()).decode()
