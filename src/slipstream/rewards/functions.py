"""Grading of one response by built-in rewards or user functions.

The names of a function's parameters select the fields of `Answer` that it gets. It returns a number, or several numbers
by name. Any failure is reported in one line with the line of the user's file, and never counts as a reward of 0.
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
"""Name of the total reward among several numbers; without this name, the total is their sum."""
MOST_REWARDS = 32
"""Largest number of named rewards that an environment or an agent may report."""
LARGEST_REWARD = 1e6
"""Largest absolute reward. Advantages are computed in float32, which keeps differences of 0.1 up to this size."""
NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
"""Allowed names of rewards, which become part of metric names."""
Grades = dict[str, Any] | Ungraded
"""Numbers by name, or the text of a context function, or the reason of a failure."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Fields that a reward may request by the names of its parameters."""

    text: str
    """Response without special tokens; in an environment, the last response of the episode."""
    messages: list[dict[str, str]]
    """The whole episode in order: responses (`role` is "assistant") and observations ("observation")."""
    tokens: list[int]
    """Token ids of the whole episode, observations and end token included."""
    prompt: str
    """Prompt as the student saw it, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    finish: str
    """`eos`, or `length` if the response was cut off; in an environment also `turns` or `time`."""
    outcome: dict[str, float]
    """Rewards (`reward`, `reward/NAME`) and counters that the environment reports; empty without environment."""
    sandbox: Any = None
    """Sandbox in which code may run (`Sandbox`); None without `task.sandbox`."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Fields that a context function may request by the names of its parameters."""

    prompt: str
    """Prompt as the student saw it, with special tokens."""
    response: str
    """Response that is about to be scored, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    best: str
    """Best attempt at this prompt so far, with its reward; empty and None if there is none."""
    best_reward: float | None
    last: str
    """Newest attempt of another group, with its reward; empty and None if there is none."""
    last_reward: float | None


def environment(outcome: dict[str, float], finish: str) -> dict[str, float]:
    """Return the rewards that the environment reported."""
    if WHOLE not in outcome:
        late = ", at the end of environment.seconds" if finish == "time" else ""
        raise Unusable("error", f"has no reward: close() returned none, or the agent left none{late}")
    parts = {name.removeprefix("reward/"): value for name, value in outcome.items() if name.startswith("reward/")}
    return {WHOLE: outcome[WHOLE], **parts}


def exact(text: str, ground_truth: Any) -> float:
    return float(text.strip() in [str(each).strip() for each in each_of(ground_truth)])


def each_of(truth: Any) -> list[Any]:
    """Return the accepted answers as a list; a list of answers accepts any of them."""
    return truth if isinstance(truth, list) else [truth]


def math(text: str, ground_truth: Any) -> float:
    """Return 1 if math-verify finds both answers equal. Its timeouts are off, since `grade` has one for all rewards."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hide the warning about disabled timeouts
    said = parse(text, parsing_timeout=None)
    for truth in each_of(ground_truth):
        # parse as LaTeX first: as plain text, 2^{10} would be its first number, 2
        gold = parse(f"${truth}$", parsing_timeout=None) or parse(str(truth), parsing_timeout=None)
        if verify(gold, said, timeout_seconds=None):
            return 1.0
    return 0.0


BUILT_IN: dict[str, Callable[..., Any]] = {"exact": exact, "math": math, "environment": environment}


def unfit(reward: str, truth: Any) -> str:
    """Return why a reward could never accept this ground truth; empty if it could, or for a user's reward."""
    if reward not in ("exact", "math"):
        return ""
    if isinstance(truth, list):
        return next((why for each in truth if (why := _unfit(reward, each))), "" if truth else "the list is empty")
    return _unfit(reward, truth)


def _unfit(reward: str, truth: Any) -> str:
    if truth is None:
        return "an answer is None"
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
    """Entry of `task.reward`."""
    function: Callable[..., Any]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    """Fields in `asks` that the function requires, since the parameter has no default."""

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    def returned(self, answer: Any) -> Any:
        returned = self.function(**{name: getattr(answer, name) for name in self.asks})
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned

    def of(self, answer: Any) -> dict[str, Any]:
        """Return the total under the reward's name, and each part under NAME/PART."""
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
    """User function that returns the text of a teacher's context."""

    def of(self, answer: Any) -> dict[str, Any]:
        returned = self.returned(answer)
        if not isinstance(returned, str):
            raise Unusable("type", f"returned {brief(returned)}, which is not text")
        return {"context": returned}


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


class Unusable(Exception):
    """The return value of a function is not a valid reward or context."""

    def __init__(self, cause: str, said: str) -> None:
        super().__init__(said)
        self.cause = cause


def number(returned: Any, of: str = "") -> float:
    if not hasattr(returned, "__float__"):
        raise Unusable("type", f"returned {of.strip()} {brief(returned)}, which is not a number".replace("  ", " "))
    value = float(returned)
    if not maths.isfinite(value):
        raise Unusable("nan", f"returned {value}{of}")
    return value


def rewards_of(returned: Any) -> dict[str, float]:
    """Convert a return value (number, numbers by name, or None) to the rewards of an outcome; None gives none."""
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
    """Return a finite number; raise Unusable above `LARGEST_REWARD`."""
    value = number(returned, of)
    if abs(value) > LARGEST_REWARD:
        raise Unusable("type", f"returned {value:g}{of}, which is larger than {LARGEST_REWARD:g}")
    return value


# --- one response -----------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """Timeout of a reward. Not an Exception, since verifiers such as math-verify catch those and continue."""


def grade(rewards: Sequence[Reward], answer: Any, timeout: float) -> Grades:
    """Grade by every reward until the first failure. Call this in the main thread only, which SIGALRM interrupts."""
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
            except BaseException as error:  # SystemExit and KeyboardInterrupt, too, fail only this response
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


# --- rewards by name --------------------------------------------------------------------------------------------------


def is_own(spec: str) -> bool:
    return spec not in BUILT_IN


def check_installed(specs: Iterable[str]) -> None:
    if "math" in specs and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("task.reward = 'math' needs math-verify: pip install 'slipstream[math]'")


def reward_of(spec: str) -> Reward:
    """Load a reward. The import runs user code, so call this only in a child process."""
    try:
        function = own(spec) if is_own(spec) else BUILT_IN[spec]
        asks, needs = parameters(function, asked_of(Answer))
        if not asks:
            raise ConfigError(
                "no parameter is known, so all responses would get the same reward: add the parameter text"
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
"""Loaders of user functions, by the kind of their result."""
