"""Results of a study: rows, tables, slopes and verdicts, read from its directory; the study may still be running.

study.toml     the study, with overrides applied         results.csv, results.parquet   one row per finished cell
cells/ARM/…    one run directory per cell; a finished cell has a cell.json with its config and its costs
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config.file import flat, read
from slipstream.config.renamed_keys import former_setting
from slipstream.errors import RunDirError, first_line
from slipstream.metric_names import describe
from slipstream.run_dir.reading import Line, RunDir
from slipstream.statistics import (
    BySeed,
    Estimate,
    Verdict,
    difference,
    estimate,
    holm,
    p_value,
    slope,
    verdict,
)
from slipstream.studies.study import (
    CONDITION,
    OF_RUNS,
    Cell,
    Point,
    Study,
    is_number,
    with_new_settings,
)
from slipstream.studies.table import Claim

STUDY_FILE, CELLS, DONE = "study.toml", "cells", "cell.json"
COSTS = ("updates", "tokens", "seconds", "cpu_seconds", "finished", "version")
"""Keys of cell.json that result rows repeat."""
NEEDED_COSTS = COSTS[:4]
"""Those without which a cell.json is damaged."""


@dataclass(frozen=True)
class SweepCell(Cell):
    path: Path

    @property
    def finished(self) -> bool:
        return (self.path / DONE).exists()

    @property
    def run(self) -> RunDir:
        return RunDir(self.path)

    @cached_property
    def done(self) -> dict[str, Any]:
        """Content of cell.json: the values of `COSTS`, and the config."""
        path = self.path / DONE
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return found | {name: found[name] for name in NEEDED_COSTS} | {"config": dict(found["config"])}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunDirError(f"{path} is damaged: {first_line(error)}; remove {self.path}") from None


def saved_study(path: Path) -> Study:
    """Return the study of a study.toml, which may have old names of settings that were renamed since."""
    return Study(with_new_settings(read(path)), where=str(path))


def cell_path(cells: Path, cell: Cell) -> Path:
    """Return the directory of a cell; an older version may have named it by old names of settings."""
    former = cells / cell.folder_by(former_setting)
    return former if former.exists() else cells / cell.folder


@dataclass(frozen=True)
class Aggregate(Estimate):
    """Mean and standard error of a measure at one point of the study, over its finished seeds."""

    series: str
    x: Any


@dataclass(frozen=True)
class PairedDifference:
    """Measure at a point minus the measure of the first arm with the same settings, paired by seed."""

    series: str
    base: str
    x: Any
    difference: Estimate


@dataclass(frozen=True)
class ClaimResult:
    """A tested claim, the difference `less` − `than`, and the verdict."""

    claim: Claim
    measure: str
    difference: Estimate
    verdict: Verdict
    p: float | None
    """P-value of the difference, corrected by Holm's method for all claims of the study; None for a single seed."""

    @property
    def p_text(self) -> str:
        return "–" if self.p is None else f"{self.p:.2g}"


