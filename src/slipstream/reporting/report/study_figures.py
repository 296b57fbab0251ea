"""Figures of a study: final results by arm, and learning curves."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2, nan
from statistics import fmean
from typing import Any

from slipstream.metric_names import Metric
from slipstream.reporting.report import figures
from slipstream.reporting.report.charts import RUN_SECONDS, measure_row
from slipstream.reporting.report.figures import Figure, Json, Series, bins
from slipstream.reporting.report.runs import seconds_at
from slipstream.reporting.report.titles import course, setting_text, short
from slipstream.run_dir.reading import Line
from slipstream.statistics import estimate
from slipstream.studies.results import Sweep, evaluations_of
from slipstream.studies.study import CONDITION, is_number

LOGARITHMIC_RATIO = 4.0
"""If the largest x divided by the smallest positive x is at least this ratio, the x axis is logarithmic."""
MAX_LABELS = 10
"""Largest number of x values that all get a label on the axis."""
STUDY_HEIGHT = 340
MAX_BARS = 5
"""Largest number of arms that are drawn as bars; more arms are drawn as dots."""
TITLE_CLAIMS = 5
"""Largest number of claims in a title."""
MIN_POINTS = 3
"""Smallest number of points of a curve over time; a measure with fewer evaluations is not drawn as a curve."""
LEARNING_POINTS = 30
"""Largest number of points of a learning curve; each is a mean over consecutive updates."""
AXIS_TITLES = {
    "schedule.k": "age of rollouts, updates",
    "schedule.tau": "updates that rollouts may run ahead",
    "learner.lr": "learning rate",
}
CLOCK = "time"
"""Measure that adds learning curves over wall-clock time to a study."""
Lines = tuple[list[Line], list[Line]]
"""Lines of the updates and of the evaluations of a run."""
Runs = dict[tuple[str, str], list[Lines]]
"""Finished runs by series and x."""


def row_in(sweep: Sweep, measure: str) -> Metric:
    """Return the row of a measure; a held-out reward that is no share in this study is shown as a number."""
    row = measure_row(measure)
    values = [value for seeds in sweep.by_seed(sweep.study.points, measure) for value in seeds.values()]
    if row.names != "accuracy" or all(0 <= value <= 1 for value in values):
        return row
    return replace(row, title=row.title.replace("accuracy", "reward"), unit="")


def result_figure(sweep: Sweep, measure: str) -> Figure:
    """Draw mean ± standard error of a measure: a line over x for every series, or bars (dots) without x."""
    metric = row_in(sweep, measure)
    title, note = result_title(sweep, measure), f"{metric.title}: mean over seeds ± one standard error."
    y = f"{metric.title}, {metric.unit}" if metric.unit and not metric.is_share else metric.title
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
        if len(rows) > MAX_BARS:
            return figures.dots(title, note, finished, data, x=y, share=metric.is_share)
        figure = figures.bars(title, note, finished, data, y=y, share=metric.is_share)
        figure.layout["barmode"] = "overlay"
        return replace(figure, wide=True, height=STUDY_HEIGHT)
    position, axis = scale(list(dict.fromkeys(row.x for row in rows)), sweep.shift)
    lines = []
    for slot, name in enumerate(names):
        own = sorted((row for row in rows if row.series == name), key=lambda row: position[repr(row.x)])
        if own:
            xs, ys = [position[repr(row.x)] for row in own], [row.mean for row in own if row.mean is not None]
            lines.append(Series(name, xs, ys, slot, [row.se for row in own]))
    figure = figures.curves(title, note, lines, x=axis_title(sweep.study.x), y=y, share=metric.is_share, marks=True)
    figure.layout["xaxis"] |= axis
    return replace(figure, wide=True, legend=True, height=STUDY_HEIGHT)


def result_figures(sweep: Sweep) -> dict[str, Figure]:
    """Return result figures by file: NAME.svg for the first measure, NAME-MEASURE.svg for others, NAME-clock.svg."""
    name = sweep.path.resolve().name
    found = {
        f"{name}-{measure.replace('/', '-')}.svg" if i else f"{name}.svg": result_figure(sweep, measure)
        for i, measure in enumerate(sweep.measures)
    }
    return found | ({f"{name}-clock.svg": clock} if (clock := by_clock(sweep)) else {})


def scale(xs: Sequence[Any], shift: int = 1) -> tuple[dict[str, float], Json]:
    """Return the position of every x and the axis ticks: log2(x + shift) if x spans several doublings."""
    if not all(map(is_number, xs)):
        return {repr(x): float(i) for i, x in enumerate(xs)}, ticks(range(len(xs)), [setting_text(x) for x in xs])
    above = [x for x in xs if x > 0]
    if min(xs, default=0) >= 0 and above and max(above) / min(above) >= LOGARITHMIC_RATIO:
        logs = [log2(x + shift) for x in xs]
        return dict(zip(map(repr, xs), logs, strict=True)), ticks(logs, [f"{x:g}" for x in xs])
    return {repr(x): float(x) for x in xs}, ticks(xs, [f"{x:g}" for x in xs]) if len(xs) <= MAX_LABELS else {}


def ticks(places: Sequence[float], texts: Sequence[str]) -> Json:
    return {"tickmode": "array", "tickvals": figures.numbers(places), "ticktext": list(map(figures.plain, texts))}


def result_title(sweep: Sweep, measure: str) -> str:
    """Return the verdicts of the measure's claims as a title, or else its lowest and highest result."""
    tried = [each for each in sweep.claims() if each.measure == measure]
    by_verdict = dict[str, list[str]]()
    for each in tried[:TITLE_CLAIMS]:
        by_verdict.setdefault(each.verdict, []).append(each.claim.says)
    if by_verdict:
        title = " ".join(f"{verdict.capitalize()}: {'; '.join(claims)}." for verdict, claims in by_verdict.items())
        return title + (f" And {len(tried) - TITLE_CLAIMS} more." if len(tried) > TITLE_CLAIMS else "")
    metric = row_in(sweep, measure)
    rows = [
        (row.mean, row.series if row.x is None else f"{row.series} at {setting_text(row.x)}")
        for row in sweep.table(measure)
        if row.mean is not None
    ]
    if not rows:
        return f"{metric.title}: no finished run has a value in its last updates"
    (least, low), (most, high) = min(rows), max(rows)
    first, last = short(least, share=metric.is_share), short(most, share=metric.is_share)
    if first == last:
        return f"{metric.title}: {first} on average everywhere"
    return f"{metric.title} from {first} ({low}) to {last} ({high})"


