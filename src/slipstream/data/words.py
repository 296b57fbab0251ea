"""The built-in task `words`: end a sentence of a language with 2,048 words, all of whose probabilities are known.

The language has 16 classes of 128 words. Only the last word matters for the next one: three classes may follow it
(`STEP_CHANCES`). In a class the word of rank r has a probability proportional to 1/r. A sentence may end after words
of every fourth class. The next word has an entropy of 4.9 nats, so the 64 most likely words hold 69 % of the
probability.
"""

import random
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, product

from slipstream.data.arithmetic import SPLITS, split_of

CLASSES, RANKS = 16, 128
STEP_CHANCES = {1: 0.5, 3: 0.3, 8: 0.2}
"""Probability of the class that follows, by its distance modulo `CLASSES` from the class of the last word."""
LAST_OF, ENDS = 4, 1 / 3
"""A sentence ends with probability `ENDS` after a word whose class is the last of `LAST_OF` consecutive classes."""
END = ""
"""The end of a sentence among its next words."""
VOCABULARY_WORDS = ["".join(letters) for letters in product("bdfgklmnprstvzhj", "aeio", "bdfgklmnprstvzhj", "ae")]
"""All words: those of class 0 by rank, then those of class 1, and so on."""
CLASS_OF = {word: index // RANKS for index, word in enumerate(VOCABULARY_WORDS)}
CUMULATIVE_FREQUENCIES = list(accumulate(1 / rank for rank in range(1, RANKS + 1)))


def may_end(word: str) -> bool:
    return CLASS_OF[word] % LAST_OF == LAST_OF - 1


@cache
def next_words(word: str) -> Mapping[str, float]:
    """Return the probability of every word that may follow a word, and of `END`."""
    going_on = 1 - ENDS if may_end(word) else 1.0
    found = {END: ENDS} if may_end(word) else {}
    for step, share in STEP_CHANCES.items():
        first = (CLASS_OF[word] + step) % CLASSES * RANKS
        for rank in range(1, RANKS + 1):
            found[VOCABULARY_WORDS[first + rank - 1]] = going_on * share / rank / CUMULATIVE_FREQUENCIES[-1]
    return found


def drawn(kind: int, rng: random.Random) -> str:
    """Draw a word of a class."""
    return VOCABULARY_WORDS[kind * RANKS + rng.choices(range(RANKS), cum_weights=CUMULATIVE_FREQUENCIES)[0]]


def sentence(rng: random.Random) -> list[str]:
    """Draw a sentence of at least two words. The first word has a random class."""
    words = [drawn(rng.randrange(CLASSES), rng)]
    while len(words) < 2 or not (may_end(words[-1]) and rng.random() < ENDS):
        (step,) = rng.choices(list(STEP_CHANCES), list(STEP_CHANCES.values()))
        words.append(drawn((CLASS_OF[words[-1]] + step) % CLASSES, rng))
    return words


def numbered(split: str, index: int) -> tuple[str, str]:
    """Return the first two words of sentence number `index` of a split, and the others: at least one."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(f"words/{split}/{index}")  # a string seed is hashed with SHA-512: stable across runs
    while True:
        words = sentence(rng)
        if not may_end(words[1]) and split_of(prompt := " ".join(words[:2])) == split:
            return prompt, " ".join(words[2:])


def grammatical(prompt: str, text: str, finish: str) -> float:
    """Return 1 if a sentence has ended, where it may, and each of its words may follow the one before; else 0."""
    words = [*prompt.split(), *text.split()]
    if finish != "eos" or not all(word in CLASS_OF for word in words):
        return 0.0
    return float(all(b in next_words(a) for a, b in zip(words, [*words[1:], END], strict=True)))
