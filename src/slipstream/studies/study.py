"""A study file: a config, and the table [sweep] of settings to vary, measures and claims.

An arm is an alternative to compare. A point is an arm with one combination of grid values.
A cell is a point with a seed: one run. This module reads only the study file and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slipstream import metric_names as vocabulary
from slipstream.config.file import STUDY, flat, overridden, parse, read, value_of
from slipstream.config.renamed_keys import DROPPED, new_setting, with_new_keys
from slipstream.config.schedule import Replay
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, did_you_mean
from slipstream.metrics import WINDOW, collapse, peak_to_end
from slipstream.studies.table import Claim, read_table, with_value

GRID = "grid"
CONDITION = "condition"
"""Key of the condition's name in `Point.settings`, and name of the x axis, in a study with conditions."""
DEFAULT_ARM = "all"
"""Name of the arm if a study names none."""
RESERVED_KEYS = {"seed": "sweep.seeds are the seeds", "output": "output is the directory of the whole study"}
"""Settings that no arm and no grid may set, with the reason."""
OF_RUNS: dict[str, Callable[[Sequence[float]], float | None]] = {
    "collapse": lambda rewards: float(collapse(rewards) is not None) if len(rewards) >= 2 * WINDOW else None,
    "peak_to_end": peak_to_end,
}
"""Measures of all updates of a reward: has it collapsed (0 or 1), and how far is the end below the best."""
MAX_NAME = 255
"""Largest length of a directory's name in bytes that file systems allow."""
OF_SAMPLES = ("reward/", "teacher/kl")
"""Prefixes of metrics that measure the student that sampled, not the latest student."""


@dataclass(frozen=True)
class Point:
    arm: str
    settings: Mapping[str, Any]
    """Values of the grid's settings, and the name of the condition, if any."""
    x: Any
    """Value of the setting along the axis, lists as text; None if this point has no such setting."""
    series: str
    """Name of the point's line in a figure: the arm and its settings, without x."""
    config: Config
    """Config of the first seed, without an output directory."""

    @property
    def name(self) -> str:
        return point_name(self.arm, self.settings)


@dataclass(frozen=True)
class Cell:
    point: Point
    seed: int

    @property
    def name(self) -> str:
        return f"{self.point.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Directory of the cell, relative to `cells`."""
        return self.folder_by(lambda key, value: (key, value))

    def folder_by(self, named: Callable[[str, Any], tuple[str, Any]]) -> Path:
        """Return the directory of the cell if `named` gives the key and the value of each of its settings."""
        settings = [named(key, value) for key, value in self.point.settings.items()]
        where = ",".join(f"{key}={value_text(value)}" for key, value in settings)
        parts = [self.point.arm, *([where] if where else []), f"seed-{self.seed}"]
        return Path(*map(file_name, parts))

    @property
    def config(self) -> Config:
        return self.point.config.with_values(seed=self.seed)


