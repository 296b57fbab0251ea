"""Controllers of coefficients of the loss, which react to what was measured. They use no tensors."""

from __future__ import annotations


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

    max(0, coefficient + step·(value − bound)).
    Use this controller if a bound on the penalised quantity is easier to choose than a coefficient.
    """
    return max(0.0, coefficient + step * (value - bound))
