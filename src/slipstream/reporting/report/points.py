"""Reduction of data for figures: fewer points, moving means, and ranges of axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from statistics import fmean

from slipstream.metric_names import Band

MOST = 400
"""Largest number of points of a curve."""
SMOOTH = 150
"""Largest number of points of a moving mean."""


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST) -> tuple[list[float], list[float]]:
    """Return at most `most` points of a curve: the smallest and the largest of every bin."""
    if len(x) <= most:
        return list(x), list(y)
    kept: list[int] = []
    for start, stop in bins(len(x), most // 2):
        here = range(start, stop)
        kept += sorted({min(here, key=y.__getitem__), max(here, key=y.__getitem__)})
    return [x[i] for i in kept], [y[i] for i in kept]


def smoothed(x: Sequence[float], y: Sequence[float], most: int = SMOOTH) -> tuple[list[float], list[float]]:
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
