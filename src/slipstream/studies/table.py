"""The table [sweep] as it is written: what is varied, measured and claimed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from slipstream.config.base import Section, as_tuple
from slipstream.config.file import STUDY
from slipstream.errors import ConfigError, did_you_mean


class Claim(Section):
    says: str
    """What is claimed, in words."""
    less: str | int | float
    """The arm, or one line of the table, that is claimed to have less; or a number."""
    than: str | int | float
    """Of which."""
    measure: str | None = None
    """By which of the study's measures; the first one without it."""
    at: int | float | str | None = None
    """At this x; the mean over all x without it."""
    than_at: int | float | str | None = None
    """The x of `than`, where that is another one."""
    slope: bool = False
    """Compare slopes against log2(x) instead of values; against log2(x + 1) where x is a lag, or 0 is among them."""

    @property
    def places(self) -> tuple[Any, Any]:
        """The x of `less`, and that of `than`."""
        return self.at, self.at if self.than_at is None else self.than_at


class SweepConfig(Section):
    title: str = ""
    """What is asked."""
    about: str = ""
    """Why, and how what is the same in all runs was chosen: a paragraph for whoever reads what came out."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """Of every combination one run with each."""
    measure: tuple[str, ...] = Field(min_length=1)
    """What is compared, one or several: a name of metrics.jsonl (the mean over the last updates), eval/accuracy or
    eval/SET/accuracy (the last evaluation), or time (seconds in all)."""
    last: int = Field(20, ge=1)
    """Over how many updates at the end of a run a measure is the mean."""
    x: str | None = None
    """The setting along the axis, if there is one."""
    grid: dict[str, Any] = Field({})
    """Settings and lists of their values: all combinations."""
    arms: dict[str, dict[str, Any]] = Field({})
    """What is compared: settings by name, each combined with the grid. A setting of an arm is not varied in it, and a
    grid of its own comes before that of all."""
    conditions: dict[str, dict[str, Any]] = Field({})
    """Under which all arms are compared: settings by name, as of an arm. They are the axis where x is none."""
    claims: tuple[Claim, ...] = ()
    """What is said of it, held against what comes out."""
    jobs: int | None = Field(None, ge=1)
    """How many runs at a time; as many as the machine has room for without it."""
    checks: bool = True
    """Try a few prompts before every run; off where sampler and learner are meant to disagree."""
    keep: bool = False
    """Keep the student and the checkpoints of every run, and not only what was measured."""

    @field_validator("measure", mode="before")
    @classmethod
    def _one_or_several(cls, measure: Any) -> Any:
        return as_tuple(measure)

    @field_validator("seeds", "measure")
    @classmethod
    def _each_once(cls, given: tuple[Any, ...]) -> tuple[Any, ...]:
        for each, count in Counter(given).items():
            if count > 1:
                raise ValueError(f"{each} stands there twice: write each once")
        return given


def read_table(table: Mapping[str, Any], where: str) -> SweepConfig:
    try:
        return SweepConfig.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("; ".join(f"{where}: {explained(detail)}" for detail in error.errors()[:3])) from None


def explained(detail: ErrorDetails) -> str:
    name = ".".join(map(str, (STUDY, *detail["loc"])))
    section = Claim if detail["loc"][0] == "claims" else SweepConfig
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {name!r}; {did_you_mean(str(detail['loc'][-1]), section.settings())}"
        case "missing":
            return f"{name!r} is missing: {section.settings()[str(detail['loc'][-1])].description}"
        case "value_error":
            return f"{name}: {detail['ctx']['error']}"
        case _:
            return f"{name}: {detail['msg'].lower()}, got {detail['input']!r}"


def placed(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with one value replaced; keys that hold dots stay found."""
    head, *rest = path
    if (whole := ".".join(path)) in tree or not rest:
        return {**tree, whole: value}
    below = tree.get(head, {})
    if not isinstance(below, dict):
        raise ConfigError(f"--{STUDY}.{'.'.join(path)}: {head} is a value, not a table")
    return {**tree, head: placed(below, rest, value)}
