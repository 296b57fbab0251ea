"""Which costs explain what was paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Terms = dict[str, float]
"""By name; what they count, or what each of them costs."""


@dataclass(frozen=True)
class Paid:
    seconds: float
    terms: Terms
    """How often each of several costs was paid."""
    kind: str = ""
    """Of what it is a repeat; nothing where there is none."""


def least_disturbed(paid: Sequence[Paid]) -> Terms:
    """As `fitted`, of those that took the least of their kind for what they were: whatever else goes on only adds."""
    prices, best = fitted(paid), dict[str, tuple[float, Paid]]()
    for each in paid:
        ratio = each.seconds / sum(prices[name] * count for name, count in each.terms.items())
        if each.kind not in best or ratio < best[each.kind][0]:
            best[each.kind] = ratio, each
    return fitted([each for _, each in best.values()])


def fitted(paid: Sequence[Paid]) -> Terms:
    """Costs that explain what was paid, none below zero: of all choices of terms the one with the least squares of
    relative errors."""
    names = list(paid[0].terms)
    a_NK = np.array([[each.terms[name] / each.seconds for name in names] for each in paid])
    best, least = dict.fromkeys(names, 0.0), float("inf")
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            found, *_ = np.linalg.lstsq(a_NK[:, chosen], np.ones(len(paid)), rcond=None)
            error = float(((a_NK[:, chosen] @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = dict.fromkeys(names, 0.0), error
                best |= {names[i]: float(value) for i, value in zip(chosen, found, strict=True)}
    return best
