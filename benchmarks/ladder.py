"""Collapse of runs in a study of freshness: how far the end of each run is below its best.

    python benchmarks/ladder.py runs/fopd > docs/findings/ladder.md
    python benchmarks/ladder.py runs/fopd_tools > docs/findings/ladder_tools.md

Reads a study (configs/lab/fopd.toml, fopd_tools.toml). The mean reward of ten updates is compared with the best such
mean of the run. A run has collapsed by the definition of f-OPD.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.metrics import window_means
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import estimate
from slipstream.studies.results import Sweep

END, LOW, LASTS = 0.6, 0.9, 0.1
"""Collapse: the end is below the first share of the best, and all of the last part of the updates below the second."""
TEXT = """# Collapse of runs: {title}

f-OPD reports that three of five runs collapse at lag 8 (for a coding agent), and that none does with freshness. The
table reads the runs of [this study]({name}.md). `best less end` is the best mean reward of ten updates minus
the last one. A run has collapsed if it ends more than 40 % below its best, and was more than 10 % below it for the
last tenth of its updates. Rewards belong to students that are up to eight updates older.

```console
python benchmarks/ladder.py {path} > docs/findings/{page}.md
```

| | best | best less end | collapsed |
| --- | --- | --- | --- |"""


def fall(rewards: Sequence[float]) -> tuple[float, float, bool]:
    """The best, by how much the end is below it, and whether that is a collapse."""
    means = window_means(rewards)
    best, end = max(means), means[-1]
    late = means[-max(1, round(LASTS * len(rewards))) :]
    return best, best - end, end < END * best and max(late) < LOW * best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    args = parser.parse_args()
    sweep, name = Sweep(args.sweep), args.sweep.resolve().name
    page = "ladder" + name.removeprefix("fopd") if name.startswith("fopd") else "ladder"
    print(TEXT.format(path=args.sweep, title=sweep.study.sweep.title, name=name, page=page))
    found, collapsed = dict[str, list[tuple[float, float, bool]]](), dict[str, int]()
    for cell in sweep.finished:
        row = f"{cell.point.x}: {cell.point.arm}" if sweep.study.sweep.conditions else cell.point.arm
        found.setdefault(row, []).append(fall([line["reward/exact"] for line in cell.run.metrics]))
    for arm, runs in found.items():
        best, fell = (estimate([each[i] for each in runs]) for i in (0, 1))
        cells = [mean_text(each.mean, each.se, share=True) for each in (best, fell)]
        collapsed[arm] = sum(each[2] for each in runs)
        print(f"| {arm} | {' | '.join(cells)} | {collapsed[arm]} of {len(runs)} |")
    fell_in = [f"{count} of {len(found[arm])} ({arm})" for arm, count in collapsed.items() if count]
    print(f"\nIn short: {'; '.join(fell_in) or 'none'} have collapsed{', and no others' if fell_in else ''}.")


if __name__ == "__main__":
    main()
