"""An answer: what is wrong, by which number, why, and the smallest change that the run's own config allows."""

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
from slipstream.reporting.advice.readings import Case

Weight = Literal["wrong", "speed", "watch", "tune"]
"""Something to mend; what only takes time; what would be wrong, if it grew; what this run suggests."""
WEIGHTS: tuple[Weight, ...] = ("wrong", "speed", "watch", "tune")
Change = Mapping[str, Any]
"""Settings by their dotted names."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """That a rule applies."""

    metric: str
    value: float
    limit: float
    changes: Sequence[Change] = ()
    """The best first: the first one that is legal is proposed."""
    run: str = ""
    """A command instead, where no setting is to blame."""
    why: str = ""
    """The cause in this run, where it is better known than the rule's."""
    weight: Weight = "wrong"


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    reads: str
    """Names of metrics; between them a space."""
    when: str
    cause: str
    change: str
    """In words, of which the one for a run is made."""
    watch: str
    """What tells whether it helped."""
    find: Callable[[Case], Found | None]
    weight: Weight = "wrong"
    hides: tuple[str, ...] = ()
    """Rules that find its consequences."""


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
    """Empty where no legal setting mends it."""
    run: str
    watch: str
    explains: tuple[str, ...] = ()
    """What else was found that follows from it."""

    @property
    def cli(self) -> str:
        """To paste behind `slipstream train CONFIG`."""
        return " ".join(f"--{key} {shlex.quote(as_text(value))}" for key, value in self.change.items())

    @property
    def toml(self) -> str:
        """To paste into a config."""
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
    """Whether the config takes it, and is another one with it."""
    return changed(config, change) not in (None, config)


def changed(config: Config, change: Change) -> Config | None:
    """None where it would be refused."""
    tree = config.model_dump(mode="json", exclude_none=True)
    try:
        found = parse(tree, [(key, as_text(value)) for key, value in change.items()], say=str)
        method_of(found)
    except ConfigError:
        return None
    return found


def as_text(value: Any) -> str:
    """On a command line, where a word needs no quotes."""
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
    """Causes only, in the order given, each with the answers that it explains."""
    left, hidden = list(answers), dict[str, list[str]]()
    for answer in list(left):
        if answer in left:
            gone = [each for each in left if each.name in rules[answer.name].hides and may_hide(answer, each)]
            hidden[answer.name] = [each.name for each in gone]
            left = [each for each in left if each not in gone]
    return [replace(answer, explains=tuple(hidden[answer.name])) for answer in left]


def may_hide(cause: Answer, symptom: Answer) -> bool:
    """What is only worth an eye explains nothing that is wrong."""
    return cause.weight == "wrong" or symptom.weight != "wrong"
