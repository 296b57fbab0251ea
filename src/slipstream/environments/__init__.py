"""What a student acts upon: an environment, and the tools through which it does.

An environment is a class of the user's own, in one of two forms. Either its public methods are the tools: their types
are the schema of the arguments, their docstrings the descriptions, and what they return is what the student sees. Or it
has `step(reply)` and takes every reply itself. Both may have `start`, which is given what it asks for by the names of
its parameters (`Start` has them all), and `close`, which returns rewards: a number, or several by name. Any of these
may be `async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""As chat templates know it: `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Call:
    """Of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the student said in one turn."""

    text: str
    """Without its calls and special tokens."""
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """What of it looks like a call and is none: a line each, for the student to read."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a reply."""

    messages: tuple[Message, ...] = ()
    """What the student sees next."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What `start` may ask for."""

    id: str
    """Of the prompt."""
    prompt: str
    """As the student saw it, special tokens and all."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    seed: int
    """The same for every response to a prompt of the same number."""
    sandbox: Any
    """Where code may run (`Sandbox`); none without `environment.sandbox`."""
