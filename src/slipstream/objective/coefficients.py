"""Coefficients of the loss that may change between updates, and the controllers that change them. No tensors here."""

from typing import NamedTuple


class Coefficients(NamedTuple):
    """Coefficients of parts of the loss that may change between updates."""

    beta: float = 0.0
    """Coefficient of the KL to the reference."""
    variance: float = 0.0
    """Coefficient of the ratio's variance in the policy loss r2vpo."""


MEASURED = {"beta": "reference/kl", "variance": "policy/ratio_variance"}
"""Metric that each coefficient of `Coefficients` follows, if it changes."""
REPORTED = {"beta": "reference/beta", "variance": "policy/variance_coef"}
"""Metric that shows its value, if it changes."""


def adaptive_beta(*, beta: float, kl: float, samples: int, target: float, horizon: float) -> float:
    """Return the next β, adjusted to keep the KL near its target (Ziegler et al., 1909.08593).

    β·(1 + clip(kl/target − 1, ±0.2)·samples/horizon), after an update that trained on `samples`.
    Use this controller if the best β changes during the run.
    """
    if not (target > 0 and horizon > 0.2 * samples):
        raise ValueError(f"target {target} must be positive, and horizon {horizon} above samples/5 = {samples / 5}")
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)


def ascended(*, coefficient: float, value: float, bound: float, step: float) -> float:
    """Return the next coefficient of a penalty, by dual ascent on the constraint value ≤ bound.

    max(0, coefficient + step·(min(value, 2·bound) − bound)). The limit 2·bound is this project's: a coefficient falls
    by at most step·bound, so it also grows by at most that. Without a limit one outlier would raise it for good.
    `value` is the measured mean of what the penalty penalises.
    Use this controller if a bound on the value is easier to choose than a coefficient.
    """
    return max(0.0, coefficient + step * (min(value, 2 * bound) - bound))
