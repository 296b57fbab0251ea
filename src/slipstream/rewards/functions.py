"""Rewards: built-in functions and user functions that grade one response.

A function gets the fields of `Answer` that its parameters are named after. It returns a number, or a dict of numbers by
name. A failure is reported in one line that names the line of the user's file. A failure is never a reward of 0.
"""

import ast
import asyncio
import atexit
import importlib.util
import inspect
import logging
import math as maths
import re
import reprlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.errors import ConfigError
from slipstream.grades import Grades, Ungraded
from slipstream.user_code import describe_error, field_names, file_of, load_object, parameters, short_repr

TOTAL_REWARD = "reward"
"""Name of the total among several returned numbers. If no number has this name, the total is the sum of all."""
MOST_REWARDS = 32
"""Maximum number of named rewards that an environment or an agent may report."""
LARGEST_REWARD = 1e6
"""Largest absolute reward. Float32, in which advantages are computed, can represent differences of 0.1 up to it."""
LARGEST_METRIC = 1e150
"""Largest absolute value of a metric of an environment; readers of metrics.jsonl accept no larger number."""
REWARD_NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
"""Pattern of allowed reward names; they become part of metric names."""
RewardSettings = Mapping[str, Mapping[str, Any]]
"""Settings of built-in rewards by the reward's name: keyword arguments of its function."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Values for a reward function, which gets those fields that its parameters are named after."""

    text: str
    """Text of the response without special tokens; in an environment, of the last response of the episode."""
    messages: list[dict[str, str]]
    """All responses (`role` is "assistant") and observations ("observation") of the episode, in order."""
    tokens: list[int]
    """Token ids of the response or the whole episode, observations and end token included."""
    prompt: str
    """Prompt as the student saw it, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    finish: str
    """Reason of the end: `eos`, `length` if the response was cut off, or an environment's limit `turns` or `time`."""
    outcome: dict[str, float]
    """Rewards (`reward`, `reward/NAME`) and counters from the environment; empty if there is no environment."""
    sandbox: Any = None
    """`Sandbox` in which the function may run code; None if `task.sandbox` is not set."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Values for a function that writes a teacher's context; it gets the fields that its parameters are named after."""

    prompt: str
    """Prompt as the student saw it, with special tokens."""
    response: str
    """Text of the response that the teacher will score, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    best: str
    """Text of the best earlier response to this prompt; empty, and `best_reward` None, if there is none."""
    best_reward: float | None
    last: str
    """Text of the newest response to this prompt in another group; empty, and `last_reward` None, if there is none."""
    last_reward: float | None


def environment(outcome: dict[str, float], finish: str) -> dict[str, float]:
    """Return the rewards that the environment reported in `outcome`; raise Unusable if it has no `reward`."""
    if TOTAL_REWARD not in outcome:
        late = ", at the end of environment.seconds" if finish == "time" else ""
        raise Unusable("error", f"has no reward: step() and close() returned none, or the agent left none{late}")
    parts = {name.removeprefix("reward/"): value for name, value in outcome.items() if name.startswith("reward/")}
    return {TOTAL_REWARD: outcome[TOTAL_REWARD], **parts}


def exact(text: str, ground_truth: Any) -> float:
    return float(text.strip() in [str(each).strip() for each in each_of(ground_truth)])


def each_of(truth: Any) -> list[Any]:
    return truth if isinstance(truth, list) else [truth]


def math(text: str, ground_truth: Any) -> float:
    """Return 1 if math-verify finds both answers equal, else 0. `grade` limits the time of all rewards."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hide the warning about disabled timeouts
    answer = parse(text, parsing_timeout=None)
    for truth in each_of(ground_truth):
        # parse as LaTeX first, since plain 2^{10} would be parsed as its first number, 2
        gold = parse(f"${truth}$", parsing_timeout=None) or parse(str(truth), parsing_timeout=None)
        if verify(gold, answer, timeout_seconds=None):
            return 1.0
    return 0.0


def reasoning_gym(text: str, meta: dict[str, Any], ground_truth: Any = None) -> float:
    """Return the score of the task that made the row. The answer is in the last <answer> tags, or the whole text."""
    from reasoning_gym.factory import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    made, found = meta["reasoning_gym"], extract_answer(text)
    entry = {**made, "answer": ground_truth, "metadata": ast.literal_eval(made["metadata"])}
    return float(get_score_answer_fn(made["task"])(text.strip() if found is None else found, entry))


