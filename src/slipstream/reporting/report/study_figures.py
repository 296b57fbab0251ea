"""Figures of a study: final results by arm, and learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log2, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from slipstream.reporting.report import figures
from slipstream.reporting.report.figures import Figure, Json, Series
from slipstream.reporting.report.panels import SHARE, words
from slipstream.reporting.report.points import bins
from slipstream.reporting.report.runs import seconds_at
from slipstream.reporting.report.sections import written
from slipstream.reporting.report.titles import course, shown
from slipstream.run_dir.reading import Line
from slipstream.studies.results import Sweep, SweepCell, evaluated
from slipstream.studies.study import CONDITION, is_number

STRETCHED = 4.0
"""If the largest x divided by the smallest positive x is at least this ratio, the x axis is logarithmic."""
LABELS = 10
"""Largest number of x values that all get a label on the axis."""
HEIGHT = 340
BARS = 5
"""Largest number of arms that are drawn as bars; more arms are drawn as dots."""
TOLD = 5
"""Largest number of claims in a title."""
CURVE = 30
"""Number of points of a learning curve; each is a mean over consecutive updates."""
AXES = {
    "schedule.k": "age of rollouts, updates",
    "schedule.tau": "updates that rollouts may run ahead",
    "learner.lr": "learning rate",
}
CLOCK = "time"
"""Measure that adds learning curves over wall-clock time to a study."""
SECONDS = "seconds since the run began"
Lines = tuple[list[Line], list[Line]]
"""Lines of the updates and of the evaluations of a run."""


def main(sweep: Sweep, measure: str) -> Figure:
    """Draw mean ± standard error of a measure: a line over x for every series, or bars (dots) without x."""
    label, unit = words(measure)
    share = unit == SHARE
    title, note = (
        finding(sweep, measure),
        f"{label}: mean over seeds ± one standard error.",
    )
    y = f"{label}, {unit}" if unit and not share else label
    setting = sweep.study.x
    rows = [row for row in sweep.table(measure) if row.mean is not None]
    names = list(sweep.series())
    if setting is None:
        estimates = {row.series: row for row in rows}
        kept = [name for name in names if name in estimates]
        data = [
            Series(
                name,
                [],
                only(name, estimates[name].mean, kept),
                names.index(name),
                only(name, estimates[name].se, kept),
            )
            for name in kept
        ]
        if len(kept) > BARS:
            return figures.dots(title, note, kept, data, x=y, share=share)
        figure = figures.bars(title, note, kept, data, y=y, share=share, wide=True, height=HEIGHT)
        figure.layout["barmode"] = "overlay"
        return figure
    xs = list(dict.fromkeys(row.x for row in rows))
    place, axis = scale(xs, sweep.shift)
    lines = [
        Series(name, [place[repr(r.x)] for r in own], [r.mean for r in own if r.mean is not None], names.index(name),
               [r.se for r in own])
        for name in names
        if (own := sorted((row for row in rows if row.series == name), key=lambda row: place[repr(row.x)]))
    ]  # fmt: skip
    figure = figures.curves(
        title, note, lines, x=across(setting), y=y, share=share, marks=True, wide=True, legend=True, height=HEIGHT
    )
    figure.layout["xaxis"] |= axis
    return figure


def drawn(sweep: Sweep) -> dict[str, Figure]:
    """Return the result figures by file: NAME.svg for the first measure, NAME-MEASURE.svg for the others."""
    name = sweep.path.resolve().name
    found = {
        f"{name}-{measure.replace('/', '-')}.svg" if i else f"{name}.svg": main(sweep, measure)
        for i, measure in enumerate(sweep.measures)
    }
    return found | ({f"{name}-clock.svg": clock} if (clock := by_clock(sweep)) else {})


def only(name: str, value: float | None, names: Sequence[str]) -> list[float]:
    """Return a list with `value` at the position of `name` in `names`, and NaN at all other positions."""
    return [nan if value is None or each != name else value for each in names]


def scale(xs: Sequence[Any], shift: int = 1) -> tuple[dict[str, float], Json]:
    """Return the position of every x and the axis ticks: log2(x + shift) if x spans several doublings."""
    if not all(map(is_number, xs)):
        return {repr(x): float(i) for i, x in enumerate(xs)}, ticks(range(len(xs)), [written(x) for x in xs])
    above = [x for x in xs if x > 0]
    if min(xs, default=0) >= 0 and above and max(above) / min(above) >= STRETCHED:
        logs = [log2(x + shift) for x in xs]
        return dict(zip(map(repr, xs), logs, strict=True)), ticks(logs, [f"{x:g}" for x in xs])
    return {repr(x): float(x) for x in xs}, ticks(xs, [f"{x:g}" for x in xs]) if len(xs) <= LABELS else {}


def ticks(places: Sequence[float], texts: Sequence[str]) -> Json:
    return {"tickmode": "array", "tickvals": figures.numbers(places), "ticktext": list(map(figures.plain, texts))}


def finding(sweep: Sweep, measure: str) -> str:
    """Return the verdicts of the measure's claims as a title, or else its lowest and highest result."""
    tried = [each for each in sweep.claims() if each.measure == measure]
    by_verdict = dict[str, list[str]]()
    for each in tried[:TOLD]:
        by_verdict.setdefault(each.verdict, []).append(each.claim.says)
    if by_verdict:
        title = " ".join(f"{verdict.capitalize()}: {'; '.join(claims)}." for verdict, claims in by_verdict.items())
        return title + (f" And {len(tried) - TOLD} more." if len(tried) > TOLD else "")
    label, unit = words(measure)
    rows = [(row.mean, place_of(row.series, row.x)) for row in sweep.table(measure) if row.mean is not None]
    if not rows:
        return f"{label}: no run is finished yet"
    (least, low), (most, high) = min(rows), max(rows)
    share = unit == SHARE
    if shown(least, share=share) == shown(most, share=share):
        return f"{label}: {shown(most, share=share)} everywhere"
    return f"{label} from {shown(least, share=share)} ({low}) to {shown(most, share=share)} ({high})"


