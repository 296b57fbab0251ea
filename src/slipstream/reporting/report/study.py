"""Report of a study as HTML or Markdown: result figures, claims with verdicts, tables, and learning curves."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slipstream.metric_names import Metric
from slipstream.reporting.report import study_figures
from slipstream.reporting.report.page import Folded, Page, Part, Section, Table
from slipstream.reporting.report.study_figures import row_in
from slipstream.reporting.report.titles import duration, mean_text, setting_text
from slipstream.statistics import Estimate, Verdict
from slipstream.studies.results import STUDY_FILE, ClaimResult, Sweep
from slipstream.studies.study import is_number

STUDIES = Path("configs/lab")
"""Directory of the studies of this repository, relative to its root."""
VERDICT_WORDS: Mapping[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "open": ("is open", "are open"),
}
"""Verb of a verdict on one claim and on several."""


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
        command=command,
    )


def title_of(sweep: Sweep) -> str:
    return sweep.study.sweep.title or sweep.path.resolve().name


def sections(sweep: Sweep) -> Iterator[Section]:
    verdicts = "A claim holds, or does not hold, if its corrected p-value is at most 0.05. Otherwise it is open."
    same = "Runs with the same seed use the same prompts, so only the setting differs between them."
    shades = "Mean over seeds, shaded by one standard error. Titles are about the last updates, like the table."
    tables = [table_of(sweep, measure) for measure in sweep.measures]
    figures = study_figures.result_figures(sweep)
    yield Section("Result", " ".join(sweep.study.sweep.about.split()), list(figures.values()))
    yield Section("Claims", verdicts, [claims(sweep)] if sweep.study.sweep.claims else [])
    yield Section("Table", "Mean ± one standard error over seeds.", tables)
    yield Section("Paired by seed", same, list(paired_tables(sweep)))
    yield Section("Learning curves", shades, list(study_figures.curves(sweep)))
    yield Section("How it was run", "", list(run_parts(sweep)))


def table_of(sweep: Sweep, measure: str) -> Table:
    """Return a table of means: series × x, with the number of seeds if some are missing."""
    seeds, metric = len(sweep.study.sweep.seeds), row_in(sweep, measure)
    cells = {
        (row.series, repr(row.x)): value_text(row, metric) + ("" if row.n == seeds else f" ({row.n} of {seeds} seeds)")
        for row in sweep.table(measure)
    }
    return cross_table(sweep, measure, list(sweep.series()), cells)


def cross_table(sweep: Sweep, measure: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> Table:
    xs = [x for x in study_figures.x_values(sweep) if any((name, repr(x)) in cells for name in names)]
    setting = sweep.study.x
    head = [row_in(sweep, measure).title, *(f"{setting} = {setting_text(x)}" if setting else "" for x in xs)]
    return Table(head, [[name, *(cells.get((name, repr(x)), "") for x in xs)] for name in names])


def value_text(value: Estimate, row: Metric) -> str:
    return mean_text(value.mean, value.se, share=row.is_share)


def difference_text(difference: Estimate, row: Metric) -> str:
    """Format a difference; a difference of shares is in percentage points."""
    return value_text(difference, row).replace(" %", " points")


def claims(sweep: Sweep) -> Table:
    rows = []
    for each in sweep.claims():
        row, seeds = row_in(sweep, each.measure), str(each.difference.n)
        difference = difference_text(each.difference, row)
        rows.append([each.claim.says, comparison(each, row), difference, seeds, each.p_text, each.verdict])
    return Table(["claim", "claimed to be below 0", "difference", "seeds", "p (Holm)", "verdict"], rows)


def comparison(result: ClaimResult, row: Metric) -> str:
    claim, of = result.claim, row.title
    less, than = setting_text(claim.less), setting_text(claim.than)
    if claim.slope:
        return f"{of}: slope of {less} − slope of {than}"
    at, than_at = map(at_x, claim.places)
    return f"{of}: {less}{at if at != than_at else ''} − {than}{than_at}"


def at_x(x: Any) -> str:
    return "" if x is None else f" at {x:g}" if is_number(x) else f" at {x}"


def paired_tables(sweep: Sweep) -> Iterator[Part]:
    for measure in sweep.measures:
        cells = {
            (f"{each.series} − {each.base}", repr(each.x)): difference_text(each.difference, row_in(sweep, measure))
            + sigma(each.difference)
            for each in sweep.differences(measure)
        }
        if cells:
            yield cross_table(sweep, measure, list(dict.fromkeys(name for name, _ in cells)), cells)
    if (slopes := slope_table(sweep, sweep.measures)).rows:
        yield slopes


def slope_table(sweep: Sweep, measures: Sequence[str]) -> Table:
    """Return a table of the change of each measure when x (for a lag: x + 1) doubles; without rows if there is none."""
    found = {m: row_in(sweep, m) for m in measures}
    cells = {(name, m): difference_text(each, found[m]) for m in measures for name, each in sweep.slopes(m).items()}
    names = dict.fromkeys(name for name, _ in cells)
    head = [f"slope against {sweep.doublings}", *(row.title for row in found.values())]
    return Table(head, [[name, *(cells.get((name, m), "") for m in measures)] for name in names])


def sigma(difference: Estimate) -> str:
    """Return the distance from 0 in standard errors as text; empty if unknown."""
    mean, error = difference.mean, difference.se
    return "" if mean is None or not error or error < abs(mean) * 1e-9 else f" ({mean / error:+.1f} errors)"


def run_parts(sweep: Sweep) -> Iterator[Part]:
    done = [cell.done for cell in sweep.finished]
    if done:
        meta = sweep.finished[0].run.meta
        facts = [
            ["CPU time of all runs", duration(sum(each["cpu_seconds"] for each in done))],
            ["updates, tokens", f"{sum(e['updates'] for e in done):,.0f}, {sum(e['tokens'] for e in done):,.0f}"],
            ["seeds", ", ".join(map(str, sweep.study.sweep.seeds))],
            ["machine", f"{meta.get('platform', '')}, {meta.get('cpus', '')} CPUs"],
        ]
        yield Table(["", ""], facts)
    yield Folded(STUDY_FILE, (sweep.path / STUDY_FILE).read_text("utf-8"))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown_page(sweep: Sweep, directory: Path) -> Iterator[str]:
    """Yield the lines of the page that is written to a directory, beside its figures."""
    config = STUDIES / f"{sweep.path.resolve().name}.toml"
    again = [config] if config.exists() else [sweep.path / STUDY_FILE, "--output", sweep.path]
    yield f"# {title_of(sweep)}\n"
    if about := sweep.study.sweep.about:
        yield f"{about.strip()}\n"
    commands = ["sweep", *again], ["report", sweep.path, "--markdown", directory]
    yield "\n".join(["```console", *(shlex.join(["slipstream", *map(str, words)]) for words in commands), "```\n"])
    results = sweep.claims()
    claimed = {each.measure for each in results}
    for (file, figure), measure in zip_longest(study_figures.result_figures(sweep).items(), sweep.measures):
        yield f"![{figure.note if measure in claimed else figure.title}]({quote(str(file))})\n"
    if results:
        yield "| claim | claimed to be below 0 | is | p (Holm) | |\n| --- | --- | --- | --- | --- |"
        for each in results:
            row = row_in(sweep, each.measure)
            difference = difference_text(each.difference, row)
            yield row_of([each.claim.says, comparison(each, row), difference, each.p_text, f"**{each.verdict}**"])
        yield f"\n{conclusion(results)}\n"
    for table in markdown_tables(sweep):
        if table.rows:
            yield f"{row_of(table.head)}\n|{' --- |' * len(table.head)}"
            yield from map(row_of, table.rows)
            yield ""
    yield f"{summary_of(sweep)}\n"


def row_of(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |"


def conclusion(results: Sequence[ClaimResult]) -> str:
    """Return how many claims hold, do not hold and are open, as one sentence."""
    counts = Counter(each.verdict for each in results)
    parts = [f"{counts[verdict]} {words[counts[verdict] != 1]}" for verdict, words in VERDICT_WORDS.items()]
    return f"In short: of {len(results)} claim{'s' if len(results) != 1 else ''}, {', '.join(parts)}."


def markdown_tables(sweep: Sweep) -> list[Table]:
    """Return tables of the measures of claims, or else of the first; the figures of the page show the others."""
    claimed = {each.measure for each in sweep.claims()}
    measures = [measure for measure in sweep.measures if measure in claimed] or sweep.measures[:1]
    if sweep.study.x is not None:
        return [*(table_of(sweep, measure) for measure in measures), slope_table(sweep, measures)]
    columns = [{row[0]: row[1] for row in table_of(sweep, measure).rows} for measure in measures]
    rows = [[name, *(column.get(name, "") for column in columns)] for name in sweep.series()]
    return [Table(["", *(row_in(sweep, measure).title for measure in measures)], rows)]


def summary_of(sweep: Sweep) -> str:
    """Return a summary of the runs: their number, seeds, time and machine."""
    done, missing = [cell.done for cell in sweep.finished], len(sweep.cells) - len(sweep.finished)
    meta = sweep.finished[0].run.meta
    seeds = ", ".join(map(str, sweep.study.sweep.seeds))
    return (
        f"{len(done)} runs{f', {missing} are missing' if missing else ''}; seeds {seeds}; "
        f"{sum(each['updates'] for each in done):,.0f} updates in "
        f"{duration(sum(each['cpu_seconds'] for each in done))} of CPU; "
        f"{meta['cpus']} cores, torch {meta['packages']['torch']}, {meta['started'][:10]}."
    )
