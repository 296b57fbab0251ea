"""Self-contained HTML page: text, tables, figures as JSON, style, and one copy of plotly.js.

A string that is not `Html` is plain text, and is escaped when it is inserted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from textwrap import wrap
from typing import NewType

from slipstream.reporting.report.figures import Figure, Json, plain
from slipstream.reporting.report.samples_html import visible

Html = NewType("Html", str)
Part = Figure | Html
STEPS = '<div class="steps">{}</div>'.format(
    "".join(
        f'<button type="button" data-step="{step}" aria-label="{label}" title="{label}">{sign}</button>'
        for step, label, sign in (
            ("back", "earlier", "←"),
            ("on", "later", "→"),
            ("in", "zoom in", "+"),
            ("out", "zoom out", "−"),
            ("all", "show all", "all"),
        )
    )
)
"""Buttons for zooming and panning without a mouse."""
LINE = 88
"""Largest number of characters in a line of a figure's title."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    intro: str
    parts: Sequence[Part]

    @property
    def anchor(self) -> str:
        return "-".join("".join(char if char.isalnum() else " " for char in self.title.lower()).split())


@dataclass(frozen=True, slots=True)
class Page:
    kicker: str
    title: str
    lead: str
    sections: Sequence[Section]
    legend: Mapping[int, str]
    """Names by colour number, for all figures; empty for no common legend."""
    footer: Html


def document(page: Page) -> str:
    sections = [section for section in page.sections if section.parts]
    figures = numbered(part for section in sections for part in section.parts if isinstance(part, Figure))
    names = iter(figures)
    contents = "".join(f'<li><a href="#{each.anchor}">{visible(each.title)}</a></li>' for each in sections)
    body = [
        f'<p class="kicker">{visible(page.kicker)}</p><h1>{visible(page.title)}</h1>',
        f'<p class="lead">{visible(page.lead)}</p>' if page.lead else "",
        f'<nav aria-label="contents"><ol>{contents}</ol></nav>',
        legend(page.legend),
        *(render(section, names) for section in sections),
        f"<footer>{page.footer}</footer>",
    ]
    return shell(page.title, "<main>" + "\n".join(body) + "</main>", figures)


def shell(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    data = as_json({name: drawn(figure) for name, figure in figures.items()})
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{visible(title)}</title><style>{asset('page.css')}</style></head><body>\n{body}\n"
        "<noscript><p>The figures need JavaScript. The page loads nothing from the network.</p></noscript>\n"
        f'<script type="application/json" id="figures">{data}</script>\n'
        f'<script type="text/plain" id="plotly">{compressed_plotly() if figures else ""}</script>\n'
        f"<script>{asset('page.js')}</script>\n</body></html>\n"
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # replace lone surrogates, which UTF-8 cannot encode


def drawn(figure: Figure) -> Json:
    """Return the fields of a figure that page.js needs; the HTML itself contains the note and the width."""
    kept = {name: value for name, value in asdict(figure).items() if name not in ("note", "wide")}
    return kept | {"title": "<br>".join(wrap(plain(figure.title), LINE))}


def numbered(figures: Iterable[Figure]) -> dict[str, Figure]:
    return {f"figure-{number}": figure for number, figure in enumerate(figures, 1)}


def render(section: Section, names: Iterator[str]) -> str:
    intro = f'<p class="lead">{visible(section.intro)}</p>' if section.intro else ""
    head = f'<div class="head"><h2>{visible(section.title)}</h2>{intro}</div>'
    # keep the heading with the first figures, or printing can separate them
    parts, grid = ([], [head]) if isinstance(section.parts[0], Figure) else ([head], list[str]())
    for part in [*section.parts, Html("")]:
        if isinstance(part, Figure):
            grid.append(shown(part, next(names)))
        else:
            parts += [f'<div class="grid">{"".join(grid)}</div>', part] if grid else [part]
            grid = []
    return f'<section id="{section.anchor}">{"".join(parts)}</section>'


def shown(figure: Figure, name: str) -> str:
    kind, title = ' class="wide"' if figure.wide else "", visible(figure.title)
    zoom, steps = (" zoom", STEPS) if figure.zoom else ("", "")
    return (
        f"<figure{kind}><figcaption><b>{title}</b><span>{visible(figure.note)}</span></figcaption>{steps}"
        f'<div class="plot{zoom}" id="{name}" role="img" aria-label="{title}" style="height:{figure.height}px"></div>'
        "</figure>"
    )


def legend(names: Mapping[int, str]) -> str:
    if not names:
        return ""
    chips = "".join(
        f'<button type="button" data-slot="{slot}" aria-pressed="true" style="--c:var(--s{slot % 8 + 1})">'
        f"{visible(name)}</button>"
        for slot, name in names.items()
    )
    return f'<div class="legend">{chips}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> Html:
    """Return a table of plain text; `numbers` aligns all columns except the first to the right."""

    def line(kind: str, cells: Sequence[str]) -> str:
        aligned = ['class="n"' if numbers and i else "" for i in range(len(cells))]
        row = "".join(f"<{kind} {each}>{visible(cell)}</{kind}>" for each, cell in zip(aligned, cells, strict=True))
        return f"<tr>{row}</tr>"

    top, body = line("th", head), "".join(line("td", row) for row in rows)
    return Html(f'<div class="scroll"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>')


def paragraph(text: str) -> Html:
    return Html(f"<p>{visible(text)}</p>")


def folded(title: str, text: str) -> Html:
    return Html(
        f'<details><summary>{visible(title)}</summary><div class="box"><pre>{visible(text)}</pre></div></details>'
    )


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
