"""The built-in tasks for tools: what is asked after lies in a table that the student does not see.

`table` asks for the sum of the numbers behind two or three keys, some of them taken off. `lookup` asks which key is
reached from another by some hops, where the table has the next key of each. Tools read the table
(`slipstream.environments.builtin`), and without them there is nothing but a guess.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

from slipstream.data.arithmetic import SPLITS, split_of

KEYS = 10
"""Of a table; all other letters are unknown to it."""


Problem = tuple[str, str, dict[str, Any]]
"""Question, answer and table."""


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
    """All keys are on one circle, and no way is long enough to come round."""
    circle = rng.sample(string.ascii_lowercase, KEYS)
    hops = rng.randrange(2, 6)
    after = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    return f"Start at {circle[0]} and follow {hops} hops.", circle[hops], dict(sorted(after.items()))


TASKS: dict[str, Callable[[random.Random], Problem]] = {"table": table, "lookup": lookup}


def numbered(task: str, split: str, index: int) -> Problem:
    """One problem of a split, whatever the others are; no question about the same table is in both splits."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(f"{task}/{split}/{index}")  # a string seed is hashed with SHA-512: stable across runs
    question, answer, hidden = TASKS[task](rng)
    while split_of(f"{question} {hidden}") != split:
        question, answer, hidden = TASKS[task](rng)
    return question, answer, hidden
