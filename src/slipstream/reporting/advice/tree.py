"""The decision tree: all rules with their sentences, and the answers that they give for a run.

rules.toml has the sentences of every rule, in the order of the tree, causes before symptoms; TESTS has its test. An
answer states what is wrong, why, and the smallest change that fixes the problem. It hides later answers that are its
consequences, and lists their names; only an error hides errors. Answers are sorted by severity, and answers of the same
severity are in the order of the rules.
"""

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from math import isfinite
from os import PathLike
from typing import Any, Literal, get_args

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, ModelError
from slipstream.models.resolve import file_of
from slipstream.reporting.advice import drift, learning, running, teachers
from slipstream.reporting.advice.measurements import SURE_ERRORS, WINDOW, Case, Change, Evidence
from slipstream.run_dir.reading import Line, RunDir
from slipstream.run_dir.writing import SAMPLES

Weight = Literal["wrong", "speed", "watch", "tune"]
"""Severity of an answer: an error to fix, lost time only, a warning, or a suggested setting."""
WEIGHTS: tuple[Weight, ...] = get_args(Weight)
CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
LARGE_HIDDEN = 512
"""Hidden size of a model with large matrices."""
SAMPLES_READ = 400
"""Number of first samples that the rules read."""


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    reads: str
    """Metrics that the rule reads, separated by spaces."""
    when: str
    cause: str
    other_cause: str = ""
    """Second cause, which the test can name instead of the usual one."""
    change: str
    """Description of the change, for docs/advice.md."""
    watch: str
    """Metrics that show if the change helped."""
    test: Callable[[Case], Evidence | None]
    weight: Weight = "wrong"
    hides: tuple[str, ...] = ()
    """Names of rules whose answers are consequences of this one, and are hidden by it."""


TESTS: dict[str, Callable[[Case], Evidence | None]] = {
    "teacher scores do not match": teachers.negative_kl,
    "failing teacher": teachers.fails,
    "router flips": drift.routers_flip,
    "engine mismatch": drift.engines_differ,
    "agreement unknown": drift.agreement_unknown,
    "wrong teacher": teachers.another_teacher,
    "student too far": teachers.far_student,
    "wrong template": teachers.another_prompt,
    "other end token": teachers.other_end,
    "teacher lowers rewards": teachers.lowers_rewards,
    "wrong direction": drift.wrong_direction,
    "wrong importance weights": drift.wrong_weights,
    "poor samples": learning.poor_samples,
    "moving teacher": learning.follows_down,
    "step too large": learning.too_large,
    "staleness": drift.stale,
    "variance blow-up": drift.blown_up,
    "sequence weights": drift.by_sequence,
    "too much rejected": drift.rejects_too_much,
    "moderate drift": drift.moderate,
    "ratio tails": drift.tails,
    "widened clip": drift.widened,
    "clip saturation": drift.clipped,
    "spikes": learning.spikes,
    "length surge": learning.surges,
    "entropy collapse": learning.collapses,
    "short answers": learning.shrinks,
    "small support": learning.uncovered,
    "gated samples": learning.gated,
    "freshness coefficients": learning.freshness_coefficients,
    "freshness thresholds": learning.freshness_thresholds,
    "truncated answers": learning.cut_off,
    "no reward": learning.unrewarded,
    "equal rewards": learning.equal_rewards,
    "blind critic": learning.blind_critic,
    "dropped groups": running.dropped_groups,
    "failing samples": running.failed_responses,
    "dying workers": running.restarted_workers,
    "slow teacher": running.slow_teacher,
    "slow sampler": running.slow_sampler,
    "slow learner": running.slow_learner,
    "slow publish": running.slow_publish,
    "waiting for the schedule": running.schedule_wait,
    "discarded work": running.discarded_tokens,
    "nothing to teach": teachers.nothing_to_teach,
    "no progress": learning.no_progress,
}
LIMITS = {
    "drift": drift,
    "learning": learning,
    "running": running,
    "teachers": teachers,
    "WINDOW": WINDOW,
    "TWO_WINDOWS": 2 * WINDOW,
    "SURE_ERRORS": SURE_ERRORS,
}
"""Values of the names in braces in rules.toml."""


