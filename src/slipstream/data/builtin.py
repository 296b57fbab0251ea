"""Built-in tasks: data sets that `[data]` names as `builtin:NAME`; each generates numbered problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.data import arithmetic
from slipstream.data import tool_tasks as hidden
from slipstream.errors import DataError, did_you_mean


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a built-in task: the content of a data row."""

    prompt: str | list[dict[str, Any]]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


def _arithmetic(split: str, index: int) -> Problem:
    return Problem(*arithmetic.numbered(split, index))


def _hidden(task: str, split: str, index: int) -> Problem:
    question, answer, table = hidden.numbered(task, split, index)
    return Problem([{"role": "user", "content": question}], answer, {"table": table})


TASKS: dict[str, Callable[[str, int], Problem]] = {
    "arithmetic": _arithmetic,
    **{task: partial(_hidden, task) for task in hidden.TASKS},
}
"""Tasks by name: functions from a split and a number i ≥ 0 to problem number i."""


def check(name: str, split: str) -> None:
    if name not in TASKS:
        raise DataError(f"no built-in task {name!r}; {did_you_mean(name, list(TASKS))}")
    if split not in arithmetic.SPLITS:
        raise DataError(f"builtin:{name} has no split {split!r}; {did_you_mean(split, arithmetic.SPLITS)}")
