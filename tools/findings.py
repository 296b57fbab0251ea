"""Write docs/findings.md, the index of the pages of findings: `python tools/findings.py PAGE… > docs/findings.md`.

The pages are written by `slipstream report STUDY --markdown docs/findings`, or by scripts.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from slipstream.statistics import Verdict

CLAIM = re.compile(rf"^\| (.*?) \| .* \| \*\*({'|'.join(get_args(Verdict))})\*\* \|$", re.MULTILINE)
"""Pattern of claim and verdict in the page of a study."""
VERDICT = re.compile(r"^(?:In short: (.*)|(.*\bconjecture [a-z ]*? here\b.*))$", re.MULTILINE)
"""Pattern of the conclusion in a page written by a script."""
INTRODUCTION = """# Findings

For readers who want to know what the papers' claims about stale rollouts look like here: every claim with its verdict.

A student of 140 k parameters learns arithmetic from a teacher twice its size; pages about a wide vocabulary use the
task `words` ([built-in tasks](data.md#built-in-tasks)), and one page uses [a real model](real_model.md). Results are
for these tasks and models only. Each title leads to a page with all numbers and the commands that repeat it: a study
([how they work](lab.md)), or the output of a script. This command collects them here:

```console
{command}
```

A claim is a statement of a paper, or an expectation. It *holds* if the difference by seed has the claimed sign and p is
at most 0.05, and *does not hold* with the other sign. Every other claim is *open*: these seeds do not decide it. The
p-value is Student's t, two-sided, corrected for all claims of the page by Holm's method. Scripts say whether a
conjecture *fails*.
"""


def index(pages: Sequence[Path]) -> Iterator[str]:
    yield INTRODUCTION.format(command=" ".join(["python tools/findings.py", *map(str, pages), "> docs/findings.md"]))
    yield "| study | result |\n| --- | --- |"
    for path in pages:
        text = path.read_text("utf-8")
        title = f"[{text.splitlines()[0].removeprefix('# ')}]({path.parent.name}/{path.name})"
        yield f"| {title} | {result(text)} |"


def result(text: str) -> str:
    """Return the claims of a page by verdict; of a page without claims its conclusions."""
    claims = CLAIM.findall(text)
    by_verdict = {verdict: [says for says, own in claims if own == verdict] for verdict in get_args(Verdict)}
    parts = [f"*{verdict.capitalize()}:* {'; '.join(says)}." for verdict, says in by_verdict.items() if says]
    conclusions = dict.fromkeys("".join(words) for words in VERDICT.findall(text))
    return " ".join(parts or [f"{each[0].upper()}{each[1:]}" for each in conclusions])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("pages", type=Path, nargs="+", help="the pages of findings, in the order of the index")
    print("\n".join(index(parser.parse_args().pages)))
