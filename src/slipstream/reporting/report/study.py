"""Report page of a study: result figures, claims with verdicts, tables, and learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.reporting.report import study_figures as arms
from slipstream.reporting.report.page import Html, Page, Part, Section, folded, table
from slipstream.reporting.report.panels import panel_of
from slipstream.reporting.report.sections import made_by, written
from slipstream.reporting.report.titles import duration, estimate
from slipstream.studies.results import STUDY_FILE, Aggregate, ClaimResult, Sweep
from slipstream.studies.statistics import Estimate
from slipstream.studies.study import is_number

Table = tuple[list[str], list[list[str]]]
"""Names of the columns, and rows."""


def page(sweep: Sweep, command: str) -> Page:
    done, all_of_them = len(sweep.finished), len(sweep.cells)
    count = f"{done} runs" if done == all_of_them else f"{done} of {all_of_them} runs; the others are not finished"
    seeds = len(sweep.study.sweep.seeds)
    return Page(
        kicker="Slipstream study",
        title=title_of(sweep),
        lead=f"{count}: {len(sweep.study.points)} settings × {seeds} seeds, measured over the last "
        f"{sweep.study.sweep.last} updates. Error bars: one standard error over seeds.",
        sections=list(sections(sweep)),
        legend=dict(enumerate(sweep.series())),
        footer=made_by(command),
    )


def title_of(sweep: Sweep) -> str:
    return sweep.study.sweep.title or sweep.path.resolve().name


def sections(sweep: Sweep) -> Iterator[Section]:
    verdicts = "A claim holds, or does not hold, if its corrected p-value is at most 0.05. Otherwise it is open."
    same = "Runs with the same seed use the same prompts, so only the setting differs between them."
    shades = "Mean over seeds, shaded by one standard error. Titles are about the last updates, like the table."
    tables = [table(*table_of(sweep, measure)) for measure in sweep.measures]
    yield Section("Result", " ".join(sweep.study.sweep.about.split()), list(arms.drawn(sweep).values()))
    yield Section("Claims", verdicts, [claims(sweep)] if sweep.study.sweep.claims else [])
    yield Section("Table", "Mean ± one standard error over seeds.", tables)
    yield Section("Paired by seed", same, list(paired(sweep)))
    yield Section("Learning curves", shades, list(arms.curves(sweep)))
    yield Section("How it was run", "", list(how(sweep)))


def table_of(sweep: Sweep, measure: str) -> Table:
    """Return a table of means: series × x, with the number of seeds if some are missing."""
    seeds = len(sweep.study.sweep.seeds)
    cells = {
        (row.series, repr(row.x)): mean_text(row, measure) + ("" if row.n == seeds else f" ({row.n} of {seeds} seeds)")
        for row in sweep.table(measure)
    }
    return crossed(sweep, measure, list(sweep.series()), cells)


def crossed(sweep: Sweep, measure: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> Table:
    xs = [x for x in arms.places(sweep) if any((name, repr(x)) in cells for name in names)]
    setting = sweep.study.x
    head = [panel_of(measure).label, *(f"{setting} = {written(x)}" if setting else "" for x in xs)]
    return head, [[name, *(cells.get((name, repr(x)), "") for x in xs)] for name in names]


def mean_text(found: Aggregate | Estimate, measure: str) -> str:
    return estimate(found.mean, found.se, share=panel_of(measure).share)


def difference_text(found: Estimate, measure: str) -> str:
    """Format a difference; a difference of shares is in percentage points."""
    return mean_text(found, measure).replace(" %", " points")


def claims(sweep: Sweep) -> Html:
    rows = [
        (
            each.claim.says,
            compared(each),
            difference_text(each.found, each.measure),
            str(each.found.n),
            each.p_text,
            each.verdict,
        )
        for each in sweep.claims()
    ]
    return table(["claim", "claimed to be below 0", "difference", "seeds", "p (Holm)", "verdict"], rows)


def compared(tried: ClaimResult) -> str:
    claim, of = tried.claim, panel_of(tried.measure).label
    less, than = written(claim.less), written(claim.than)
    if claim.slope:
        return f"{of}: slope of {less} − slope of {than}"
    at, than_at = map(where, claim.places)
    return f"{of}: {less}{at if at != than_at else ''} − {than}{than_at}"


def where(x: Any) -> str:
    return "" if x is None else f" at {x:g}" if is_number(x) else f" at {x}"


def paired(sweep: Sweep) -> Iterator[Part]:
    for measure in sweep.measures:
        cells = {
            (f"{each.series} − {each.base}", repr(each.x)): difference_text(each.found, measure) + sigma(each.found)
            for each in sweep.differences(measure)
        }
        if cells:
            yield table(*crossed(sweep, measure, list(dict.fromkeys(name for name, _ in cells)), cells))
    head, rows = slopes(sweep)
    if rows:
        yield table(head, rows)


def slopes(sweep: Sweep) -> Table:
    """Return a table of the change of each measure when x (for a lag: x + 1) doubles; without rows if there is none."""
    found = {(name, m): difference_text(slope, m) for m in sweep.measures for name, slope in sweep.slopes(m).items()}
    names = dict.fromkeys(name for name, _ in found)
    head = [f"slope against {sweep.doublings}", *(panel_of(m).label for m in sweep.measures)]
    return head, [[name, *(found.get((name, m), "") for m in sweep.measures)] for name in names]


def sigma(found: Estimate) -> str:
    """Return the distance from 0 in standard errors as text; empty if unknown."""
    if found.mean is None or not found.se or found.se < abs(found.mean) * 1e-9:
        return ""
    return f" ({found.mean / found.se:+.1f} errors)"


def how(sweep: Sweep) -> Iterator[Part]:
    done = [cell.done for cell in sweep.finished]
    if done:
        meta = sweep.finished[0].run.meta
        facts = [
            ["CPU time of all runs", duration(sum(each["cpu_seconds"] for each in done))],
            ["updates, tokens", f"{sum(e['updates'] for e in done):,.0f}, {sum(e['tokens'] for e in done):,.0f}"],
            ["seeds", ", ".join(map(str, sweep.study.sweep.seeds))],
            ["machine", f"{meta.get('platform', '')}, {meta.get('cpus', '')} CPUs"],
        ]
        yield table(["", ""], facts)
    yield folded(STUDY_FILE, (sweep.path / STUDY_FILE).read_text("utf-8"))