def across(setting: str) -> str:
    if setting == CONDITION:
        return ""
    return f"{AXES[setting]} ({setting})" if setting in AXES else setting


def place_of(series: str, x: Any) -> str:
    return series if x is None else f"{series} at {written(x)}"


def places(sweep: Sweep) -> list[Any]:
    """Return all different x values of the study in order; [None] for a study without an x setting."""
    return list({repr(point.x): point.x for point in sweep.study.points}.values())


def curves(sweep: Sweep) -> Iterator[Figure]:
    """Yield learning curves by measure and x over updates, and also over time if CLOCK is a measure."""
    lines = {cell.path: (cell.run.metrics, cell.run.evaluations) for cell in sweep.finished}
    for measure in sweep.measures:
        if measure == CLOCK:
            continue
        for x in places(sweep):
            cells = {series: [lines[cell.path] for cell in cells_at(sweep, series, x)] for series in sweep.series()}
            yield from learning(sweep, measure, x, cells, clock=False)
            if CLOCK in sweep.measures:
                yield from learning(sweep, measure, x, cells, clock=True)


def by_clock(sweep: Sweep) -> Figure | None:
    """Draw the first reward over time for series of equal length; None if the study does not measure time."""
    measure = next((each for each in sweep.measures if each.startswith("reward/")), None)
    if measure is None or CLOCK not in sweep.measures or sweep.study.x is not None:
        return None
    label, unit = words(measure)
    found = list[Series]()
    updates = sweep.study.points[0].config.updates
    for slot, (series, points) in enumerate(sweep.series().items()):
        if points[0].config.updates != updates:
            continue
        runs = [(cell.run.metrics, cell.run.evaluations) for cell in sweep.finished if cell.cell.point.series == series]
        found += [Series(series, xs, ys, slot, errors) for xs, ys, errors in learned(runs, measure, clock=True)]
    if not found:
        return None
    first, soonest = found[0], min(found, key=lambda each: each.x[-1])
    had = next((y for x, y in zip(reversed(first.x), reversed(first.y), strict=True) if x <= soonest.x[-1]), first.y[0])
    share, seconds = unit == SHARE, soonest.x[-1]
    title = f"{soonest.name} ends first, after {seconds:.0f} s, at {shown(soonest.y[-1], share=share)}"
    title += "" if soonest is first else f"; {first.name} is then at {shown(had, share=share)}"
    note = f"{label}: mean over seeds, shaded by one standard error."
    figure = figures.ribbons(title, note, found, x=SECONDS, y=label, share=share)
    return replace(figure, legend=True, wide=True, height=HEIGHT)


def learning(
    sweep: Sweep, measure: str, x: Any, cells: Mapping[str, Sequence[Lines]], *, clock: bool
) -> Iterator[Figure]:
    label, unit = words(measure)
    found = [
        Series(name, xs, ys, slot, errors)
        for slot, (name, runs) in enumerate(cells.items())
        for xs, ys, errors in learned(runs, measure, clock=clock)
    ]
    if found:
        ends = {row.series: [row.mean] for row in sweep.table(measure) if row.x == x and row.mean is not None}
        where = f" at {sweep.study.x} = {written(x)}" if sweep.study.x else ""
        share = unit == SHARE
        values = ends if len(found) > 1 else {found[0].name: found[0].y}  # a single series has its trend as title
        title = course(f"{label}{where}", values, share=share)
        yield figures.ribbons(title, "", found, x=SECONDS if clock else "update", y=unit, share=share)


def cells_at(sweep: Sweep, series: str, x: Any) -> list[SweepCell]:
    return [c for c in sweep.finished if c.cell.point.series == series and repr(c.cell.point.x) == repr(x)]


def learned(
    runs: Sequence[Lines], measure: str, *, clock: bool
) -> Iterator[tuple[list[float], list[float], list[float | None]]]:
    """Yield updates (or times, with `clock`), means and standard errors of a measure over the updates of all runs."""
    found = [column(run, measure) for run in runs]
    updates = sorted(set.intersection(*map(set, found))) if found else []
    if not updates:
        return
    at = {update: fmean(seconds_at(run[0], update) for run in runs) if clock else update for update in updates}
    xs, ys, errors = list[float](), list[float](), list[float | None]()
    for first, last in bins(len(updates), min(CURVE, len(updates))):
        stretch = updates[first:last]
        values = [fmean(each[update] for update in stretch) for each in found]
        xs.append(fmean(at[update] for update in stretch))
        ys.append(fmean(values))
        errors.append(stdev(values) / sqrt(len(values)) if len(values) > 1 else None)
    yield xs, ys, errors


def column(run: Lines, measure: str) -> dict[float, float]:
    updates, evaluations = run
    if measure.startswith("eval/"):
        return {float(line["update"]): line["accuracy"] for line in evaluated(measure, evaluations)}
    return {float(line["update"]): line[measure] for line in updates if measure in line}
