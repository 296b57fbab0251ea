"""Fits of costs to measured times: least squares without negative costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Terms = dict[str, float]
"""Numbers by cost term (such as step or row): either how often a cost is paid, or its seconds."""


@dataclass(frozen=True)
class Paid:
    seconds: float
    terms: Terms
    kind: str = ""
    """Name shared by repeats of the same measurement; empty if there are none."""


def fitted_to_fastest(paid: Sequence[Paid]) -> Terms:
    """Return costs fitted to the fastest repeat of each kind, because other load on the machine only adds time."""
    prices, best = fitted(paid), dict[str, tuple[float, Paid]]()
    for each in paid:
        ratio = each.seconds / sum(prices[name] * count for name, count in each.terms.items())
        if each.kind not in best or ratio < best[each.kind][0]:
            best[each.kind] = ratio, each
    return fitted([each for _, each in best.values()])


def fitted(paid: Sequence[Paid]) -> Terms:
    """Return non-negative seconds per term that minimize the squared relative errors; unneeded terms get 0."""
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
