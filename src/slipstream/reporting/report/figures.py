"""Figures as plain data: a title that states the result, and traces and layout for plotly.js.

This module knows no run, no study and no plotting library. Colours are names in the page's palette (`var(--s1)`), so
that a figure suits light mode, dark mode and paper. `page.js` inserts the colours and the common settings. Long curves
are thinned, so that a page stays small.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Any

from slipstream.metric_names import Band

Json = dict[str, Any]
COLOURS = 8
DASHES = ("solid", "dash", "dot", "dashdot")
PERCENT_AXIS: Json = {"tickformat": ".0~%"}
MARKED_POINTS = 40
"""Largest number of points drawn one by one; longer curves also get a moving mean."""
CURVE_POINTS, MEAN_POINTS = 400, 150
"""Largest numbers of points of a curve, and of a moving mean."""


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    note: str
    data: list[Json]
    layout: Json
    height: int = 250
    wide: bool = False
    legend: bool = False
    """True if the figure has its own legend. If False, the legend of the page explains the colours."""
    zoom: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one run or arm, with their errors."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    slot: int = 0
    """Number of the colour in the palette."""
    error: Sequence[float | None] = field(default=())

    def ends(self) -> Iterator[float]:
        """Yield the lower and upper end of every error bar."""
        for value, error in zip(self.y, self.error or [None] * len(self.y), strict=True):
            yield from (value - (error or 0.0), value + (error or 0.0))


def colour(slot: int, alpha: float = 1.0) -> str:
    return shade(f"s{slot % COLOURS + 1}", alpha)


def shade(name: str, alpha: float = 1.0) -> str:
    """Return the name of a colour of the page's palette, with optional opacity."""
    return f"var(--{name})" if alpha == 1 else f"var(--{name}/{alpha:g})"


def plain(text: str) -> str:
    """Escape text for plotly, which interprets tags and entities in labels."""
    return html.escape(text, quote=False)


def number(x: float) -> float | None:
    """Round to five digits; return None for a number that JSON cannot represent."""
    return float(f"{x:.5g}") if isfinite(x) else None


def numbers(values: Iterable[float | None]) -> list[float | None]:
    return [None if x is None else number(x) for x in values]


def curves(
    title: str, note: str, series: Sequence[Series], *,
    x: str, y: str, share: bool = False, band: Band | None = None, marks: bool = False, exact: bool = False,
) -> Figure:  # fmt: skip
    """Draw a line for each series; a long series also gets a moving mean, unless `marks` or `exact` is set."""
    few = marks or all(len(each.x) <= MARKED_POINTS for each in series)
    how = points if few else course if exact else trail
    data = [trace for each in series for trace in how(each)]
    layout = axes(x, y, share=share)
    span = reach(end for each in series for end in each.ends())
    if span and band:
        low, high = span = beside(band, span)
        layout["shapes"] = [healthy_shape(band, low, high)]
    if span:
        layout["yaxis"]["range"] = numbers(span)
    return Figure(title, note, data, layout)


def axes(x: str, y: str, *, share: bool = False) -> Json:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}} | (PERCENT_AXIS if share else {})}


def points(each: Series) -> list[Json]:
    marks = {"mode": "lines+markers", "marker": {"size": 5}}
    return [line(each, each.x, each.y) | marks | error_bars(each)]


def course(each: Series) -> list[Json]:
    return [line(each, *thin(each.x, each.y))]


def trail(each: Series) -> list[Json]:
    """Draw all points as a faint line, and their moving mean."""
    faint = {"line": {"color": colour(each.slot, 0.3), "width": 1}}
    return [line(each, *thin(each.x, each.y)) | BACKGROUND | faint, line(each, *smooth(each.x, each.y))]


def ribbons(title: str, note: str, series: Sequence[Series], *, x: str, y: str, share: bool = False) -> Figure:
    """Draw a line for each series, in a band as wide as its error."""
    data: list[Json] = []
    for each in series:
        ends = list(each.ends())
        outline = line(each, [*each.x, *reversed(each.x)], [*ends[1::2], *reversed(ends[::2])])
        edge = {"line": {"width": 0, "color": colour(each.slot)}}
        band = {"fill": "toself", "fillcolor": colour(each.slot, 0.16)}
        data += [outline | BACKGROUND | edge | band, line(each, each.x, each.y)]
    return Figure(title, note, data, axes(x, y, share=share))


BACKGROUND: Json = {"hoverinfo": "skip", "showlegend": False}
"""Settings of a trace that has no text of its own."""


