"""Interface of environments, in which a student acts by tool calls or by replies.

An environment is a user class in one of two forms. In the first form the public methods are the tools of the student.
Type annotations give the schema of the arguments, docstrings the descriptions; the student sees the return values. In
the second form `step(reply)` handles every reply. Optional in both forms: `start` gets the fields of `Start` that its
parameters are named after; `close` returns a reward or several rewards by name. All methods may be `async`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A message of a chat template: `role` and `content`."""


class ToolError(Exception):
    """Error of a tool call, whose whole text the student reads."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One parsed turn of the student."""

    text: str
    """Text of the turn, without tool calls and special tokens."""
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """One error line for each malformed tool call; the student reads these lines."""


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of an environment to one reply of the student."""

    messages: tuple[Message, ...] = ()
    """Messages that the student sees next."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    """Reward of the turn that is answered; None: the environment rewards no single turns. Their sum is the reward of
    the episode, unless `close` returns one."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Values for the method `start`, which gets those fields that its parameters are named after."""

    id: str
    prompt: str
    """Prompt as the student saw it, with special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    seed: int
    """Random seed; all responses to the same prompt get the same seed."""
    sandbox: Any
    """`Sandbox` in which the environment may run code; None if `environment.sandbox` is not set."""