def axis_title(setting: str) -> str:
    if setting == CONDITION:
        return ""
    return f"{AXIS_TITLES[setting]} ({setting})" if setting in AXIS_TITLES else setting


def x_values(sweep: Sweep) -> list[Any]:
    """Return all different x values of the study in order; [None] for a study without an x setting."""
    return list({repr(point.x): point.x for point in sweep.study.points}.values())


def curves(sweep: Sweep) -> Iterator[Figure]:
    """Yield learning curves by measure and x over updates, and also over time if CLOCK is a measure."""
    runs = lines_of(sweep)
    for measure in sweep.measures:
        for x in x_values(sweep) if measure != CLOCK else ():
            for clock in (False, True) if CLOCK in sweep.measures else (False,):
                series = learning_series(sweep, runs, measure, x, clock=clock)
                yield from learning_figures(sweep, measure, x, series, clock=clock)


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
            for each in learning_series(sweep, lines_of(sweep), measure, None, clock=True)
            if updates[each.name] == sweep.study.points[0].config.updates
        ]
        if found and len(found[0].x) >= MIN_POINTS:
            break
    else:
        return None
    metric = row_in(sweep, measure)
    label = f"{metric.title} of training responses" if is_reward(measure) else metric.title
    first, soonest = found[0], min(found, key=lambda each: each.x[-1])
    seconds, end = soonest.x[-1], short(soonest.y[-1], share=metric.is_share)
    title = f"{soonest.name} ends first, after {seconds:.0f} s, at {end}"
    if soonest is not first:
        reached = [y for x, y in zip(first.x, first.y, strict=True) if x <= seconds] or [first.y[0]]
        title += f"; {first.name} is then at {short(reached[-1], share=metric.is_share)}"
    note = f"{label}: mean over seeds, shaded by one standard error."
    figure = figures.ribbons(title, note, found, x=RUN_SECONDS, y=label, share=metric.is_share)
    return replace(figure, legend=True, wide=True, height=STUDY_HEIGHT)


def is_reward(measure: str) -> bool:
    return measure.startswith("reward/")


def learning_figures(sweep: Sweep, measure: str, x: Any, found: Sequence[Series], *, clock: bool) -> Iterator[Figure]:
    if found:
        metric = row_in(sweep, measure)
        ends = {row.series: [row.mean] for row in sweep.table(measure) if row.x == x and row.mean is not None}
        values = ends if len(found) > 1 else {found[0].name: found[0].y}  # a single series has its trend as title
        where = f" at {sweep.study.x} = {setting_text(x)}" if sweep.study.x else ""
        title = course(f"{metric.title}{where}", values, share=metric.is_share, where="on average in every arm")
        axis = RUN_SECONDS if clock else "update"
        yield figures.ribbons(title, "", found, x=axis, y=metric.unit, share=metric.is_share)


def lines_of(sweep: Sweep) -> Runs:
    found: Runs = {}
    for cell in sweep.finished:
        point = cell.point
        found.setdefault((point.series, repr(point.x)), []).append((cell.run.metrics, cell.run.evaluations))
    return found


def learning_series(sweep: Sweep, runs: Runs, measure: str, x: Any, *, clock: bool) -> list[Series]:
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
    for first, last in bins(len(common), min(LEARNING_POINTS, len(common))):
        stretch = common[first:last]
        values = [fmean(each[update] for update in stretch) for each in columns]
        xs.append(fmean(seconds_at(run, update) if clock else update for run, _ in runs for update in stretch))
        ys.append(fmean(values))
        errors.append(estimate(values).se)
    return xs, ys, errors


def column(updates: Sequence[Line], evaluations: Sequence[Line], measure: str) -> dict[float, float]:
    if measure.startswith("eval/"):
        name = measure.rpartition("/")[2]
        return {float(line["update"]): line[name] for line in evaluations_of(measure, evaluations)}
    return {float(line["update"]): line[measure] for line in updates if measure in line}
