"""What the stages of a run cost on the devices that they run on: measured, derived or given, and a file of it that a
person may edit.

Seconds are those of one device: of a GPU, or on a CPU of one core.
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
from slipstream.config.file import read
from slipstream.errors import ConfigError, did_you_mean

Seconds = Annotated[float, Field(ge=0)]
PATIENCE = ("apart", "enough")
"""What is waited for, and is no work."""


class DecodeCost(Section):
    step: Seconds
    """Of a decoding step, whatever runs in it."""
    row: Seconds = 0.0
    """And for each of its rows."""
    context: Seconds = 0.0
    """And for each token that its rows attend to."""

    @model_validator(mode="after")
    def _takes_time(self) -> DecodeCost:
        if not self.step + self.row + self.context:
            raise ValueError("a step that takes no time never ends: write step or row")
        return self


class PassCost(Section):
    call: Seconds = 0.0
    """Of a pass, whatever goes through it."""
    token: Seconds = 0.0
    """And for each token, prompts included."""


class ScoreCost(PassCost):
    apart: Seconds = 0.0
    """Between two passes, unless `enough` tokens wait."""
    enough: int = Field(1, ge=1)
    """Tokens of responses with which a pass begins at once."""


class LearnCost(PassCost):
    step: Seconds = 0.0
    """Of an optimizer step."""
    exchange: Seconds = 0.0
    """More of it for every rank beyond the first."""


class PublishCost(Section):
    export: Seconds = 0.0
    """Of the learner, to hand its weights over."""
    load: Seconds = 0.0
    """Of a sampler, to load them while it stands still. It reads running prefixes again at the price of [read]."""


class Lengths(Section):
    prompt: int = Field(1, ge=1)
    """Tokens of a prompt."""
    mean: float | None = Field(None, ge=1)
    """Of responses: log-normal, before they are cut at sampler.max_tokens."""
    sigma: float = Field(0.0, ge=0)
    """Standard deviation of their logarithm; with 0 all are as long as the mean."""
    responses: tuple[int, ...] = ()
    """Lengths of responses to draw from, in place of mean and sigma."""

    @model_validator(mode="after")
    def _one_way(self) -> Lengths:
        if (self.mean is None) == (not self.responses):
            raise ValueError("takes one of mean (with sigma) and responses")
        if self.responses and (self.sigma or min(self.responses) < 1):
            raise ValueError("responses takes lengths of at least 1, and no sigma beside it")
        return self

    def draw(self, number: int, index: int) -> int:
        """Of one response: the same whenever it is asked for."""
        dice = random.Random(number * 1_000_003 + index)
        if self.responses:
            return dice.choice(self.responses)
        assert self.mean is not None
        return max(1, round(dice.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)))


class Costs(Section):
    cores: float | None = Field(None, gt=0)
    """How many cores all devices share; without it each works for itself."""
    others: float = Field(0.0, ge=0)
    """How many strangers compute on those cores all the time."""
    decode: DecodeCost
    read: PassCost = PassCost()
    """Prompts that come in, and prefixes after a publish."""
    score: ScoreCost = ScoreCost()
    learn: LearnCost = LearnCost()
    publish: PublishCost = PublishCost()
    coordinator: Seconds = 0.0
    """Of the process that holds it all together, for every sample."""
    lengths: Lengths

    def scaled(self, factor: float) -> Costs:
        """Engines that take so many times as long for all that they do."""
        changes = dict[str, Any]()
        for name in ("decode", "read", "score", "learn", "publish"):
            section = getattr(self, name)
            given = {key: getattr(section, key) for key in type(section).model_fields if key not in PATIENCE}
            changes[name] = section.model_copy(update={key: value * factor for key, value in given.items()})
        return self.model_copy(update=changes)

    def to_toml(self) -> str:
        """With what each number is, for whoever edits it."""
        return "\n".join(written(self))


def written(section: Section, name: str = "") -> Iterator[str]:
    """Lines of a section, its own values first."""
    below = {key: value for key in type(section).model_fields if isinstance(value := getattr(section, key), Section)}
    if name:
        yield f"\n[{name}]"
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if key not in below and value not in (None, ()):
            said = " ".join((info.description or "").split())
            yield f"# {said[0].lower()}{said[1:]}\n{key} = {plain(value)}"
    for key, value in below.items():
        yield from written(value, key)


def plain(value: float | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return "[\n" + fill(", ".join(map(str, value)), 100, initial_indent="    ", subsequent_indent="    ") + "\n]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def quantiles(lengths: Sequence[int], most: int = 200) -> tuple[int, ...]:
    """At most so many that stand for all."""
    ordered, count = sorted(lengths), min(most, len(lengths))
    return tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count))


def load(path: str | Path) -> Costs:
    return parse(read(path), where=str(path))


def parse(tree: dict[str, Any], *, where: str) -> Costs:
    try:
        return Costs.model_validate(tree)
    except ValidationError as error:
        details = sorted(error.errors(), key=lambda detail: detail["type"] == "missing")  # what is misspelt comes first
        raise ConfigError("; ".join(f"{where}: {_explain(detail)}" for detail in details[:3])) from None


def _explain(detail: Any) -> str:
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"unknown key {name!r}; {did_you_mean(str(detail['loc'][-1]), known(detail['loc'][:-1]))}"
    if detail["type"] == "missing":
        return f"{name!r} is missing: slipstream plan --measure writes a whole file of costs"
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}"
    return f"{name}: {detail['msg'].lower()}, got {detail['input']!r}"


def known(location: Sequence[int | str]) -> list[str]:
    """The keys of a section."""
    section: Any = Costs
    for part in location:
        section = section.model_fields[str(part)].annotation
    return list(section.model_fields)