class Study:
    """A study whose configs, measures and claims are all valid."""

    def __init__(
        self, tree: Mapping[str, Any], overrides: Sequence[tuple[str, str]] = (), *, where: str = "study"
    ) -> None:
        self.where, self.notes = where, list[str]()
        if not isinstance(tree.get(STUDY), dict):
            raise ConfigError(f"{where} is no study: it has no table [{STUDY}]")
        table, base_overrides = tree[STUDY], list[tuple[str, str]]()
        for key, text in overrides:
            head, *path = key.split(".")
            if head == STUDY and path:
                table = with_value(table, path, value_of(text))
            else:
                base_overrides.append((key, text))
        self.sweep = read_table(table, where)
        base = {key: value for key, value in tree.items() if key != STUDY}
        base = overridden(base, base_overrides, say=self.notes.append)
        if "seed" in base:
            raise ConfigError(f"{where}: seed does nothing in a study: sweep.seeds are the seeds")
        self.output: str | None = base.get("output")
        self.base = {key: value for key, value in base.items() if key != "output"}
        try:
            self.arms = {name: flat_arm(name, arm) for name, arm in (self.sweep.arms or {DEFAULT_ARM: {}}).items()}
            self.conditions = {name: flat_condition(name, each) for name, each in self.sweep.conditions.items()}
            self.x = self.sweep.x or (CONDITION if self.conditions else None)
            self.points = list(self._points())
            self._check([key for key, _ in base_overrides])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Study:
        return cls(read(path), overrides, where=str(path))

    @property
    def tree(self) -> dict[str, Any]:
        """Content of the study file with overrides applied and without None values."""
        table = self.sweep.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        return {**without_none(self.base), STUDY: table}

    @cached_property
    def cells(self) -> list[Cell]:
        """Cells in the order in which they run: all points of the first seed, then those of the next one."""
        return [Cell(point, seed) for seed in self.sweep.seeds for point in self.points]

    @cached_property
    def varied(self) -> list[str]:
        """Names of all settings that an arm, a condition or the grid sets."""
        keys = dict.fromkeys(key for p in self.points for key in (*self.arms[p.arm][0], *p.settings))
        keys |= dict.fromkeys(key for each in self.conditions.values() for key in each)
        return [key for key in keys if key != CONDITION]

    def _points(self) -> Iterator[Point]:
        grid = flat(self.sweep.grid) if self.sweep.grid else {}
        for name, (fixed, own) in self.arms.items():
            mine = {key: values for key, values in {**grid, **own}.items() if key not in fixed or key in own}
            for key, values in mine.items():
                check_values(key, values, f"{name}: " if key in own else "")
            for condition, settings in self.conditions.items():
                if twice := settings.keys() & {**fixed, **mine}.keys():
                    raise ConfigError(f"{name} and {condition} both set {min(twice)}: drop one of them")
            axes = {CONDITION: list(self.conditions)} | mine if self.conditions else mine
            axes = {key: values for key, values in axes.items() if values}
            for combination in product(*axes.values()):
                yield self._point(name, fixed, dict(zip(axes, combination, strict=True)))

    def _point(self, arm: str, fixed: dict[str, Any], settings: dict[str, Any]) -> Point:
        name = point_name(arm, settings)
        series = point_name(arm, {key: each for key, each in settings.items() if key != self.x})
        changes = fixed | self.conditions.get(settings.get(CONDITION, ""), {}) | settings
        overrides = [(key, json.dumps(value, ensure_ascii=False)) for key, value in changes.items() if key != CONDITION]
        tree = {**self.base, "seed": self.sweep.seeds[0]}
        config = parse(tree, overrides, where=name, say=lambda note: self.notes.append(f"{name}: {note}"))
        x = (flat(config.model_dump(mode="json")) | changes).get(self.x or "")
        return Point(arm, settings, value_text(x) if isinstance(x, list | dict) else x, series, config)

    def _check(self, overridden: Sequence[str]) -> None:
        sweep = self.sweep
        set_by_all = set.intersection(*({*point.settings, *self.arms[point.arm][0]} for point in self.points))
        for key in overridden:
            if key in set_by_all:
                raise ConfigError(
                    f"--{key} does nothing, as the study sets it everywhere: write --sweep.… to change that"
                )
        seen = dict[str, Point]()
        for point in self.points:
            other = seen.setdefault(point.config.model_dump_json(), point)
            if other is not point:
                raise ConfigError(f"{point.name} and {other.name} are the same run: drop one of them")
        if sweep.x is not None and all(point.x is None for point in self.points):
            raise ConfigError(
                f"sweep.x = {sweep.x!r} is no setting of any run; "
                + did_you_mean(sweep.x, [key for point in self.points for key in point.settings])
            )
        for point in self.points:
            for measure in sweep.measure:
                check_measure(measure, point)
            if (updates := point.config.updates) < sweep.last and "last" in sweep.model_fields_set:
                raise ConfigError(f"sweep.last = {sweep.last} is more than the {updates} updates of {point.name}")
        oldest = max((p.config.schedule.k for p in self.points if isinstance(p.config.schedule, Replay)), default=0)
        for measure in sweep.measure:
            if oldest > 1 and measure.startswith(OF_SAMPLES):
                self.notes.append(
                    f"sweep.measure = {measure!r} measures the student that sampled, up to {oldest} updates earlier; "
                    "eval/accuracy measures the last one (data.eval, eval.every)"
                )
        for claim in sweep.claims:
            self._check_claim(claim)

    def _check_claim(self, claim: Claim) -> None:
        where = f"the claim {claim.says!r}"
        if claim.measure is not None and claim.measure not in self.sweep.measure:
            raise ConfigError(
                f"{where}: measure = {claim.measure!r}; {did_you_mean(claim.measure, self.sweep.measure)}"
            )
        if claim.than_at is not None and claim.at is None:
            raise ConfigError(f"{where}: than_at is the x of than, and at that of less: give both")
        if claim.than_at is not None and not isinstance(claim.than, str):
            raise ConfigError(f"{where}: than is a number, which is the same everywhere: drop than_at")
        given = zip((claim.less, claim.than), claim.places, strict=True)
        sides = [(side, at) for side, at in given if isinstance(side, str)]
        if not sides:
            raise ConfigError(f"{where} compares two numbers: name an arm")
        if (claim.less, claim.places[0]) == (claim.than, claim.places[1]):
            raise ConfigError(f"{where} compares an arm with itself: name another one, or give at and than_at")
        for side, at in sides:
            found = self.side(side)
            if not found:
                known = dict.fromkeys([*self.arms, *(point.series for point in self.points)])
                raise ConfigError(f"{where}: no arm {side!r}; {did_you_mean(side, known)}")
            if at is not None and at not in [point.x for point in found]:
                known_x = ", ".join(value_text(point.x) for point in found)
                raise ConfigError(f"{where}: {side} has no x = {value_text(at)}; known: {known_x}")
        common = set.intersection(*({point.x for point in self.side(side)} for side, _ in sides))
        if not common and claim.at is None:
            names = " and ".join(side for side, _ in sides)
            raise ConfigError(f"{where}: {names} have no x in common: name other arms")
        if claim.slope and sum(map(is_number, common)) < 2:
            raise ConfigError(f"{where}: slope needs numbers along x, two at least: set sweep.x, or drop slope")
        if claim.slope and (lowest := min(filter(is_number, common))) <= -1:
            raise ConfigError(f"{where}: a slope is against log2(x + 1), and x has {value_text(lowest)}: drop slope")
        if claim.slope and claim.at is not None:
            raise ConfigError(f"{where}: a slope is over all x: drop at, or slope")

    def side(self, name: str) -> list[Point]:
        """Return the points of the arm with this name, or else of the series; empty if neither exists."""
        return [p for p in self.points if p.arm == name] or [p for p in self.points if p.series == name]


