"""docs/findings.md: studies as chapters of one page, each with its figure, its claims and its numbers; and what was
written by a script, a file that is a chapter.

python -m slipstream.insight.report.chapters runs/finding1 … docs/findings/variance.md > docs/findings.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.insight.report import arms
from slipstream.insight.report.findings import duration
from slipstream.insight.report.panels import words
from slipstream.insight.report.sections import written
from slipstream.insight.report.study import apart, compared, said, title_of
from slipstream.lab.results import Sweep

VERDICT = re.compile(r"\bconjecture ([a-z ]*?) here\b")
"""Of a script."""
FIGURES = "findings"
"""The directory of the figures, beside the page."""
HEAD = """# Findings

What the papers say of distillation on stale rollouts, tried on a laptop: a student of 140 k parameters learns
arithmetic from a teacher of twice its size, both brought along. Effects are of this task and these models; where they
show, and where they do not, is said either way. A chapter is a study ([how they work](lab.md)), which one command runs
and one draws, or what a script has measured; this page is made of them all by

```console
{command}
```

Numbers are means over seeds ± one standard error. A claim is what a paper says, or what was to be expected; it *holds*
where the difference by seed has its sign and is more than two standard errors from 0, *does not hold* where it is as
far on the other side, and is *not visible* in between. Of a conjecture a script says whether it *fails*.
"""


def page(paths: Sequence[Path]) -> Iterator[str]:
    command = " ".join(["python -m", __spec__.name, *map(str, paths), "> docs/findings.md"])
    yield HEAD.format(command=command)
    sweeps = [Sweep(path) for path in paths if path.is_dir()]
    yield "| claim | |\n| --- | --- |"
    for sweep in sweeps:
        yield f"| **[{title_of(sweep)}](#{anchor(title_of(sweep))})** | |"
        for each in sweep.claims():
            yield f"| {each.claim.says} | {each.verdict} |"
    texts = [path.read_text("utf-8").strip() for path in paths if not path.is_dir()]
    for text in texts:
        title = text.splitlines()[0].removeprefix("## ")
        yield f"| **[{title}](#{anchor(title)})** | |"
        if verdicts := dict.fromkeys(VERDICT.findall(text)):
            yield f"| the conjecture | {', '.join(verdicts)} |"
    for sweep in sweeps:
        yield from chapter(sweep)
    for text in texts:
        yield f"\n{text}"


def chapter(sweep: Sweep) -> Iterator[str]:
    name, study = sweep.path.name, sweep.study.sweep
    yield f"\n## {title_of(sweep)}\n"
    if study.about:
        yield f"{study.about.strip()}\n"
    yield (
        f"```console\nslipstream sweep configs/lab/{name}.toml\n"
        f"slipstream report {sweep.path} --svg docs/{FIGURES}\n```\n"
    )
    for measure, file in arms.files(sweep).items():
        yield f"![{arms.finding(sweep, measure)}]({FIGURES}/{file})\n"
    if claims := sweep.claims():
        yield "| claim | claimed to be below 0 | is | |\n| --- | --- | --- | --- |"
        for each in claims:
            yield f"| {each.claim.says} | {compared(each)} | {apart(each.found, each.measure)} | **{each.verdict}** |"
        yield ""
    for measure in sweep.measures:
        yield from table(sweep, measure)
    yield f"{made(sweep)}\n"


def anchor(title: str) -> str:
    """Of a heading, as pages of a repository make it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def table(sweep: Sweep, measure: str) -> Iterator[str]:
    """A row for every series, a column for every x."""
    places = arms.places(sweep)
    setting = sweep.study.x
    head = [words(measure)[0], *(f"{setting} = {written(x)}" if setting else "" for x in places)]
    cells = {(row.series, repr(row.x)): said(row, measure) for row in sweep.table(measure)}
    yield f"| {' | '.join(head)} |\n|{' --- |' * len(head)}"
    for series in sweep.series():
        yield f"| {series} | {' | '.join(cells.get((series, repr(x)), '') for x in places)} |"
    yield ""


def made(sweep: Sweep) -> str:
    """Of how many runs, in which time, where."""
    done, missing = [cell.done for cell in sweep.finished], len(sweep.cells) - len(sweep.finished)
    meta = sweep.finished[0].run.meta
    seeds = ", ".join(map(str, sweep.study.sweep.seeds))
    return (
        f"{len(done)} runs{f', {missing} are missing' if missing else ''}; seeds {seeds}; "
        f"{sum(each['updates'] for each in done):,.0f} updates in "
        f"{duration(sum(each['cpu_seconds'] for each in done))} of CPU; "
        f"{meta['cpus']} cores, torch {meta['packages']['torch']}, {meta['started'][:10]}."
    )


if __name__ == "__main__":
    print("\n".join(page([Path(path) for path in sys.argv[1:]])), end="")
