"""Built-in tasks: data sets that `[data]` names as `builtin:NAME`.

`arithmetic` and `words` have their own files. In the other tasks the answer depends on a table that only tools can read
(`slipstream.environments.builtin`), so that a student without tools can only guess. `table`: the table maps keys to
numbers; the question is a sum or difference of two or three of these. `lookup`: the table maps each key to a next key;
the question is which key follows a start key after some hops. `doors`: the table maps the key of each door to what lies
behind it, in the order of the doors: the next key, and at last a number, which is the answer.
"""

import random
import string
from collections.abc import Callable
from typing import Any

from slipstream.data.arithmetic import SPLITS, split_of
from slipstream.errors import DataError, did_you_mean

LOOKUP_KEYS = 10
"""Number of letters that are keys of a table."""
Problem = tuple[str, str, dict[str, Any]]
"""Question, answer, and the table that only tools can read."""


def table(rng: random.Random) -> Problem:
    numbers = {key: rng.randrange(10, 100) for key in rng.sample(string.ascii_lowercase, LOOKUP_KEYS)}
    first, *others = rng.sample(list(numbers), rng.choice((2, 2, 3)))
    question, total = first, numbers[first]
    for key in others:
        sign = rng.choice("+-")
        question += sign + key
        total += numbers[key] if sign == "+" else -numbers[key]
    return f"What is {question}?", str(total), numbers


def lookup(rng: random.Random) -> Problem:
    """Draw a problem in which following keys leads through all keys in a cycle. Paths are shorter than the cycle."""
    circle = rng.sample(string.ascii_lowercase, LOOKUP_KEYS)
    hops = rng.randrange(2, 6)
    after = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    return f"Start at {circle[0]} and follow {hops} hops.", circle[hops], dict(sorted(after.items()))


def doors(rng: random.Random) -> Problem:
    number = str(rng.randrange(10, 100))
    keys = rng.sample(string.ascii_lowercase, rng.randrange(6, 10))
    return f"Start at {keys[0]}.", number, dict(zip(keys, [*keys[1:], number], strict=True))


TOOL_TASKS: dict[str, Callable[[random.Random], Problem]] = {"table": table, "lookup": lookup, "doors": doors}


def tool_problem(task: str, split: str, index: int) -> Problem:
    """Return problem number `index` of a split. The splits have no problem (question and table) in common."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(f"{task}/{split}/{index}")  # a string seed is hashed with SHA-512: stable across runs
    while True:
        question, answer, hidden = TOOL_TASKS[task](rng)
        if split_of(f"{question} {hidden}") == split:
            return question, answer, hidden


def check(task: str, split: str) -> None:
    names = ["arithmetic", "words", *TOOL_TASKS]
    if task not in names:
        raise DataError(f"no built-in task {task!r}; {did_you_mean(task, names)}")
    if split not in SPLITS:
        raise DataError(f"builtin:{task} has no split {split!r}; {did_you_mean(split, SPLITS)}")