def with_new_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a saved study with the new names of settings that were renamed since."""
    base = with_new_keys({key: value for key, value in tree.items() if key != STUDY})
    table = tree.get(STUDY)
    if not isinstance(table, dict):
        return dict(tree)
    table = dict(table)
    if isinstance(x := table.get("x"), str):
        table["x"] = new_setting(x)[0]
    if isinstance(grid := table.get(GRID), dict):
        table[GRID] = _new_grid(grid)
    for group in "arms", "conditions":
        if isinstance(named := table.get(group), dict):
            table[group] = {name: _new_arm(arm) for name, arm in named.items()}
    return {**base, STUDY: table}


def _new_arm(arm: Any) -> Any:
    if not isinstance(arm, dict):
        return arm
    fixed = {key: value for key, value in arm.items() if key != GRID}
    own = {GRID: _new_grid(arm[GRID])} if isinstance(arm.get(GRID), dict) else {}
    return dict(new_setting(key, value) for key, value in flat(fixed).items() if key and key not in DROPPED) | own


def _new_grid(grid: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grid with new keys, and with new values in its lists."""
    found = dict[str, Any]()
    for key, values in flat(dict(grid)).items() if grid else ():
        several = values if isinstance(values, list) else []
        found[new_setting(key)[0]] = [new_setting(key, each)[1] for each in several] or values
    return found


