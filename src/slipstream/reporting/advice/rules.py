"""Rules, findings and answers. An answer states what is wrong, why, and the smallest change that fixes the problem."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from typing import Any, Literal, get_args

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.objective.method import method_of
from slipstream.reporting.advice.measurements import Case

Weight = Literal["wrong", "speed", "watch", "tune"]
"""Severity of an answer: an error to fix, lost time only, a warning, or a suggested setting."""
WEIGHTS: tuple[Weight, ...] = get_args(Weight)
Change = Mapping[str, Any]
"""New values of settings, by dotted name."""


@dataclass(frozen=True)
class Found:
    """Evidence that a rule applies to a run."""

    metric: str
    value: float
    limit: float
    changes: Sequence[Change] = ()
    """Possible changes, best first. The first one that the config allows is proposed."""
    _: KW_ONLY
    run: str = ""
    """Command to run if no change is possible; empty if no command helps."""
    cause: str = ""
    """Cause in this run; empty for the general cause of the rule."""
    error: bool = True
    """False if a rule for errors only warns in this run."""


def found_above(
    case: Case, metric: str, limit: float, changes: Sequence[Change] = (), *, error: bool = True
) -> Found | None:
    """Return evidence if a metric is significantly above its limit now."""
    now = case.now(metric)
    return Found(metric, now.mean, limit, changes, error=error) if now.over(limit) else None


def found_below(
    case: Case, metric: str, limit: float, changes: Sequence[Change] = (), *, error: bool = True
) -> Found | None:
    now = case.now(metric)
    return Found(metric, now.mean, limit, changes, error=error) if now.under(limit) else None


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
        """Change as options to append to `slipstream train CONFIG`."""
        return " ".join(f"--{key} {shlex.quote(as_text(value))}" for key, value in self.change.items())

    @property
    def toml(self) -> str:
        """Change as TOML to paste into a config."""
        lines = list[str]()
        for section, settings in groupby(self.change.items(), key=lambda setting: setting[0].rpartition(".")[0]):
            lines += [f"[{section}]"] if section else []
            for key, value in settings:
                name = key.rpartition(".")[2]
                lines.append(f"# without {name}" if value is None else f"{name} = {as_toml(value)}")
        return "\n".join(lines)


def answered(rule: Rule, found: Found, config: Config) -> Answer:
    change = next((change for change in found.changes if legal(config, change)), {})
    return Answer(
        name=rule.name,
        weight=rule.weight if found.error or rule.weight != "wrong" else "watch",
        metric=found.metric,
        value=found.value,
        limit=found.limit,
        when=rule.when,
        cause=found.cause or rule.cause,
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


def without_symptoms(answers: Iterable[Answer], rules: Mapping[str, Rule]) -> list[Answer]:
    """Return the answers that no earlier answer hides, each with the names of those it hides.

    An answer that is not an error hides no error.
    """
    left, shown = list(answers), list[Answer]()
    while left:
        cause = left.pop(0)
        hides = rules[cause.name].hides
        hidden = [each for each in left if each.name in hides and (cause.weight == "wrong" or each.weight != "wrong")]
        left = [each for each in left if each not in hidden]
        shown.append(replace(cause, explains=tuple(each.name for each in hidden)))
    return shown


def without_contradictions(answers: Iterable[Answer], found: Mapping[str, Found], config: Config) -> Iterator[Answer]:
    """Yield the answers; none proposes another value for a setting that an earlier answer changes."""
    proposed = dict[str, Any]()
    for answer in answers:
        evidence = found[answer.name]
        agreeing = [
            change
            for change in evidence.changes
            if all(proposed.get(key, value) == value for key, value in change.items()) and legal(config, change)
        ]
        change = agreeing[0] if agreeing else {}
        proposed |= change
        yield replace(answer, change=change, run=evidence.run if not change else "")
