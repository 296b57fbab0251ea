"""Means with standard errors, paired differences, slopes, and verdicts on claims. Pure functions.

The error of a mean is the standard error, sd / √n with n − 1 in sd. One value has no error, so its verdict stays open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import atan, cos, isfinite, log2, nan, pi, sin, sqrt
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["holds", "does not hold", "open"]
SIGNIFICANT = 0.05
"""Largest p-value at which a claim is decided."""
ROUNDING_ERROR = 1e-9
"""Largest ratio that rounding alone can leave: of a standard error to its mean, or of a mean to its standard error."""
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Estimate:
    n: int
    mean: float | None
    """Mean of the values; None if there are none."""
    se: float | None
    """Standard error; None if there are fewer than two values."""


def estimate(values: Sequence[float]) -> Estimate:
    mean, error = fmean(values) if values else None, standard_error(values)
    if mean and error and abs(mean) <= ROUNDING_ERROR * error:  # differences that cancel, but for rounding
        mean = 0.0
    return Estimate(len(values), mean, error)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean of independent values; None for fewer than two, NaN if one is not finite."""
    if len(values) < 2:
        return None
    return stdev(values) / sqrt(len(values)) if all(map(isfinite, values)) else nan


def difference(one: BySeed, other: BySeed) -> Estimate:
    """Return the mean of `one` minus `other`, over the seeds that both have."""
    return estimate([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def slope(xs: Sequence[float], ys: Sequence[float], shift: int = 1) -> float:
    """Return the slope of the least-squares line of y against log2(x + shift), for at least two different x."""
    logs = [log2(x + shift) for x in xs]
    middle, level = fmean(logs), fmean(ys)
    spread = sum((x - middle) ** 2 for x in logs)
    return sum((x - middle) * (y - level) for x, y in zip(logs, ys, strict=True)) / spread


def p_value(difference: Estimate) -> float | None:
    """Return the two-sided p-value of a mean against 0, by Student's t; None without a finite standard error.

    The n − 1 degrees of freedom are an integer, so the distribution has a closed form: a finite sum of powers of the
    cosine of atan(|t| / √(n − 1)). Equal differences have no spread to divide by. Their p-value is that of n equal
    signs, 2 / 2ⁿ.
    """
    if difference.mean is None or difference.se is None or not isfinite(difference.se):
        return None
    if difference.se <= ROUNDING_ERROR * abs(difference.mean):
        return 2.0 ** (1 - difference.n) if difference.mean else 1.0
    degrees = difference.n - 1
    angle = atan(abs(difference.mean) / difference.se / sqrt(degrees))
    odd = degrees % 2
    term, total = (cos(angle) if odd else 1.0), 0.0
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= cos(angle) ** 2 * power / (power + 1)
    inside = 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
    return max(0.0, 1 - inside)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values corrected for their number by Holm's method.

    None, a claim without a p-value, stays None and is counted, since it has one when more runs have finished.
    """
    ordered = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected, largest = list[float | None]([None] * len(values)), 0.0
    for rank, (p, i) in enumerate(ordered):
        largest = max(largest, min(1.0, p * (len(values) - rank)))
        corrected[i] = largest
    return corrected


def verdict(difference: Estimate, p: float | None) -> Verdict:
    """Return the verdict on the claim that this difference is below zero, from its (corrected) p-value."""
    if difference.mean is None or p is None or p > SIGNIFICANT:
        return "open"
    return "holds" if difference.mean < 0 else "does not hold"
