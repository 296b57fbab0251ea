"""Costs of the stages of a run: measured, derived from a run, or read from a file that users may edit.

Seconds are those of one device: one GPU, or one core of a CPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from slipstream.config.base import Section
from slipstream.config.file import explain, read
from slipstream.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, le=1e6)]
BUILTIN = Path(__file__).parents[1] / "models" / "builtin" / "costs.toml"
"""Costs of the built-in models: seconds of one CPU core."""
RESTART_KEYS = ("apart", "enough")
"""Fields that describe waiting and not device work; `Costs.scaled` leaves these fields unchanged."""


class DecodeCost(Section):
    step: Seconds
    """Seconds of a decoding step, independent of its rows."""
    row: Seconds = 0.0
    """Additional seconds of a decoding step for each row."""
    context: Seconds = 0.0
    """Additional seconds of a decoding step for each token that a row attends to."""

    @model_validator(mode="after")
    def _takes_time(self) -> DecodeCost:
        if not self.step + self.row + self.context:
            raise ValueError("a decoding step must take time: write step or row")
        return self


class PassCost(Section):
    call: Seconds = 0.0
    """Seconds of a pass, independent of its tokens."""
    token: Seconds = 0.0
    """Additional seconds for each token, prompts included."""

    def seconds(self, tokens: float) -> float:
        return self.call + self.token * tokens if tokens else 0.0


class ScoreCost(PassCost):
    apart: Seconds = 0.0
    """Minimum seconds between two passes, unless `enough` tokens wait."""
    enough: int = Field(1, ge=1)
    """Number of waiting response tokens from which a pass begins at once, even before `apart` seconds."""


class LearnCost(PassCost):
    step: Seconds = 0.0
    """Seconds of an optimizer step."""
    exchange: Seconds = 0.0
    """Additional seconds of an optimizer step for every rank beyond the first."""


class PublishCost(Section):
    export: Seconds = 0.0
    """Seconds of the learner to export its weights."""
    load: Seconds = 0.0
    """Seconds of a sampler to load weights while it is paused; reading prefixes again costs extra, by [read]."""


class Lengths(Section):
    prompt: int = Field(1, ge=1, le=10_000_000)
    """Tokens of a prompt."""
    mean: float | None = Field(None, ge=1, le=1e7)
    """Mean tokens of a response; lengths are log-normal, then truncated at sampler.max_tokens."""
    sigma: float = Field(0.0, ge=0, le=10)
    """Standard deviation of the logarithm of lengths; with 0 all lengths are the mean."""
    responses: tuple[int, ...] = ()
    """Lengths of responses to sample from, instead of mean and sigma."""

    @model_validator(mode="after")
    def _one_way(self) -> Lengths:
        if (self.mean is None) == (not self.responses):
            raise ValueError("write either mean (with sigma) or responses")
        if self.responses and (self.sigma or min(self.responses) < 1):
            raise ValueError("responses takes lengths of at least 1, and sigma is not allowed beside it")
        return self

    def draw(self, number: int, index: int) -> int:
        """Return the length of a response: always the same for the same prompt number and index."""
        dice = random.Random(number * 1_000_003 + index)
        if self.responses:
            return dice.choice(self.responses)
        assert self.mean is not None
        return max(1, round(dice.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)))


class Costs(Section):
    cores: float | None = Field(None, ge=0.01)
    """Number of cores that all devices share; without it each device has its own."""
    others: float = Field(0.0, ge=0)
    """Number of unrelated threads that use those cores all the time."""
    decode: DecodeCost
    read: PassCost = PassCost()
    """Cost of reading new prompts, and of reading prefixes again after a publish."""
    score: ScoreCost = ScoreCost()
    learn: LearnCost = LearnCost()
    publish: PublishCost = PublishCost()
    coordinator: Seconds = 0.0
    """Seconds of the coordinating process for every sample."""
    lengths: Lengths

    def scaled(self, factor: float) -> Costs:
        """Return the costs of engines whose work takes `factor` times as long; waiting times stay the same."""
        changes = dict[str, Any]()
        for name in ("decode", "read", "score", "learn", "publish"):
            section = getattr(self, name)
            given = {key: getattr(section, key) for key in type(section).model_fields if key not in RESTART_KEYS}
            changes[name] = section.model_copy(update={key: value * factor for key, value in given.items()})
        return self.model_copy(update=changes)

    def to_toml(self) -> str:
        return "\n".join(written(self))


def written(section: Section, name: str = "") -> Iterator[str]:
    """Yield the TOML lines of a section: first its own values, then the sections in it."""
    below = {key: value for key in type(section).model_fields if isinstance(value := getattr(section, key), Section)}
    if name:
        yield f"\n[{name}]"
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if key not in below and value not in (None, ()):
            comment = " ".join((info.description or "").split())
            yield f"# {comment[0].lower()}{comment[1:]}\n{key} = {plain(value)}"
    for key, value in below.items():
        yield from written(value, key)


def plain(value: float | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return "[\n" + fill(", ".join(map(str, value)), 100, initial_indent="    ", subsequent_indent="    ") + "\n]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def quantiles(lengths: Sequence[int], most: int = 200) -> tuple[int, ...]:
    """Return at most `most` quantiles that represent all lengths."""
    ordered, count = sorted(lengths), min(most, len(lengths))
    return tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count))


def load(path: str | Path) -> Costs:
    return parse(read(BUILTIN if path == "builtin" else path), where=str(path))


def parse(tree: dict[str, Any], *, where: str) -> Costs:
    try:
        return Costs.model_validate(tree)
    except ValidationError as error:
        details = sorted(error.errors(), key=lambda detail: detail["type"] == "missing")  # misspelt keys first
        raise ConfigError("; ".join(f"{where}: {_explain(detail)}" for detail in details[:3])) from None


def _explain(detail: Any) -> str:
    if detail["type"] == "missing":
        return f"{'.'.join(map(str, detail['loc']))!r} is missing: slipstream plan --measure -o FILE writes all costs"
    return explain(detail, Costs)
