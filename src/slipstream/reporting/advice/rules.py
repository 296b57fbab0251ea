"""Rules, findings and answers. An answer states what is wrong, why, and the smallest change that fixes the problem."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.objective.method import method_of
from slipstream.reporting.advice.measurements import Case

Weight = Literal["wrong", "speed", "watch", "tune"]
"""Severity of an answer: an error to fix, lost time only, a warning, or a suggested setting."""
WEIGHTS: tuple[Weight, ...] = ("wrong", "speed", "watch", "tune")
Change = Mapping[str, Any]
"""New values of settings, by dotted name."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Evidence that a rule applies to a run."""

    metric: str
    value: float
    limit: float
    changes: Sequence[Change] = ()
    """Possible changes, best first. The first one that the config allows is proposed."""
    run: str = ""
    """Command to run if no change is possible; empty if no command helps."""
    why: str = ""
    """Cause in this run; empty for the general cause of the rule."""
    weight: Weight = "wrong"


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    reads: str
    """Metrics that the rule reads, separated by spaces."""
    when: str
    cause: str
    change: str
    """Description of the change, for docs/advice.md."""
    watch: str
    """Metrics that show if the change helped."""
    find: Callable[[Case], Found | None]
    weight: Weight = "wrong"
    hides: tuple[str, ...] = ()
    """Names of rules whose answers are consequences of this one, and are hidden by it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    name: str
    weight: Weight
    metric: str
    value: float
    limit: float
    when: str
    cause: str
    change: Change
    """Proposed change; empty if the config allows none."""
    run: str
    watch: str
    explains: tuple[str, ...] = ()
    """Names of the hidden answers that are consequences of this one."""

    @property
    def cli(self) -> str:
        """Return the change as options to append to `slipstream train CONFIG`."""
        return " ".join(f"--{key} {shlex.quote(as_text(value))}" for key, value in self.change.items())

    @property
    def toml(self) -> str:
        """Return the change as TOML to paste into a config."""
        parts = [key.rpartition(".") for key in self.change]
        by_section = groupby(zip(parts, self.change.values(), strict=True), key=lambda pair: pair[0][0])
        return "\n".join(
            line
            for section, pairs in by_section
            for line in ([f"[{section}]"] if section else []) + [written(name, value) for (*_, name), value in pairs]
        )


def answered(rule: Rule, found: Found, config: Config) -> Answer:
    change = next((change for change in found.changes if legal(config, change)), {})
    return Answer(
        name=rule.name,
        weight=found.weight if rule.weight == "wrong" else rule.weight,
        metric=found.metric,
        value=found.value,
        limit=found.limit,
        when=rule.when,
        cause=found.why or rule.cause,
        change=change,
        run=found.run if not change else "",
        watch=rule.watch,
    )


def legal(config: Config, change: Change) -> bool:
    """Return True if the config with this change is valid and differs from the config without it."""
    return changed(config, change) not in (None, config)


def changed(config: Config, change: Change) -> Config | None:
    """Return the config with this change, or None if it is invalid."""
    tree = config.model_dump(mode="json", exclude_none=True)
    try:
        found = parse(tree, [(key, as_text(value)) for key, value in change.items()], say=str)
        method_of(found)
    except ConfigError:
        return None
    return found


def as_text(value: Any) -> str:
    """Format a value for the command line, where strings need no quotes."""
    return value if isinstance(value, str) else as_toml(value)


def written(name: str, value: Any) -> str:
    return f"# without {name}" if value is None else f"{name} = {as_toml(value)}"


def as_toml(value: Any) -> str:
    match value:
        case None:
            return "none"
        case Mapping():
            return "{" + ", ".join(f"{key} = {as_toml(below)}" for key, below in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(as_toml, value)) + "]"
        case bool() | str():
            return json.dumps(value)
        case int():
            return str(value)
        case _:
            return f"{value:g}"


def without(answers: Iterable[Answer], rules: Mapping[str, Rule]) -> list[Answer]:
    """Return the answers that no earlier answer hides; `explains` lists the answers that each of them hides."""
    left, hidden = list(answers), dict[str, list[str]]()
    for answer in list(left):
        if answer in left:
            gone = [each for each in left if each.name in rules[answer.name].hides and may_hide(answer, each)]
            hidden[answer.name] = [each.name for each in gone]
            left = [each for each in left if each not in gone]
    return [replace(answer, explains=tuple(hidden[answer.name])) for answer in left]


def may_hide(cause: Answer, symptom: Answer) -> bool:
    """Return False if the symptom is "wrong" but the cause is less severe; else True."""
    return cause.weight == "wrong" or symptom.weight != "wrong"
