"""Figures of a study: final results by arm, and learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2, nan
from statistics import fmean
from typing import Any

from slipstream.reporting.report import figures
from slipstream.reporting.report.figures import Figure, Json, Series
from slipstream.reporting.report.panels import panel_of
from slipstream.reporting.report.points import bins
from slipstream.reporting.report.runs import seconds_at
from slipstream.reporting.report.sections import written
from slipstream.reporting.report.titles import course, shown
from slipstream.run_dir.reading import Line
from slipstream.studies.results import Sweep, evaluated
from slipstream.studies.statistics import estimate
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
MIN_POINTS = 3
"""Smallest number of points of a curve over time; a measure with fewer evaluations is not drawn as a curve."""
CURVE = 30
"""Largest number of points of a learning curve; each is a mean over consecutive updates."""
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
Runs = dict[tuple[str, str], list[Lines]]
"""Finished runs by series and x."""


def main(sweep: Sweep, measure: str) -> Figure:
    """Draw mean ± standard error of a measure: a line over x for every series, or bars (dots) without x."""
    panel = panel_of(measure)
    title, note = finding(sweep, measure), f"{panel.label}: mean over seeds ± one standard error."
    y = f"{panel.label}, {panel.unit}" if panel.unit and not panel.share else panel.label
    rows = [row for row in sweep.table(measure) if row.mean is not None]
    names = list(sweep.series())
    if sweep.study.x is None:
        finished = [row.series for row in rows]
        data = []
        for place, row in enumerate(rows):  # every bar is a series of its own, so that it has its own colour
            means, errors = ([nan] * len(rows) for _ in range(2))
            means[place] = nan if row.mean is None else row.mean
            errors[place] = nan if row.se is None else row.se
            data.append(Series(row.series, [], means, names.index(row.series), errors))
        if len(rows) > BARS:
            return figures.dots(title, note, finished, data, x=y, share=panel.share)
        figure = figures.bars(title, note, finished, data, y=y, share=panel.share)
        figure.layout["barmode"] = "overlay"
        return replace(figure, wide=True, height=HEIGHT)
    position, axis = scale(list(dict.fromkeys(row.x for row in rows)), sweep.shift)
    lines = []
    for slot, name in enumerate(names):
        own = sorted((row for row in rows if row.series == name), key=lambda row: position[repr(row.x)])
        if own:
            xs, ys = [position[repr(row.x)] for row in own], [row.mean for row in own if row.mean is not None]
            lines.append(Series(name, xs, ys, slot, [row.se for row in own]))
    figure = figures.curves(title, note, lines, x=across(sweep.study.x), y=y, share=panel.share, marks=True)
    figure.layout["xaxis"] |= axis
    return replace(figure, wide=True, legend=True, height=HEIGHT)


def drawn(sweep: Sweep) -> dict[str, Figure]:
    """Return result figures by file: NAME.svg for the first measure, NAME-MEASURE.svg for others, NAME-clock.svg."""
    name = sweep.path.resolve().name
    found = {
        f"{name}-{measure.replace('/', '-')}.svg" if i else f"{name}.svg": main(sweep, measure)
        for i, measure in enumerate(sweep.measures)
    }
    return found | ({f"{name}-clock.svg": clock} if (clock := by_clock(sweep)) else {})


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
    panel = panel_of(measure)
    rows = [
        (row.mean, row.series if row.x is None else f"{row.series} at {written(row.x)}")
        for row in sweep.table(measure)
        if row.mean is not None
    ]
    if not rows:
        return f"{panel.label}: no run is finished yet"
    (least, low), (most, high) = min(rows), max(rows)
    first, last = shown(least, share=panel.share), shown(most, share=panel.share)
    if first == last:
        return f"{panel.label}: {first} everywhere"
    return f"{panel.label} from {first} ({low}) to {last} ({high})"


def across(setting: str) -> str:
    if setting == CONDITION:
        return ""
    return f"{AXES[setting]} ({setting})" if setting in AXES else setting


def places(sweep: Sweep) -> list[Any]:
    """Return all different x values of the study in order; [None] for a study without an x setting."""
    return list({repr(point.x): point.x for point in sweep.study.points}.values())


def curves(sweep: Sweep) -> Iterator[Figure]:
    """Yield learning curves by measure and x over updates, and also over time if CLOCK is a measure."""
    runs = lines_of(sweep)
    for measure in sweep.measures:
        for x in places(sweep) if measure != CLOCK else ():
            for clock in (False, True) if CLOCK in sweep.measures else (False,):
                yield from learning(sweep, measure, x, learned(sweep, runs, measure, x, clock=clock), clock=clock)


def by_clock(sweep: Sweep) -> Figure | None:
    """Draw a held-out measure over time for series of equal length, or the training reward if evaluations are rare.

    Return None without such a measure, time or runs, or with an x.
    """
    if CLOCK not in sweep.measures or sweep.study.x is not None:
        return None
    updates = {name: points[0].config.updates for name, points in sweep.series().items()}
    candidates = sorted((each for each in sweep.measures if each.startswith(("eval/", "reward/"))), key=is_reward)
    for measure in candidates:
        found = [
            each
            for each in learned(sweep, lines_of(sweep), measure, None, clock=True)
            if updates[each.name] == sweep.study.points[0].config.updates
        ]
        if found and len(found[0].x) >= MIN_POINTS:
            break
    else:
        return None
    panel = panel_of(measure)
    label = f"{panel.label} of training responses" if is_reward(measure) else panel.label
    first, soonest = found[0], min(found, key=lambda each: each.x[-1])
    seconds, end = soonest.x[-1], shown(soonest.y[-1], share=panel.share)
    title = f"{soonest.name} ends first, after {seconds:.0f} s, at {end}"
    if soonest is not first:
        reached = [y for x, y in zip(first.x, first.y, strict=True) if x <= seconds] or [first.y[0]]
        title += f"; {first.name} is then at {shown(reached[-1], share=panel.share)}"
    note = f"{label}: mean over seeds, shaded by one standard error."
    figure = figures.ribbons(title, note, found, x=SECONDS, y=label, share=panel.share)
    return replace(figure, legend=True, wide=True, height=HEIGHT)


def is_reward(measure: str) -> bool:
    return measure.startswith("reward/")


def learning(sweep: Sweep, measure: str, x: Any, found: Sequence[Series], *, clock: bool) -> Iterator[Figure]:
    if found:
        panel = panel_of(measure)
        ends = {row.series: [row.mean] for row in sweep.table(measure) if row.x == x and row.mean is not None}
        values = ends if len(found) > 1 else {found[0].name: found[0].y}  # a single series has its trend as title
        where = f" at {sweep.study.x} = {written(x)}" if sweep.study.x else ""
        title = course(f"{panel.label}{where}", values, share=panel.share)
        yield figures.ribbons(title, "", found, x=SECONDS if clock else "update", y=panel.unit, share=panel.share)


def lines_of(sweep: Sweep) -> Runs:
    found: Runs = {}
    for cell in sweep.finished:
        point = cell.point
        found.setdefault((point.series, repr(point.x)), []).append((cell.run.metrics, cell.run.evaluations))
    return found


def learned(sweep: Sweep, runs: Runs, measure: str, x: Any, *, clock: bool) -> list[Series]:
    """Return the learning curve of every series at x that has finished runs."""
    names = list(sweep.series())
    found = {name: learning_curve(runs.get((name, repr(x)), []), measure, clock=clock) for name in names}
    return [Series(name, *curve[:2], names.index(name), curve[2]) for name, curve in found.items() if curve]


def learning_curve(
    runs: Sequence[Lines], measure: str, *, clock: bool
) -> tuple[list[float], list[float], list[float | None]] | None:
    """Return updates (or times, with `clock`), means and standard errors over runs; None without a common update."""
    columns = [column(updates, evaluations, measure) for updates, evaluations in runs]
    common = sorted(set.intersection(*map(set, columns))) if columns else []
    if not common:
        return None
    xs, ys, errors = list[float](), list[float](), list[float | None]()
    for first, last in bins(len(common), min(CURVE, len(common))):
        stretch = common[first:last]
        values = [fmean(each[update] for update in stretch) for each in columns]
        xs.append(fmean(seconds_at(run, update) if clock else update for run, _ in runs for update in stretch))
        ys.append(fmean(values))
        errors.append(estimate(values).se)
    return xs, ys, errors


def column(updates: Sequence[Line], evaluations: Sequence[Line], measure: str) -> dict[float, float]:
    if measure.startswith("eval/"):
        name = measure.rpartition("/")[2]
        return {float(line["update"]): line[name] for line in evaluated(measure, evaluations)}
    return {float(line["update"]): line[measure] for line in updates if measure in line}