def match_format(text: str, *, pattern: str | None, tags: Sequence[str]) -> float:
    """Return 1 if the whole response matches `pattern`, or consists of the tags in order, each once; else 0."""
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    parts = (f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return float(once and re.fullmatch(r"\s*".join(["", *parts, ""]), text, re.DOTALL) is not None)


def overlong(tokens: Sequence[int], finish: str, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return the soft length penalty of DAPO (2503.14476): 0 down to −penalty over the last `buffer` tokens.

    A response that was cut off gets −penalty, also if a long message of its environment left no room.
    """
    if finish == "length":
        return -penalty
    return penalty * min(0.0, max(-1.0, (max_tokens - buffer - len(tokens)) / buffer))


BUILT_IN_REWARDS: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "math": math,
    "environment": environment,
    "format": match_format,
    "overlong": overlong,
    "reasoning_gym": reasoning_gym,
}


NO_SETTINGS = "its settings are in [task.{spec}] of the config of a run: evaluate a run that has them"
REWARD_PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Modules that built-in rewards import, by reward. A grading process loads them before it grades."""
MODEL_REWARDS = ("model", "judge")
"""Rewards of whole groups, which no function computes: a reward model, and a judge behind an endpoint."""


def unfit(reward: str, truth: Any) -> str:
    """Return the reason why a reward can never accept this ground truth; empty if it can, and for user functions."""
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
    """Name of the reward in `task.reward`: a built-in reward, or FILE:FUNCTION."""
    function: Callable[..., Any]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    """Fields in `asks` that the function requires, because their parameters have no default."""

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    def call(self, answer: Any) -> Any:
        returned = self.function(**{name: getattr(answer, name) for name in self.asks})
        return awaited(returned) if inspect.isawaitable(returned) else returned

    def evaluate(self, answer: Any) -> dict[str, Any]:
        """Call the function; return the total under the reward's name NAME, and each part under NAME/PART."""
        returned = self.call(answer)
        if not isinstance(returned, Mapping):
            return {self.name: number(returned)}
        if not returned:
            raise Unusable("type", "returned no number")
        for part in returned:
            if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*", part):
                raise Unusable("type", f"returned a number under the name {part!r}: a name is one word")
        return with_total(self.name, {part: number(value, part) for part, value in returned.items()})


@dataclass(frozen=True)
class ContextFunction(Reward):
    """User function that returns the text of a teacher's context."""

    def evaluate(self, answer: Any) -> dict[str, Any]:
        returned = self.call(answer)
        if not isinstance(returned, str):
            raise Unusable("type", f"returned {short_repr(returned)}, which is not text")
        return {"context": returned}


RUNNERS: list[asyncio.Runner] = []
"""Event loop of this process, if a function needed one: connections of a client in a user's module belong to it."""


def awaited(work: Awaitable[Any]) -> Any:
    """Await in the event loop of this process, and cancel the tasks that are left over."""

    async def result() -> Any:
        before = asyncio.all_tasks()
        try:
            return await work
        finally:
            left = asyncio.all_tasks() - before
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    if not RUNNERS:
        RUNNERS.append(asyncio.Runner())
        atexit.register(end_runner)
    try:
        return RUNNERS[0].run(result())
    except Exception:
        raise
    except BaseException:  # out of time: what still runs ends with the loop
        end_runner()
        raise


def end_runner() -> None:
    atexit.unregister(end_runner)
    RUNNERS.pop().close()


class Unusable(Exception):
    """The return value of a user function is not a valid reward or context."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def number(returned: Any, part: str = "", *, largest: float = maths.inf) -> float:
    """Convert a returned value to float; raise Unusable if it is not finite or its absolute value exceeds `largest`."""
    place = f" for {part!r}" if part else ""
    if not hasattr(returned, "__float__"):
        raise Unusable("type", f"returned{place} {short_repr(returned)}, which is not a number")
    try:
        value = float(returned)
    except OverflowError:  # an integer beyond all floats
        limit = min(largest, sys.float_info.max)
        raise Unusable("type", f"returned{place} {short_repr(returned)}, which is larger than {limit:g}") from None
    except (TypeError, ValueError, RuntimeError):  # an array
        raise Unusable("type", f"returned{place} {short_repr(returned)}, which is not one number") from None
    if not maths.isfinite(value):
        raise Unusable("nan", f"returned {value}{place}")
    if abs(value) > largest:
        raise Unusable("type", f"returned {value:g}{place}, which is larger than {largest:g}")
    return value


def with_total(name: str, parts: dict[str, float]) -> dict[str, float]:
    """Return the total of numbers under `name`, and each of them under `name/PART`."""
    whole = parts.pop(TOTAL_REWARD, None)
    named = {f"{name}/{part}": value for part, value in parts.items()}
    return {name: sum(parts.values()) if whole is None else whole, **named}


def rewards_of(returned: Any) -> dict[str, float]:
    """Convert a number, or numbers by name, to rewards `reward` and `reward/NAME`; None and {} give an empty dict."""
    if returned is None or (isinstance(returned, Mapping) and not returned):
        return {}
    if not isinstance(returned, Mapping):
        return {TOTAL_REWARD: number(returned, largest=LARGEST_REWARD)}
    if len(returned) > MOST_REWARDS or not all(
        isinstance(name, str) and REWARD_NAME.fullmatch(name) for name in returned
    ):
        names = ", ".join(map(repr, returned))[:80]
        raise Unusable("type", f"returned rewards by the names {names}: write up to {MOST_REWARDS} plain words")
    return with_total(
        TOTAL_REWARD, {name: number(each, name, largest=LARGEST_REWARD) for name, each in returned.items()}
    )


class OutOfTime(BaseException):
    """Timeout of a reward. The base is BaseException, since verifiers such as math-verify catch every Exception."""


def grade(rewards: Sequence[Reward], answer: Any, timeout: float) -> Grades:
    """Grade a response by all rewards, up to the first failure. Call this in the main thread only: SIGALRM needs it."""
    before = signal.signal(signal.SIGALRM, _out_of_time)
    found: dict[str, float] = {}
    try:
        for reward in rewards:
            try:
                try:  # the alarm may also come in this `finally`, so that the handlers are outside of it
                    signal.setitimer(signal.ITIMER_REAL, timeout)
                    found |= reward.evaluate(answer)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except OutOfTime:
                return Ungraded("timeout", f"{reward.spec} took more than {timeout:g} s (task.timeout)")
            except Unusable as error:
                return Ungraded(error.cause, f"{reward.spec} {error}")
            except BaseException as error:  # SystemExit and KeyboardInterrupt of user code fail only this response, too
                return Ungraded("error", f"{reward.spec} raised {describe_error(error, file_of(reward.function))}")
        return found
    finally:
        signal.signal(signal.SIGALRM, before)


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def is_own(spec: str) -> bool:
    return spec not in (*BUILT_IN_REWARDS, *MODEL_REWARDS)


def check_installed(specs: Iterable[str]) -> None:
    for spec, module in REWARD_PACKAGES.items():
        if spec in specs and importlib.util.find_spec(module) is None:
            package, extra = module.replace("_", "-"), spec.replace("_", "-")
            raise ConfigError(f"task.reward = {spec!r} needs {package}: pip install 'slipstream[{extra}]'")


def reward_of(spec: str, setting: str = "task.reward", settings: RewardSettings | None = None) -> Reward:
    """Load a function by its entry in a setting. The import runs user code: call this in a child process."""
    kind, values = (Reward, Answer) if setting == "task.reward" else (ContextFunction, Seen)
    try:
        function = load_object(spec) if is_own(spec) else _with_settings(spec, settings or {})
        asks, needs = parameters(function, field_names(values))
        if kind is Reward and not asks:
            same = "so all responses would get the same reward"
            raise ConfigError(f"no parameter is known, {same}: add the parameter text")
        return kind(spec, function, asks, needs)
    except ConfigError as error:
        raise ConfigError(f"{setting} = {spec!r}: {error}") from None


def _with_settings(spec: str, settings: RewardSettings) -> Callable[..., Any]:
    """Return a built-in function with its settings; raise ConfigError if it needs settings and has none."""
    function = BUILT_IN_REWARDS[spec]
    if spec in settings:
        return partial(function, **settings[spec])
    if any(each.kind is each.KEYWORD_ONLY for each in inspect.signature(function).parameters.values()):
        raise ConfigError(NO_SETTINGS.format(spec=spec))
    return function
