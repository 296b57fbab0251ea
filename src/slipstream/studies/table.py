"""Schema of the table [sweep]: settings to vary, measures and claims."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator

from slipstream.config.base import Section, as_tuple
from slipstream.config.file import STUDY, explain
from slipstream.errors import ConfigError


class Claim(Section):
    says: str
    """The claim as a sentence."""
    less: str | int | float
    """Arm, series or number that is claimed to be smaller than `than`."""
    than: str | int | float
    """Arm, series or number that `less` is compared with."""
    measure: str | None = None
    """Measure of the study that is compared; None means the first measure of the study."""
    at: int | float | str | None = None
    """Value of x at which `less` and `than` are compared; None means the mean over all x."""
    than_at: int | float | str | None = None
    """Value of x for `than`, if it differs from `at`."""
    slope: bool = False
    """Compare slopes instead of values: against log2(x), or against log2(x + 1) if x is a lag or may be 0."""

    @property
    def places(self) -> tuple[Any, Any]:
        """Values of x for `less` and for `than`."""
        return self.at, self.at if self.than_at is None else self.than_at


class SweepConfig(Section):
    title: str = ""
    """Question of the study."""
    about: str = ""
    """Paragraph for readers of the results: purpose of the study, and reasons for settings that all runs share."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """Seeds; every combination of settings runs once with each."""
    measure: tuple[str, ...] = Field(min_length=1)
    """One or several measures: a name of metrics.jsonl (mean over the last updates), eval/accuracy or
    eval/SET/accuracy (the last evaluation; eval/kl without rewards), or time (total seconds). collapse/reward/NAME is 1
    for a run whose reward collapsed, else 0; peak_to_end/reward/NAME is the best mean of ten updates minus the last
    one."""
    last: int = Field(20, ge=1)
    """Number of last updates over which the mean of a measure is taken."""
    x: str | None = None
    """Setting along the axis of figures; None if there is none."""
    grid: dict[str, Any] = Field({})
    """Settings with lists of their values; all combinations run."""
    arms: dict[str, dict[str, Any]] = Field({})
    """Alternatives to compare: settings by the name of the arm, each combined with the grid. Settings of an arm are not
    varied by the grid. An arm's own grid takes precedence over the common one."""
    conditions: dict[str, dict[str, Any]] = Field({})
    """Conditions under which all arms are compared: settings by name. They are the axis if x is None."""
    claims: tuple[Claim, ...] = ()
    """Claims that are tested on the results."""
    jobs: int | None = Field(None, ge=1)
    """Number of parallel runs; None takes as many as the machine has room for."""
    checks: bool = True
    """Test the engines before every run; write false if sampler and learner are meant to disagree."""
    keep: bool = False
    """Keep the student and the checkpoints of every run, not only its measurements."""

    @field_validator("measure", mode="before")
    @classmethod
    def _one_or_several(cls, measure: Any) -> Any:
        return as_tuple(measure)

    @field_validator("seeds", "measure")
    @classmethod
    def _each_once(cls, given: tuple[Any, ...]) -> tuple[Any, ...]:
        for each, count in Counter(given).items():
            if count > 1:
                raise ValueError(f"{each} is given twice: write it once")
        return given


class StudyFile(Section):
    sweep: SweepConfig


def read_table(table: Mapping[str, Any], where: str) -> SweepConfig:
    try:
        return StudyFile.model_validate_json(json.dumps({STUDY: table}, default=str), strict=True).sweep
    except ValidationError as error:
        texts = [f"{where}: {explain(detail, StudyFile)}" for detail in error.errors()[:3]]
        raise ConfigError("; ".join(texts)) from None


def with_value(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of the tree in which the value at `path` is replaced; a key may itself contain dots."""
    head, *rest = path
    if (whole := ".".join(path)) in tree or not rest:
        return {**tree, whole: value}
    below = tree.get(head, {})
    if not isinstance(below, dict):
        raise ConfigError(f"--{STUDY}.{'.'.join(path)}: {head} is a value, not a table")
    return {**tree, head: with_value(below, rest, value)}