class Sweep:
    def __init__(self, path: str | PathLike[str], study: Study | None = None) -> None:
        """Use `study`, whose cells are or will be in the directory `path`; if None, load study.toml from it."""
        self.path = Path(path)
        if study is None and not (self.path / STUDY_FILE).exists():
            raise RunDirError(f"{path} holds no study: there is no {STUDY_FILE} in it")
        self.study = study or saved_study(self.path / STUDY_FILE)
        self.cells = [SweepCell(c.point, c.seed, cell_path(self.path / CELLS, c)) for c in self.study.cells]
        self._values = dict[tuple[Path, str], float | None]()
        """Cache of values by cell path and measure, only for finished cells, whose values do not change."""

    @property
    def measures(self) -> tuple[str, ...]:
        return self.study.sweep.measure

    @property
    def finished(self) -> list[SweepCell]:
        return [cell for cell in self.cells if cell.finished]

    def value(self, cell: SweepCell, measure: str) -> float | None:
        """Return the value of a measure in a finished cell; None if the run never wrote it."""
        key = (cell.path, measure)
        if key not in self._values:
            run = cell.run
            lines = (run.metrics, run.evaluations)
            if (last := lines[0][-1]["update"] if lines[0] else 0) < cell.done["updates"]:
                found = f"it ends at update {last}, and the cell at {cell.done['updates']}"
                raise RunDirError(f"{cell.path}/metrics.jsonl is damaged: {found}; remove {cell.path}")
            for each in {measure, *self.measures}:
                self._values[cell.path, each] = value_of_measure(each, *lines, last=self.study.sweep.last)
        return self._values[key]

    def by_seed(self, points: Sequence[Point], measure: str) -> list[dict[int, float]]:
        """Return one dict per point: the value of the measure by finished seed."""
        found: dict[int, dict[int, float]] = {id(point): {} for point in points}
        for cell in self.finished:
            if id(cell.point) in found and (value := self.value(cell, measure)) is not None:
                found[id(cell.point)][cell.seed] = value
        return list(found.values())

    def table(self, measure: str | None = None) -> list[Aggregate]:
        """Return the aggregated measure of every point; None means the first measure of the study."""
        measure = measure or self.measures[0]
        points = self.study.points
        return [
            Aggregate(**vars(estimate(list(values.values()))), series=point.series, x=point.x)
            for point, values in zip(points, self.by_seed(points, measure), strict=True)
        ]

    def differences(self, measure: str | None = None) -> list[PairedDifference]:
        """Return, for each point of other arms, the difference to the first arm's point with the same settings."""
        measure = measure or self.measures[0]
        points, found = self.study.points, list[PairedDifference]()
        values = dict(zip(map(id, points), self.by_seed(points, measure), strict=True))
        for point in points:
            if (base := baseline_point(point, points)) is not None:
                d = difference(values[id(point)], values[id(base)])
                found.append(PairedDifference(point.series, base.series, point.x, d))
        return found

    def slopes(self, measure: str | None = None) -> dict[str, Estimate]:
        """Return the slope of every series that has at least two numbers along x; {} if `doublings` has no value."""
        measure = measure or self.measures[0]
        if any(point.x <= -self.shift for point in self.study.points if is_number(point.x)):
            return {}
        return {
            name: estimate(list(self._slope_by_seed(points, measure).values()))
            for name, points in self.series().items()
            if len({p.x for p in points if is_number(p.x)}) > 1
        }

    @property
    def shift(self) -> int:
        """Number added to x before its logarithm is taken: 1 for lags and other settings that may be 0, else 0."""
        smallest = min((point.x for point in self.study.points if is_number(point.x)), default=1)
        return int(str(self.study.x).startswith("schedule.") or smallest <= 0)

    @property
    def doublings(self) -> str:
        return f"log2({self.study.x} + 1)" if self.shift else f"log2({self.study.x})"

    def series(self) -> dict[str, list[Point]]:
        found = dict[str, list[Point]]()
        for point in self.study.points:
            found.setdefault(point.series, []).append(point)
        return found

    def claims(self) -> list[ClaimResult]:
        claims = self.study.sweep.claims
        measures = [claim.measure or self.measures[0] for claim in claims]
        found = [difference(*self._sides(*each)) for each in zip(claims, measures, strict=True)]
        corrected = holm([p_value(each) for each in found])
        columns = zip(claims, measures, found, map(verdict, found, corrected), corrected, strict=True)
        return [ClaimResult(*each) for each in columns]

    def _sides(self, claim: Claim, measure: str) -> tuple[BySeed, BySeed]:
        """Return the values of `less` and of `than` by seed, at all common x or at the x that the claim names."""
        sides = [self.study.side(side) if isinstance(side, str) else None for side in (claim.less, claim.than)]
        common = set.intersection(*({p.x for p in side} for side in sides if side is not None))

        def by_seed(side: list[Point] | None, number: float | str, at: Any) -> BySeed:
            if side is None:
                assert not isinstance(number, str)
                return dict.fromkeys(self.study.sweep.seeds, number)
            points = [point for point in side if point.x in (common if at is None else {at})]
            if claim.slope:
                return self._slope_by_seed(points, measure)
            return combine_by_seed(self.by_seed(points, measure), fmean)

        less, than = map(by_seed, sides, (claim.less, claim.than), claim.places)
        return less, than

    def _slope_by_seed(self, points: Sequence[Point], measure: str) -> BySeed:
        """Return the slope of the measure against x by seed, for the seeds that are finished at all points."""
        points = [point for point in points if is_number(point.x)]
        xs = [point.x for point in points]
        return combine_by_seed(self.by_seed(points, measure), lambda ys: slope(xs, ys, self.shift))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per finished cell: arm, settings, seed, measures, costs and path."""
        found = []
        for cell in self.finished:
            point, config, done = cell.point, flat(cell.config.model_dump(mode="json")), cell.done
            written = {**self.study.arms[point.arm][0], **point.settings}  # an empty table is in no flat config
            found.append(
                {"arm": point.arm}
                | ({CONDITION: point.settings[CONDITION]} if self.study.conditions else {})
                | {key: config.get(key, written.get(key)) for key in self.study.varied}
                | {"seed": cell.seed}
                | {name: done.get(name) for name in COSTS}
                | {f"measure/{each}" if each in COSTS else each: self.value(cell, each) for each in self.measures}
                | {"path": cell.path.relative_to(self.path).as_posix()}
            )
        return found


def value_of_measure(measure: str, updates: Sequence[Line], evaluations: Sequence[Line], *, last: int) -> float | None:
    """Return the last evaluation, last value of a total, or mean of last updates; None if never written.

    collapse/… and peak_to_end/… are computed from all updates, and are None for runs that are too short.
    """
    if measure.startswith("eval/"):
        of_set = evaluations_of(measure, evaluations)
        return of_set[-1][measure.rpartition("/")[2]] if of_set else None
    of_run, _, name = measure.partition("/")
    if of_run in OF_RUNS and (rewards := [line[name] for line in updates if name in line]):
        return OF_RUNS[of_run](rewards)
    row = describe(measure)
    window = updates[-1:] if row is not None and row.is_total else updates[-last:]
    found = [line[measure] for line in window if measure in line]
    return fmean(found) if found else None


def evaluations_of(measure: str, evaluations: Sequence[Line]) -> list[Line]:
    """Return the evaluations of a held-out set that have a measure like eval/accuracy or eval/SET/kl."""
    held_out_set, _, name = measure.removeprefix("eval/").rpartition("/")
    return [line for line in evaluations if line.get("set", "") == held_out_set and name in line]


def combine_by_seed(points: Sequence[BySeed], combine: Callable[[list[float]], float]) -> BySeed:
    """Combine the values of points with a function, for every seed that all points have."""
    seeds = set.intersection(*(set(values) for values in points)) if points else set()
    return {seed: combine([values[seed] for values in points]) for seed in sorted(seeds)}


def baseline_point(point: Point, points: Sequence[Point]) -> Point | None:
    """Return the first arm's point whose settings agree with those of `point`; None unless there is exactly one."""
    first = points[0].arm
    found = [
        other
        for other in points
        if other.arm == first
        and all(other.settings[key] == point.settings[key] for key in other.settings.keys() & point.settings.keys())
    ]
    return found[0] if len(found) == 1 and point.arm != first else None
