"""Runs for a report: unique names, metrics by name, and settings that differ from the defaults."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config.base import Section
from slipstream.config.file import differing
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.errors import RunDirError
from slipstream.metrics import digest
from slipstream.reporting.advice.measurements import Case
from slipstream.reporting.advice.tree import case_of
from slipstream.run_dir.reading import Line, RunDir

Column = tuple[list[float], list[float]]
"""Updates, and the values of a metric at these updates."""
HELD_OUT_MEASURES = {"accuracy", "kl"}
"""Metrics that an evaluation may have: accuracy by the first reward, or else the KL to the teacher."""
OPTIONAL_SECTIONS = ("environment", "environments", "policy", "critic", "reference", "freshness", "reuse", "sft", "mix")
"""Config sections that have no effect unless they are written."""


class HeldOut(NamedTuple):
    """Accuracy on a held-out set, or the KL to the teacher there."""

    updates: list[float]
    values: list[float]
    errors: list[float | None]
    """Standard errors; those of accuracy in runs of older versions are upper bounds."""


@dataclass(frozen=True)
class Reading:
    name: str
    run: RunDir
    config: Config
    meta: Mapping[str, Any]
    metrics: list[Line]
    evaluations: list[Line]

    @cached_property
    def columns(self) -> dict[str, Column]:
        found: dict[str, Column] = {}
        for line in self.metrics:
            update = float(line["update"])
            for name, value in line.items():
                if isinstance(value, int | float) and isfinite(value):
                    updates, values = found.setdefault(name, ([], []))
                    updates.append(update)
                    values.append(float(value))
        return found

    def values(self, name: str) -> list[float]:
        return self.columns.get(name, ([], []))[1]

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    @cached_property
    def digest(self) -> dict[str, float]:
        return digest(self.metrics)

    @cached_property
    def case(self) -> Case:
        return case_of(self.run, self.config, self.metrics, self.evaluations)

    def at(self, update: float) -> float:
        return seconds_at(self.metrics, update)

    @cached_property
    def held_out(self) -> dict[tuple[str, str], HeldOut]:
        """Evaluations by measure (accuracy or KL) and name of the held-out set."""
        found: dict[tuple[str, str], HeldOut] = {}
        for line in self.evaluations:
            for measure in HELD_OUT_MEASURES & line.keys():
                name = line.get("set", "")
                each, numbers = found.setdefault((measure, name), HeldOut([], [], [])), self.config.eval.n
                n = numbers.get(name) if isinstance(numbers, dict) else numbers  # None: the set has left the config
                bound = 0.0 if n is None else binomial_error(line[measure], line.get("samples", 0.0) / n)
                each.updates.append(float(line["update"]))
                each.values.append(line[measure])
                each.errors.append(line.get(f"{measure}_error", bound))  # runs of older versions have no accuracy_error
        return found


def held_out_sets(runs: Sequence[Reading]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(key for run in runs for key in run.held_out))


def seconds_at(metrics: Sequence[Line], update: float) -> float:
    """Return the seconds since the start of the run at the end of an update."""
    place = bisect_left(metrics, update, key=lambda line: float(line["update"]))
    return float(metrics[min(place, len(metrics) - 1)].get("time", 0.0)) if update > 0 else 0.0


def binomial_error(mean: float, count: float) -> float | None:
    """Return the largest possible standard error of a mean of numbers in [0, 1]; None for other means or no numbers."""
    return sqrt(mean * (1 - mean) / count) if 0 <= mean <= 1 and count else None


def read(paths: Sequence[Path]) -> list[Reading]:
    runs = [RunDir(path) for path in paths]
    found = list[Reading]()
    for name, run in zip(unique_names(paths), runs, strict=True):
        metrics = run.metrics
        if not metrics:
            raise RunDirError(f"{run.path} has made no update yet: there is nothing to report")
        found.append(Reading(name, run, run.config, run.meta, metrics, run.evaluations))
    return found


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a short unique name per path: its last parts, as many as needed; equal paths are numbered."""
    whole = [path.resolve() for path in paths]
    names = [path.name or str(path) for path in whole]
    for depth in range(2, max(len(path.parts) for path in whole) + 1):
        names = [
            "/".join(path.parts[-depth:]).lstrip("/") if names.count(name) > 1 else name
            for path, name in zip(whole, names, strict=True)
        ]
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def defaults(config: Config) -> Config:
    """Return a config with the same student, teachers and kinds, and defaults for everything else."""
    teachers = {name: TeacherConfig.model_construct(model=each.model) for name, each in config.teachers.items()}
    given: dict[str, Any] = {"student": config.student, "teachers": teachers}
    for name, section in config:
        if isinstance(section, Section):
            kind = {"kind": section.kind} if hasattr(section, "kind") else {}
            given[name] = type(section).model_construct(_fields_set=None, **kind)
    return Config.model_construct(_fields_set=None, **given)


def changed_settings(config: Config) -> dict[str, tuple[Any, Any]]:
    """Return default and value of every setting that differs from its default."""
    apart = differing(defaults(config), config)
    found = {name: (usual, own) for name, usual, own in apart if usual != {}}  # nested settings have their own entries
    for name in ("loss", "schedule"):
        usual, own = Config.model_fields[name].default.kind, getattr(config, name).kind
        if own != usual:
            found[f"{name}.kind"] = (usual, own)
    return found | {name: (None, text) for name, text in in_use(config).items()}


def in_use(config: Config) -> dict[str, str]:
    return {f"[{name}]": "in use" for name in OPTIONAL_SECTIONS if getattr(config, name)}
