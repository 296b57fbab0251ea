"""Proof that a server runs the published weights: its log-probs of fixed texts, compared with those of a copy here.

Pure functions. Two tests: the log-probs are near the copy's, and they moved since the last proven version if the copy's
moved. The second test finds a server that reports success and keeps old weights, however small the update is. Moves
below `STILL` prove nothing; they add up until a later version.

Shapes: N tokens of all texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.records import Floats

TEXTS, TOKENS = 4, 24
"""Number of texts, and tokens of each."""
NEAR = {"float64": 0.01, "float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""Limit of the root mean square difference between server and copy, by the number format of the weights."""
STILL = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""Root mean square move of the copy's log-probs above which the server's must move, too."""
NOISE = 4.0
"""Smallest move of the copy that counts, as a multiple of the difference between two equal requests."""


@dataclass(frozen=True)
class Answers:
    """Log-probs of the server and of the copy for the same weights."""

    served_N: Floats
    copy_N: Floats


def texts(vocabulary: int, context: int) -> list[list[int]]:
    """Return the fixed texts: random token ids, the same in every run with this vocabulary."""
    found: list[list[int]] = (
        np.random.default_rng(0).integers(0, vocabulary, (TEXTS, min(TOKENS, context - 1))).tolist()
    )
    return found


def apart(a_N: Floats, b_N: Floats) -> float:
    """Return the root mean square difference."""
    return float(np.sqrt(np.mean((a_N - b_N) ** 2)))


def moved(now: Answers, before: Answers, *, noise: float, dtype: str) -> bool:
    """Return whether the copy's log-probs moved so far that the server's must move, too."""
    return apart(now.copy_N, before.copy_N) > max(STILL[dtype], NOISE * noise)


def objection(now: Answers, before: Answers | None, *, noise: float, dtype: str) -> str:
    """Return why the server does not run the published weights; empty if it does."""
    far = apart(now.served_N, now.copy_N)
    if not far <= NEAR[dtype]:  # also true for NaN
        return (
            f"does not run the published weights: its log-probs of fixed texts are {far:.2g} off, above {NEAR[dtype]}"
        )
    if before and moved(now, before, noise=noise, dtype=dtype) and apart(now.served_N, before.served_N) <= 2 * noise:
        return "keeps old weights: its log-probs of fixed texts did not move, and those of the published weights did"
    return ""
