"""Built-in tasks for tool calls. The answer depends on a table that the student cannot see.

`table`: the table maps keys to numbers; the question is a sum or difference of two or three of these. `lookup`: the
table maps each key to a next key; the question is which key follows a start key after some hops. Tools read the table
(`slipstream.environments.builtin`). A student without tools can only guess.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

from slipstream.data.arithmetic import SPLITS, split_of

KEYS = 10
"""Number of letters that are keys of a table."""


Problem = tuple[str, str, dict[str, Any]]
"""Question, answer, and the table that only tools can read."""


def table(rng: random.Random) -> Problem:
    numbers = {key: rng.randrange(10, 100) for key in rng.sample(string.ascii_lowercase, KEYS)}
    first, *others = rng.sample(list(numbers), rng.choice((2, 2, 3)))
    question, total = first, numbers[first]
    for key in others:
        sign = rng.choice("+-")
        question += sign + key
        total += numbers[key] if sign == "+" else -numbers[key]
    return f"What is {question}?", str(total), numbers


def lookup(rng: random.Random) -> Problem:
    """Draw a problem in which following keys leads through all keys in a cycle. Paths are shorter than the cycle."""
    circle = rng.sample(string.ascii_lowercase, KEYS)
    hops = rng.randrange(2, 6)
    after = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    return f"Start at {circle[0]} and follow {hops} hops.", circle[hops], dict(sorted(after.items()))


TASKS: dict[str, Callable[[random.Random], Problem]] = {"table": table, "lookup": lookup}


def numbered(task: str, split: str, index: int) -> Problem:
    """Return problem number `index` of a split. The splits have no problem (question and table) in common."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(f"{task}/{split}/{index}")  # a string seed is hashed with SHA-512: stable across runs
    question, answer, hidden = TASKS[task](rng)
    while split_of(f"{question} {hidden}") != split:
        question, answer, hidden = TASKS[task](rng)
    return question, answer, hidden
