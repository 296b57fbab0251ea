"""Report page of a study: result figures, claims with verdicts, tables, and learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.reporting.report import study_figures as arms
from slipstream.reporting.report.page import Html, Page, Part, Section, folded, table
from slipstream.reporting.report.panels import SHARE, words
from slipstream.reporting.report.sections import made_by, written
from slipstream.reporting.report.titles import duration, estimate
from slipstream.studies.results import Sweep, Tried
from slipstream.studies.statistics import Estimate
from slipstream.studies.study import is_number


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
    yield Section("Result", " ".join(sweep.study.sweep.about.split()), list(arms.drawn(sweep).values()))
    yield Section(
        "Claims",
        "A claim holds or does not hold if the difference is more than two standard errors; else it is not visible.",
        [claims(sweep)] if sweep.study.sweep.claims else [],
    )
    yield Section("Table", "Mean ± one standard error over seeds.", list(means(sweep)))
    yield Section(
        "Paired by seed",
        "Runs with the same seed use the same prompts, so only the setting differs between them.",
        list(paired(sweep)),
    )
    yield Section(
        "Learning curves",
        "Mean over seeds; the shaded band is one standard error. Titles are about the last updates, like the table.",
        list(arms.curves(sweep)),
    )
    yield Section("How it was run", "", list(how(sweep)))


def means(sweep: Sweep) -> Iterator[Part]:
    """Yield a table for each measure: series × x, with the number of seeds if some are missing."""
    all_seeds = len(sweep.study.sweep.seeds)
    for measure in sweep.measures:
        cells = {
            (row.series, repr(row.x)): said(row, measure)
            + ("" if row.n == all_seeds else f" ({row.n} of {all_seeds} seeds)")
            for row in sweep.table(measure)
        }
        yield crossed(sweep, measure, list(sweep.series()), cells)


def crossed(sweep: Sweep, measure: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> Html:
    xs = [x for x in arms.places(sweep) if any((name, repr(x)) in cells for name in names)]
    setting = sweep.study.x
    head = [words(measure)[0], *(f"{setting} = {written(x)}" if setting else "" for x in xs)]
    return table(head, [[name, *(cells.get((name, repr(x)), "") for x in xs)] for name in names])


def said(found: Any, measure: str) -> str:
    return estimate(found.mean, found.se, share=words(measure)[1] == SHARE)


def apart(found: Any, measure: str) -> str:
    """Format a difference; a difference of shares is in percentage points."""
    return said(found, measure).replace(" %", " points")


def claims(sweep: Sweep) -> Html:
    rows = [
        [each.claim.says, compared(each), apart(each.found, each.measure), str(each.found.n), each.p_text, each.verdict]
        for each in sweep.claims()
    ]
    return table(["claim", "claimed to be below 0", "difference", "seeds", "p (Holm)", "verdict"], rows)


def compared(tried: Tried) -> str:
    claim, of = tried.claim, words(tried.measure)[0]
    less, than = written(claim.less), written(claim.than)
    if claim.slope:
        return f"{of}: slope of {less} − slope of {than}"
    at, than_at = map(where, claim.places)
    return f"{of}: {less}{at if at != than_at else ''} − {than}{than_at}"


def where(x: Any) -> str:
    return "" if x is None else f" at {x:g}" if is_number(x) else f" at {x}"


def paired(sweep: Sweep) -> Iterator[Part]:
    for measure in sweep.measures:
        found = sweep.differences(measure)
        cells = {(f"{d.series} − {d.base}", repr(d.x)): f"{apart(d.found, measure)}{sigma(d.found)}" for d in found}
        if cells:
            yield crossed(sweep, measure, list(dict.fromkeys(name for name, _ in cells)), cells)
    head, rows = slopes(sweep)
    if rows:
        yield table(head, rows)


def slopes(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: the change of each measure when x (for a lag: x + 1) doubles."""
    found = {(each.series, m): apart(each.found, m) for m in sweep.measures for each in sweep.slopes(m)}
    names = dict.fromkeys(name for name, _ in found)
    head = [f"slope against {sweep.doublings}", *(words(m)[0] for m in sweep.measures)]
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
        total = sum(each["cpu_seconds"] for each in done)
        began = meta.get("platform", "")
        facts = [
            ["CPU time of all runs", duration(total)],
            ["updates, tokens", f"{sum(e['updates'] for e in done):,.0f}, {sum(e['tokens'] for e in done):,.0f}"],
            ["seeds", ", ".join(map(str, sweep.study.sweep.seeds))],
            ["machine", f"{began}, {meta.get('cpus', '')} CPUs"],
        ]
        yield table(["", ""], facts)
    yield folded("study.toml", (sweep.path / "study.toml").read_text("utf-8"))
