"""The built-in task `arithmetic`: copy the digits of a chain and keep a running sum modulo ten.

The answer to ``C3D8E5=`` is ``C33D81E56``: every letter is followed by its digit and by the sum so far
(3, then 3 + 8 = 11 -> 1, then 1 + 5 = 6). One wrong sum makes all later sums wrong. A student with a high accuracy
per token therefore still fails most problems. Chain lengths are heavy-tailed, as the lengths of real rollouts are.
"""

import random
import string
import zlib
from collections.abc import Iterator

SHORTEST, LONGEST, MEAN_EXTRA = 3, 24, 5.0
ALPHABET = string.ascii_uppercase + string.digits + "="
SPLITS = ("train", "eval")


def problem(rng: random.Random) -> tuple[str, str]:
    """Draw one random prompt and its answer. No letter repeats in a chain, since chains are shorter than 26."""
    length = min(LONGEST, SHORTEST + int(rng.expovariate(1 / MEAN_EXTRA)))
    start = rng.randrange(26)
    prompt, answer, total = "", "", 0
    for step in range(length):
        letter = string.ascii_uppercase[(start + step) % 26]
        digit = rng.randrange(10)
        total = (total + digit) % 10
        prompt += f"{letter}{digit}"
        answer += f"{letter}{digit}{total}"
    return prompt + "=", answer


def split_of(prompt: str) -> str:
    """Return the split to which a prompt belongs; one prompt in ten is held out for evaluation."""
    return "eval" if zlib.crc32(prompt.encode()) % 10 == 0 else "train"


def problems(split: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield the first ``count`` problems of a split. They are the same in every run. No prompt is in both splits.

    Different seeds would not separate the splits, since short chains are often drawn twice. Each problem is therefore
    drawn again until its prompt belongs to the split.
    """
    return (numbered(split, index) for index in range(count))


def numbered(split: str, index: int) -> tuple[str, str]:
    """Return prompt and answer of problem number ``index`` of a split; earlier problems are not computed."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(f"{split}/{index}")  # a string seed is hashed with SHA-512: stable across runs
    while True:
        prompt, answer = problem(rng)
        if split_of(prompt) == split:
            return prompt, answer