def load_rules() -> Iterator[Rule]:
    table = tomllib.loads(files(__package__ or "").joinpath("rules.toml").read_text("utf-8"))
    groups: dict[str, list[str]] = table.pop("groups")

    def members(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            yield from members(groups[name]) if name in groups else (name,)

    for name, row in table.items():
        hides = tuple(each for each in members(row.pop("hides", ())) if each != name)
        weight = row.pop("weight", "wrong")
        texts = {key: " ".join(text.split()).format(**LIMITS) for key, text in row.items()}
        yield Rule(name=name, test=TESTS[name], weight=weight, hides=hides, **texts)


ADVICE_RULES = tuple(load_rules())
RULES_BY_NAME = {rule.name: rule for rule in ADVICE_RULES}


# --- answers ----------------------------------------------------------------------------------------------------------


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


def answer_of(rule: Rule, evidence: Evidence, config: Config) -> Answer:
    change = next((change for change in evidence.changes if is_legal(config, change)), {})
    return Answer(
        name=rule.name,
        weight=rule.weight if evidence.error or rule.weight != "wrong" else "watch",
        metric=evidence.metric,
        value=evidence.value,
        limit=evidence.limit,
        when=rule.when,
        cause=rule.other_cause if evidence.other_cause else rule.cause,
        change=change,
        run=evidence.run if not change else "",
        watch=rule.watch,
    )


def is_legal(config: Config, change: Change) -> bool:
    """Return True if the config with this change is valid and differs from the config without it."""
    return changed_config(config, change) not in (None, config)


def changed_config(config: Config, change: Change) -> Config | None:
    """Return the config with this change, or None if it is invalid."""
    tree = config.model_dump(mode="json", exclude_none=True)
    try:
        return parse(tree, [(key, as_text(value)) for key, value in change.items()], say=str)
    except ConfigError:
        return None


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


def without_symptoms(answers: Iterable[Answer]) -> list[Answer]:
    """Return the answers that no earlier answer hides, each with the names of those it hides.

    An answer that is not an error hides no error.
    """
    left, shown = list(answers), list[Answer]()
    while left:
        cause = left.pop(0)
        hides = RULES_BY_NAME[cause.name].hides
        hidden = [each for each in left if each.name in hides and (cause.weight == "wrong" or each.weight != "wrong")]
        left = [each for each in left if each not in hidden]
        shown.append(replace(cause, explains=tuple(each.name for each in hidden)))
    return shown


def without_contradictions(
    answers: Iterable[Answer], evidence: Mapping[str, Evidence], config: Config
) -> Iterator[Answer]:
    """Yield the answers; none proposes another value for a setting that an earlier answer changes."""
    proposed = dict[str, Any]()
    for answer in answers:
        agreeing = [
            change
            for change in evidence[answer.name].changes
            if all(proposed.get(key, value) == value for key, value in change.items()) and is_legal(config, change)
        ]
        change = agreeing[0] if agreeing else {}
        proposed |= change
        yield replace(answer, change=change, run=evidence[answer.name].run if not change else "")


# --- the advice for a run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    answers: Sequence[Answer]
    updates: int
    """Number of updates after the supervised stage, which the rules read."""
    needs: int = 2 * WINDOW
    """Minimum number of updates for a comparison of the last updates with the first."""

    @property
    def enough(self) -> bool:
        return self.updates >= self.needs

    @property
    def wrong(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.weight == "wrong"]


def finite(line: Mapping[str, Any]) -> Line:
    """Return a line without metrics that are NaN or infinite, of which there is no mean."""
    return {name: value for name, value in line.items() if not isinstance(value, float) or isfinite(value)}


def advise(case: Case) -> Advice:
    if not case.lines:
        return Advice((), 0)
    case = replace(case, lines=[finite(line) for line in case.lines])
    evidence = {rule.name: each for rule in ADVICE_RULES if (each := rule.test(case)) is not None}
    answers = without_symptoms(answer_of(RULES_BY_NAME[name], each, case.config) for name, each in evidence.items())
    answers.sort(key=lambda answer: WEIGHTS.index(answer.weight))
    answers = list(without_contradictions(answers, evidence, case.config))
    return Advice(tuple(answers), len(case.lines), case.filled + 2 * WINDOW)


def read(path: str | PathLike[str]) -> Case:
    run = RunDir(path)
    return case_of(run, run.config, run.metrics, run.evaluations)


def case_of(run: RunDir, config: Config, metrics: Sequence[Line], evaluations: Sequence[Line]) -> Case:
    local = [config.model_of(teacher) for teacher in config.teachers.values() if teacher.base_url is None]
    models = [model_config(model) for model in (config.student, *local)]
    return Case(
        config=config,
        lines=[line for line in metrics if not line.get("sft")],
        supervised=next((line for line in reversed(metrics) if line.get("sft")), {}),
        evaluations=evaluations,
        samples=[each for each in run.picked(SAMPLES, lambda n, _: n < SAMPLES_READ) if not each.get("source")],
        ledger=run.ledger if config.freshness is not None else (),
        at=shlex.quote(str(run.path)),
        context=min((model[name] for model in models for name in CONTEXT_KEYS if name in model), default=None),
        vocabulary=models[0].get("vocab_size"),
        large=models[0].get("hidden_size", 0) >= LARGE_HIDDEN,
    )


def model_config(model: str) -> dict[str, Any]:
    """Return the contents of the model's config.json; empty if the model is not on this machine."""
    try:
        file = file_of(model, "config.json")
    except ModelError:
        return {}
    keys: dict[str, Any] = json.loads(file.read_text("utf-8")) if file is not None else {}
    return {**keys, **keys.get("text_config", {})}
