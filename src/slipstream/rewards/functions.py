"""How one answer is graded: by what is here, or by a function of the user's own.

A function is given what it asks for, by the names of its parameters (`Answer` has them all), and returns a number, or
several by name. Whatever it does instead is told in one line, with the line of its file; it is never a 0.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import math as maths
import re
import reprlib
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError
from slipstream.records import Ungraded
from slipstream.user_code.loading import asked_of, brief, file_of, own, parameters, told

WHOLE = "reward"
"""Among several numbers by name, the one that is the reward; their sum is, where none has this name."""
MOST_REWARDS = 32
"""The most rewards that an environment or an agent may report by name."""
LARGEST_REWARD = 1e6
"""The largest reward of either sign. Up to here float32, in which advantages are computed, keeps differences of 0.1."""
NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
"""The name of a reward, which becomes part of the name of a metric."""
Grades = dict[str, Any] | Ungraded
"""Numbers by name; of a function that writes a context, its text."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a reward may ask for."""

    text: str
    """The response, without special tokens; in an environment, what was said last."""
    messages: list[dict[str, str]]
    """The whole episode: what was said (`role` is "assistant") and what was seen ("observation"), in turn."""
    tokens: list[int]
    """Its ids, those of what was seen among them, and the end token."""
    prompt: str
    """As the student saw it, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    finish: str
    """`eos`, or `length` where it was cut off; of an episode also `turns` and `time`."""
    outcome: dict[str, float]
    """What its environment says of it: rewards as `reward` and `reward/NAME`, and all that is counted."""
    sandbox: Any = None
    """Where code may run (`Sandbox`), with `task.sandbox`."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a function that writes a teacher's context may ask for."""

    prompt: str
    """As the student saw it, special tokens and all."""
    response: str
    """Which is about to be scored, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    best: str
    """The best attempt at the prompt so far, those of this group among them, and its reward."""
    best_reward: float | None
    last: str
    """The newest attempt of another group, if there is any, and its reward."""
    last_reward: float | None


def environment(outcome: dict[str, float], finish: str) -> dict[str, float]:
    """What the environment itself returned."""
    if WHOLE not in outcome:
        late = ", at the end of environment.seconds" if finish == "time" else ""
        raise Unusable("error", f"has no reward: close() returned none, or the agent left none{late}")
    parts = {name.removeprefix("reward/"): value for name, value in outcome.items() if name.startswith("reward/")}
    return {WHOLE: outcome[WHOLE], **parts}


def exact(text: str, ground_truth: Any) -> float:
    return float(text.strip() in [str(each).strip() for each in each_of(ground_truth)])


def each_of(truth: Any) -> list[Any]:
    """Of several answers any is right."""
    return truth if isinstance(truth, list) else [truth]


def math(text: str, ground_truth: Any) -> float:
    """Mathematically the same, by math-verify. Its own deadlines are off: ours holds for all verifiers."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off
    said = parse(text, parsing_timeout=None)
    for truth in each_of(ground_truth):
        # as LaTeX first: read as prose, 2^{10} is its first number, 2
        gold = parse(f"${truth}$", parsing_timeout=None) or parse(str(truth), parsing_timeout=None)
        if verify(gold, said, timeout_seconds=None):
            return 1.0
    return 0.0


BUILT_IN: dict[str, Callable[..., Any]] = {"exact": exact, "math": math, "environment": environment}


def unfit(reward: str, truth: Any) -> str:
    """Why no answer could be found right by a reward; empty if one could. A reward of the user's own judges itself."""
    if reward not in ("exact", "math"):
        return ""
    if isinstance(truth, list):
        return next((why for each in truth if (why := _unfit(reward, each))), "" if truth else "the list is empty")
    return _unfit(reward, truth)


def _unfit(reward: str, truth: Any) -> str:
    if truth is None:
        return "there is none"
    if isinstance(truth, str):
        return "" if truth.strip() else "it is blank"
    if isinstance(truth, bool):
        return f'{truth} may be written in several ways: make it text, "yes" or "true"'
    if isinstance(truth, int):
        return ""
    if not isinstance(truth, float):
        return f"it is {reprlib.repr(truth)}, where text or a number is expected: name a part of it by data.answer"
    if not maths.isfinite(truth):
        return f"it is {truth}"
    return "" if reward != "exact" else f'{truth} may be written in several ways: make it text, or write "math"'


