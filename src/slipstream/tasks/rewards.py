"""How one answer is graded: by what is here, or by a function of the user's own.

A function is given what it asks for, by the names of its parameters (`Answer` has them all), and returns a number, or
several by name. Whatever it does instead is told in one line, with the line of its file; it is never a 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import math as maths
import os
import re
import reprlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import ConfigError, did_you_mean, first_line
from slipstream.records import Ungraded

WHOLE = "reward"
"""Among several numbers by name, the one that is the reward; their sum is, where none has this name."""
Grades = dict[str, Any] | Ungraded
"""Numbers by name; of a function that writes a context, its text."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a reward may ask for."""

    text: str
    """The response, without special tokens."""
    tokens: list[int]
    """Its ids, the end token among them."""
    prompt: str
    """As the student saw it, without special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    finish: str
    """`eos`, or `length` where it was cut off."""


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


def asked_of(kind: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


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


BUILT_IN: dict[str, Callable[..., Any]] = {"exact": exact, "math": math}


def unfit(reward: str, truth: Any) -> str:
    """Why no answer could be found right by a reward; empty if one could. A reward of the user's own judges itself."""
    if reward not in BUILT_IN:
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

    def of(self, answer: Any) -> dict[str, Any]:
        """The reward by its name, and what it is made of."""
        returned = self.function(**{name: getattr(answer, name) for name in self.asks})
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
        returned = self.function(**{name: getattr(answer, name) for name in self.asks})
        if not isinstance(returned, str):
            raise Unusable("type", f"returned {_brief(returned)}, which is no text")
        return {"context": returned}


class Unusable(Exception):
    """What a function returned is no reward."""

    def __init__(self, cause: str, said: str) -> None:
        super().__init__(said)
        self.cause = cause


def number(returned: Any, of: str = "") -> float:
    if not hasattr(returned, "__float__"):
        raise Unusable("type", f"returned {of.strip()} {_brief(returned)}, which is no number".replace("  ", " "))
    value = float(returned)
    if not maths.isfinite(value):
        raise Unusable("nan", f"returned {value}{of}")
    return value


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '…'}" if value is not None else "None"


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


def told(error: BaseException, file: str) -> str:
    """What was raised, and the last line of this file on the way there."""
    at = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == file else at[-1].lineno if at else None
    what = error.msg if isinstance(error, SyntaxError) else first_line(error)
    said = type(error).__name__ + (f": {what}" if what != type(error).__name__ else "")
    return said + (f" ({near(file)}:{line})" if line is not None else "")


def file_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else ""


def near(file: str) -> str:
    """As seen from here, where it lies below."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


# --- from a name to a function ----------------------------------------------------------------------------------------


def is_own(spec: str) -> bool:
    return spec not in BUILT_IN


def check_installed(specs: Iterable[str]) -> None:
    if "math" in specs and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("task.reward = 'math' needs math-verify: pip install 'slipstream[math]'")


def reward_of(spec: str) -> Reward:
    """Its file or module is run, as Python imports it: for a process in which that may do what it likes."""
    try:
        function = _own(spec) if is_own(spec) else BUILT_IN[spec]
        return Reward(spec, function, *_parameters(function, asked_of(Answer)))
    except ConfigError as error:
        raise ConfigError(f"task.reward = {spec!r}: {error}") from None


def context_function_of(spec: str) -> Reward:
    try:
        function = _own(spec)
        return ContextFunction(spec, function, *_parameters(function, asked_of(Seen)))
    except ConfigError as error:
        raise ConfigError(f"context = {spec!r}: {error}") from None


MAKES: dict[str, Callable[[str], Reward]] = {"reward": reward_of, "context": context_function_of}
"""What a function of the user's own is, by what it makes."""


def _own(spec: str) -> Callable[..., Any]:
    where, _, name = spec.rpartition(":")
    module = _from_file(Path(where).expanduser()) if where.endswith(".py") else _from_module(where)
    function = getattr(module, name, None)
    if function is None:
        others = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"no function {name!r} in it; {did_you_mean(name, others) if others else 'it has none'}")
    if not callable(function):
        raise ConfigError(f"{name} is {_brief(function)}, and no function")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise ConfigError(f"there is no file {near(str(path))}")
    if (known := sys.modules.get(str(path))) is not None:
        return known
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported, as by a script
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # under a name that no import statement has
    _run(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _from_module(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"there is no module {name!r} here or among what is installed")
    module: ModuleType = _run(lambda: importlib.import_module(name), spec.origin or "")
    return module


def _run(load: Callable[[], Any], file: str) -> Any:
    try:
        return load()
    except BaseException as error:  # whatever it does as it is imported
        raise ConfigError(f"cannot be imported: {told(error, file)}") from None


def _parameters(function: Callable[..., Any], known: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of those that are known it asks for, and which of them it needs."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError("it is a coroutine function: write `def` in place of `async def`")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError("Python does not tell its parameters: wrap it in a function of your own") from None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        asks = list(known)
    else:
        asks = [each.name for each in parameters if each.name in known and each.kind is not each.POSITIONAL_ONLY]
    needs = []
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.default is not each.empty:
            continue
        if each.name not in asks:
            raise ConfigError(f"nothing is known for its parameter {each.name!r}; known: {', '.join(known)}")
        needs.append(each.name)
    return tuple(asks), tuple(needs)