def without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if value is not None}
    return {key: without_none(value) if isinstance(value, dict) else value for key, value in kept.items()}


def flat_arm(name: str, arm: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fixed settings of an arm and the arm's own grid, as two dicts with dotted keys."""
    if not name or name.startswith(".") or name != name.strip():
        raise ConfigError(f"an arm needs a name, not {name!r}")
    fixed, own = {key: value for key, value in arm.items() if key != GRID}, arm.get(GRID, {})
    if not isinstance(own, dict):
        raise ConfigError(f"sweep.arms.{name}.grid is a table of settings and lists of their values")
    found = flat(fixed) if fixed else {}
    for key in found:
        check_key(key, f"{name}: ")
    return found, flat(own) if own else {}


def flat_condition(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    fixed, grid = flat_arm(name, settings)
    if grid:
        raise ConfigError(f"the condition {name} has a grid: write a condition for each of its values")
    return fixed


def check_key(key: str, where: str) -> None:
    if key in RESERVED_KEYS:
        raise ConfigError(f"{where}{key} cannot be varied: {RESERVED_KEYS[key]}")


def check_values(key: str, values: Any, where: str) -> None:
    check_key(key, where)
    if not isinstance(values, list):
        raise ConfigError(f"{where}{key} in a grid is a list of values, got {values!r}")
    if len({value_text(value) for value in values}) < len(values):
        raise ConfigError(f"{where}{key} has a value twice in {value_text(values)}: write each once")


def file_name(text: str) -> str:
    """Return a name for a directory, which a file system accepts: a long one ends with a digest of the whole text."""
    name, end = quote(text, safe="=,+ "), f"-{sha256(text.encode()).hexdigest()[:8]}"
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - len(end)] + end


def check_measure(measure: str, point: Point) -> None:
    """Raise ConfigError if the runs of this point do not write the measure."""
    of_run, _, name = measure.partition("/")
    measure = name if of_run in OF_RUNS and name.startswith("reward/") else measure
    config, head, tail = point.config, *measure.partition("/")[::2]
    if head == "eval":
        kind = "accuracy" if config.task.reward else "kl"
        known = [f"eval/{of}/{kind}" if of else f"eval/{kind}" for of in config.data.held_out] or [f"eval/{kind}"]
        if measure not in known:
            raise ConfigError(f"sweep.measure: {measure!r}; {did_you_mean(measure, known)}")
        if not config.eval.every:
            raise ConfigError(f"sweep.measure = {measure!r}: {point.name} evaluates nothing: set eval.every")
    elif head == "reward" and tail.removeprefix("greedy_").partition("/")[0] not in config.task.names:
        rewards = [f"reward/{name}" for name in config.task.names]
        hint = did_you_mean(measure, rewards) if rewards else 'set task.reward, for example "exact"'
        raise ConfigError(f"sweep.measure = {measure!r}: {point.name} has no such reward; {hint}")
    elif not vocabulary.find(measure):
        hint = did_you_mean(measure, vocabulary.names())
        hint = hint if hint.startswith("did") else "docs/metrics.md has all names"
        raise ConfigError(f"sweep.measure: {measure!r} is no metric; {hint}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def point_name(arm: str, settings: Mapping[str, Any]) -> str:
    return ", ".join([arm, *(f"{key} = {value_text(value)}" for key, value in settings.items())])


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
