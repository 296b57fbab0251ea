"""Controllers of the KL coefficient β, which react to the measured KL. They use no tensors."""

from __future__ import annotations


def fixed_beta(*, beta: float, kl: float, samples: int) -> float:
    """Return the same β for the next update. A constant β cannot oscillate, but the user must choose β."""
    return beta


def adaptive_beta(*, beta: float, kl: float, samples: int, target: float, horizon: float) -> float:
    """Return the next β, adjusted to keep the KL near its target (Ziegler et al., 1909.08593).

    β·(1 + clip(kl/target − 1, ±0.2)·samples/horizon), after an update that trained on `samples`.
    Use this controller if the best β changes during the run.
    """
    if not (target > 0 and horizon > 0.2 * samples):
        raise ValueError(f"target {target} must be positive, and horizon {horizon} above samples/5 = {samples / 5}")
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)


CONTROLLERS = {"fixed": fixed_beta, "adaptive": adaptive_beta}