@dataclass(frozen=True)
class Reward:
    spec: str
    """As `task.reward` names it."""
    function: Callable[..., Any]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    """Those of them that have no default."""

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    def returned(self, answer: Any) -> Any:
        returned = self.function(**{name: getattr(answer, name) for name in self.asks})
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned

    def of(self, answer: Any) -> dict[str, Any]:
        """The reward by its name, and what it is made of."""
        returned = self.returned(answer)
        if not isinstance(returned, Mapping):
            return {self.name: number(returned)}
        if not returned:
            raise Unusable("type", "returned no number")
        for part in returned:
            if not isinstance(part, str) or not re.fullmatch(r"\w+", part):
                raise Unusable("type", f"returned a number under the name {part!r}: a name is one word")
        parts = {part: number(value, f" for {part!r}") for part, value in returned.items()}
        whole = parts.pop(WHOLE, None)
        return {
            self.name: sum(parts.values()) if whole is None else whole,
            **{f"{self.name}/{part}": value for part, value in parts.items()},
        }


@dataclass(frozen=True)
class ContextFunction(Reward):
    """Returns a text, where a reward returns a number."""

    def of(self, answer: Any) -> dict[str, Any]:
        returned = self.returned(answer)
        if not isinstance(returned, str):
            raise Unusable("type", f"returned {brief(returned)}, which is no text")
        return {"context": returned}


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


class Unusable(Exception):
    """What a function returned is no reward."""

    def __init__(self, cause: str, said: str) -> None:
        super().__init__(said)
        self.cause = cause


def number(returned: Any, of: str = "") -> float:
    if not hasattr(returned, "__float__"):
        raise Unusable("type", f"returned {of.strip()} {brief(returned)}, which is no number".replace("  ", " "))
    value = float(returned)
    if not maths.isfinite(value):
        raise Unusable("nan", f"returned {value}{of}")
    return value


def rewards_of(returned: Any) -> dict[str, float]:
    """A number, or several by name, as an outcome has them; none of None."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        return {WHOLE: bounded(returned)}
    if len(returned) > MOST_REWARDS or not all(isinstance(name, str) and NAME.fullmatch(name) for name in returned):
        names = ", ".join(map(repr, returned))[:80]
        raise Unusable("type", f"returned rewards by the names {names}: write up to {MOST_REWARDS} plain words")
    parts = {name: bounded(value, f" for {name!r}") for name, value in returned.items()}
    whole = parts.pop(WHOLE, None)
    return {
        WHOLE: sum(parts.values()) if whole is None else whole,
        **{f"{WHOLE}/{name}": value for name, value in parts.items()},
    }


def bounded(returned: Any, of: str = "") -> float:
    """A reward that an outcome may hold."""
    value = number(returned, of)
    if abs(value) > LARGEST_REWARD:
        raise Unusable("type", f"returned {value:g}{of}, which is larger than {LARGEST_REWARD:g}")
    return value


# --- one answer -------------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """Not an Exception: verifiers catch those (math-verify at thirty places) and go on."""


def grade(rewards: Sequence[Reward], answer: Any, timeout: float) -> Grades:
    """By every reward, each under this deadline; the first that gives none decides. For the main thread alone: the
    alarm interrupts whatever Python code is at work."""
    before = signal.signal(signal.SIGALRM, _out_of_time)
    found: dict[str, float] = {}
    try:
        for reward in rewards:
            try:
                found |= _in_time(reward, answer, timeout)
            except OutOfTime:
                return Ungraded("timeout", f"{reward.spec} took more than {timeout:g} s (task.timeout)")
            except Unusable as error:
                return Ungraded(error.cause, f"{reward.spec} {error}")
            except BaseException as error:  # also of those that end a program: here they end one answer
                return Ungraded("error", f"{reward.spec} raised {told(error, file_of(reward.function))}")
        return found
    finally:
        signal.signal(signal.SIGALRM, before)


def _in_time(reward: Reward, answer: Any, timeout: float) -> dict[str, float]:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        return reward.of(answer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _out_of_time(*_: object) -> None:
    raise OutOfTime


# --- by their names -------------------------------------------------------------------------------------------------


def is_own(spec: str) -> bool:
    return spec not in BUILT_IN


def check_installed(specs: Iterable[str]) -> None:
    if "math" in specs and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("task.reward = 'math' needs math-verify: pip install 'slipstream[math]'")


def reward_of(spec: str) -> Reward:
    """Its file or module is run, as Python imports it: for a process in which that may do what it likes."""
    try:
        function = own(spec) if is_own(spec) else BUILT_IN[spec]
        asks, needs = parameters(function, asked_of(Answer))
        if not asks:
            raise ConfigError(
                "it asks for nothing, so every answer would get one reward: name text among its parameters"
            )
        return Reward(spec, function, asks, needs)
    except ConfigError as error:
        raise ConfigError(f"task.reward = {spec!r}: {error}") from None


def context_function_of(spec: str) -> Reward:
    try:
        function = own(spec)
        return ContextFunction(spec, function, *parameters(function, asked_of(Seen)))
    except ConfigError as error:
        raise ConfigError(f"context = {spec!r}: {error}") from None


MAKES: dict[str, Callable[[str], Reward]] = {"reward": reward_of, "context": context_function_of}
"""What a function of the user's own is, by what it makes."""
