"""`make zoo`: every family on trial, and the table of docs/models.md. Fails where one is neither exact nor refused."""

import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from zoo import families
from zoo.trial import LIMIT, TRIALS, attempt

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin: made by make zoo -->", "<!-- end -->"
SHARE = re.compile(r"[\d.]+%")
"""Shares in messages, which differ from model to model."""


@dataclass
class Row:
    name: str
    kind: str = ""
    passed: dict[str, float] = field(default_factory=dict)
    """The largest error of each trial."""
    refused: dict[str, str] = field(default_factory=dict)
    """The sentence, by trial."""
    broken: dict[str, str] = field(default_factory=dict)
    """Neither: a traceback, or a number that is wrong."""
    seconds: float = 0.0

    @property
    def marks(self) -> str:
        marks = dict.fromkeys(self.broken, "✗") | dict.fromkeys(self.passed, "✓") | dict.fromkeys(self.refused, "–")
        return " | ".join(marks.get(trial, "") for trial in TRIALS)

    def __str__(self) -> str:
        return f"{self.marks} | {self.name}"


def try_out(name: str) -> Row:
    row, began = Row(name), time.perf_counter()
    try:
        model = families.make(name)
    except Exception as error:  # a config that the shrinking does not fit
        row.refused["built"] = f"not built here: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        return row
    row.kind = type(model).__name__
    for trial in TRIALS:
        outcome = attempt(model, trial)
        if isinstance(outcome, str):
            row.refused[trial] = outcome
        elif isinstance(outcome, Exception):
            row.broken[trial] = f"{type(outcome).__name__}: {str(outcome).splitlines()[0]}"
        elif outcome is None:
            continue
        elif outcome > LIMIT[trial]:
            row.broken[trial] = f"error {outcome:.2g}, more than {LIMIT[trial]:.2g}"
        else:
            row.passed[trial] = outcome
    row.seconds = time.perf_counter() - began
    return row


def page(rows: list[Row]) -> str:
    """Return the table of all families, one row for all that have the same marks, and what is said about the others."""
    worst = max(error for row in rows for trial, error in row.passed.items() if trial != "bf16")
    able = [row for row in rows if "generates" in row.passed]
    by_marks: dict[str, list[str]] = {}
    for row in rows:
        if row.passed:
            by_marks.setdefault(row.marks, []).append(row.name)
    lines = [
        f"transformers {transformers.__version__}: {len(able)} of {len(rows)} configurations generate natively; the "
        f"largest error behind any ✓ was {worst:.1g}.",
        "",
        "| " + " | ".join(TRIALS) + " | families |",
        "|---" * (1 + len(TRIALS)) + "|",
        *(
            f"| {marks} | {'; '.join(names)} |"
            for marks, names in sorted(by_marks.items(), key=lambda each: -len(each[1]))
        ),
        "",
        "### What is refused, and what it says",
        "",
    ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for sentence in dict.fromkeys(row.refused.values()):
            without_numbers = SHARE.sub("N %", sentence.replace(row.kind or "?", "MODEL"))
            reasons.setdefault(without_numbers, []).append(row.name)
    lines += [f"- {sentence}: *{', '.join(dict.fromkeys(names))}*" for sentence, names in reasons.items()]
    return "\n".join(lines)


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or families.names():
        row = try_out(name)
        rows.append(row)
        print(f"{row}  {row.seconds:.1f} s", flush=True)
        for trial, said in row.broken.items():
            print(f"    {trial}: {said}", flush=True)
    if len(sys.argv) == 1:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + page(rows) + "\n" + END + rest.partition(END)[2])
    broken = [row.name for row in rows if row.broken]
    print(f"{len(rows)} configurations; broken: {', '.join(broken) or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
