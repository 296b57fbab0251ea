"""Interface of environments, in which a student acts by tool calls or by replies.

An environment is a user class in one of two forms. In the first form its public methods are the tools. Type annotations
give the schema of the arguments, docstrings the descriptions, and the student sees the return values. In the second
form `step(reply)` handles every reply. Both forms may have `start`, whose parameters name the fields of `Start` that it
gets. They may have `close`, which returns a reward or several rewards by name. All of these methods may be `async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A message of a chat template: `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One parsed turn of the student."""

    text: str
    """Text without calls and special tokens."""
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """Malformed calls: one line of explanation each, which the student reads."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a reply."""

    messages: tuple[Message, ...] = ()
    """Messages that the student sees next."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Fields that `start` may request by the names of its parameters."""

    id: str
    prompt: str
    """Prompt as the student saw it, with special tokens."""
    ground_truth: Any
    meta: dict[str, Any]
    """All other columns of the prompt's row."""
    data_source: str
    seed: int
    """Seed; all responses to one prompt get the same one."""
    sandbox: Any
    """Sandbox in which code may run (`Sandbox`); None without `environment.sandbox`."""