def line(each: Series, x: Sequence[float], y: Sequence[float]) -> Json:
    """Return the trace of a line; its style differs between series of the same colour."""
    dash = DASHES[each.slot // COLOURS % len(DASHES)]
    style = {"color": colour(each.slot), "width": 2, "dash": dash}
    return {**series_name(each), "type": "scatter", "mode": "lines", "x": numbers(x), "y": numbers(y), "line": style}


def series_name(each: Series) -> Json:
    return {"name": plain(each.name), "meta": each.slot}


def error_bars(each: Series, axis: str = "y") -> Json:
    return {f"error_{axis}": {"array": numbers(each.error), "thickness": 1.2, "width": 3}} if each.error else {}


def healthy_shape(band: Band, low: float, high: float) -> Json:
    bottom = low if band.low is None else min(max(band.low, low), high)
    top = high if band.high is None else max(min(band.high, high), low)
    place = {"xref": "paper", "x0": 0, "x1": 1, "y0": number(bottom), "y1": number(top)}
    return {"type": "rect", "layer": "below", "line": {"width": 0}, "fillcolor": shade("healthy", 0.13), **place}


def bars(
    title: str, note: str, labels: Sequence[str], series: Sequence[Series], *, y: str, x: str = "", share: bool = False
) -> Figure:
    """Draw grouped bars; `Series.y` has one number for each label."""
    data = [
        {
            **series_name(each),
            "type": "bar",
            "x": list(map(plain, labels)),
            "y": numbers(each.y),
            "marker": {"color": colour(each.slot)},
            **error_bars(each),
        }
        for each in series
    ]
    layout = axes(x, y, share=share)
    layout["xaxis"] |= {"type": "category"}
    gap = {"bargap": 0.6 if len(labels) < 4 else 0.25}
    return Figure(title, note, data, layout | gap)


def dots(
    title: str, note: str, labels: Sequence[str], series: Sequence[Series], *, x: str, share: bool = False
) -> Figure:
    """Draw a point with its error for each label, one below the other; used for many labels."""
    rows = list(map(plain, labels))
    data = [
        {
            **series_name(each),
            "type": "scatter",
            "mode": "markers",
            "y": rows,
            "x": numbers(each.y),
            "marker": {"size": 8, "color": colour(each.slot)},
            **error_bars(each, "x"),
        }
        for each in series
    ]
    layout = row_axes(x, rows, share=share)
    return Figure(title, note, data, layout, height=90 + 26 * len(rows), wide=True)


def stacks(
    title: str, note: str, rows: Sequence[str], parts: Mapping[str, Sequence[float]], *, x: str, share: bool = False
) -> Figure:
    """Draw a horizontal stacked bar for each row, with a colour for each part."""
    data = [row_bars(slot, part, rows, numbers(values)) for slot, (part, values) in enumerate(parts.items())]
    layout = row_axes(x, list(map(plain, rows)), share=share) | {"barmode": "stack", "bargap": 0.35}
    return Figure(title, note, data, layout, height=130 + 34 * len(rows), legend=True, wide=True)


def row_bars(slot: int, name: str, rows: Sequence[str], lengths: Sequence[float | None]) -> Json:
    """Return the trace of horizontal bars: one activity or part, with a length for each entry of `rows`."""
    bars = {"type": "bar", "orientation": "h", "name": plain(name), "y": list(map(plain, rows)), "x": list(lengths)}
    return bars | {"marker": {"color": colour(slot)}}


def row_axes(x: str, rows: Sequence[str], *, share: bool = False) -> Json:
    """Return the layout of a figure with one row below the other, the first one at the top."""
    layout = axes(x, "")
    layout["xaxis"] |= PERCENT_AXIS if share else {}
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]}
    return layout | {"hovermode": "closest"}


# --- fewer points -----------------------------------------------------------------------------------------------------


def thin(x: Sequence[float], y: Sequence[float], most: int = CURVE_POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` points of a curve: the smallest and the largest of every bin."""
    if len(x) <= most:
        return list(x), list(y)
    extremes: list[int] = []
    for start, stop in bins(len(x), most // 2):
        here = range(start, stop)
        extremes += sorted({min(here, key=y.__getitem__), max(here, key=y.__getitem__)})
    return [x[i] for i in extremes], [y[i] for i in extremes]


def smooth(x: Sequence[float], y: Sequence[float], most: int = MEAN_POINTS) -> tuple[list[float], list[float]]:
    """Return the mean over `window(n)` neighbours around each of at most `most` points."""
    half, total = window(len(x)) // 2, [0.0]
    for value in y:
        total.append(total[-1] + value)
    xs, ys = list[float](), list[float]()
    for start, stop in bins(len(x), min(most, len(x))):
        at = (start + stop) // 2
        first, last = max(0, at - half), min(len(x), at + half + 1)
        xs.append(x[at])
        ys.append((total[last] - total[first]) / (last - first))
    return xs, ys


def window(count: int) -> int:
    """Return the odd number of neighbours in the moving mean of a curve with `count` points."""
    return max(3, count // 20) // 2 * 2 + 1


def bins(count: int, parts: int) -> list[tuple[int, int]]:
    edges = [round(i * count / parts) for i in range(parts + 1)]
    return list(pairwise(edges))


def reach(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the smallest and largest finite value with a margin, or None without values."""
    values = [value for value in values if isfinite(value)]
    if not values:
        return None
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return (low if low == 0 else low - room, high + room)


def beside(band: Band, span: tuple[float, float]) -> tuple[float, float]:
    """Extend a span to include the limits of the band, unless they are far away."""
    low, high = span
    for edge in (band.low, band.high):
        if edge is not None and low - 2 * (high - low) <= edge <= high + 2 * (high - low):
            low, high = min(low, edge - 0.05 * abs(edge)), max(high, edge * 1.05)
    return low, high


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values, or NaN if there are none."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else float("nan")
