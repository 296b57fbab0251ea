"""Markdown page of a study, and docs/findings.md, the index of such pages and of pages written by scripts.

slipstream report runs/finding1 --markdown docs/findings
python -m slipstream.reporting.report.findings_page docs/findings/finding1.md … > docs/findings.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from slipstream.reporting.report import study_figures as arms
from slipstream.reporting.report.study import compared, difference_text, slopes, table_of, title_of
from slipstream.reporting.report.titles import duration
from slipstream.studies.results import STUDY_FILE, Sweep
from slipstream.studies.statistics import Verdict

STUDIES = Path("configs/lab")
CLAIM = re.compile(rf"^\| (.*?) \| .* \| (.*?) \| \*\*({'|'.join(get_args(Verdict))})\*\* \|$", re.MULTILINE)
"""Pattern of claim, p-value and verdict in the page of a study."""
VERDICT = re.compile(r"^(?:In short: .*|.*\bconjecture [a-z ]*? here\b.*)$", re.MULTILINE)
"""Pattern of the conclusion in a page written by a script."""
FIGURE = re.compile(r"^!\[(.*)\]\((.*)\)$", re.MULTILINE)
HEAD = """# Findings

For readers who want to know what the papers' claims about stale rollouts look like here: every claim with its verdict.

A student of 140 k parameters learns arithmetic from a teacher twice its size. Pages about a wide vocabulary use the
task `words` ([built-in tasks](data.md#built-in-tasks)). Results are for these tasks and their models only. Each title
leads to a page with all numbers and the commands that repeat it. The page is a study ([how they work](lab.md)), or the
output of a script. This command collects them here:

```console
{command}
```

Numbers are means over seeds ± one standard error. A claim is a statement of a paper, or an expectation. It *holds* if
the difference by seed has the claimed sign and p is at most 0.05. It *does not hold* if the difference has the other
sign and p is at most 0.05. Every other claim is *open*: these seeds do not decide it. The p-value is Student's t,
two-sided, corrected for all claims of the page by Holm's method. Scripts say whether a conjecture *fails*.
"""


def index(pages: Sequence[Path]) -> Iterator[str]:
    yield HEAD.format(command=" ".join(["python -m", __spec__.name, *map(str, pages), "> docs/findings.md"]))
    for path in pages:
        text, there = path.read_text("utf-8"), path.parent.name
        yield f"\n## [{text.splitlines()[0].removeprefix('# ')}]({there}/{path.name})\n"
        if claims := CLAIM.findall(text):
            yield "| claim | p (Holm) | |\n| --- | --- | --- |"
            yield from (f"| {says} | {p} | {verdict} |" for says, p, verdict in claims)
            yield ""
        yield from VERDICT.findall(text)
        if figure := FIGURE.search(text):
            yield f"![{figure[1]}]({there}/{figure[2]})"


def chapter(sweep: Sweep, directory: Path) -> Iterator[str]:
    study = sweep.study.sweep
    config = STUDIES / f"{sweep.path.resolve().name}.toml"
    again = str(config) if config.exists() else f"{sweep.path / STUDY_FILE} --output {sweep.path}"
    yield f"# {title_of(sweep)}\n"
    if study.about:
        yield f"{study.about.strip()}\n"
    yield f"```console\nslipstream sweep {again}\nslipstream report {sweep.path} --markdown {directory}\n```\n"
    for file, figure in arms.drawn(sweep).items():
        yield f"![{figure.title}]({file})\n"
    if claims := sweep.claims():
        yield "| claim | claimed to be below 0 | is | p (Holm) | |\n| --- | --- | --- | --- | --- |"
        for each in claims:
            difference = difference_text(each.found, each.measure)
            yield f"| {each.claim.says} | {compared(each)} | {difference} | {each.p_text} | **{each.verdict}** |"
        yield ""
    for head, rows in [*(table_of(sweep, measure) for measure in sweep.measures), slopes(sweep)]:
        if rows:
            yield from markdown(head, rows)
    yield f"{made(sweep)}\n"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{' --- |' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def made(sweep: Sweep) -> str:
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


if __name__ == "__main__":
    print("\n".join(index([Path(path) for path in sys.argv[1:]])))
