"""Numbers that follow what was measured: controllers of the KL's coefficient β. No tensor here."""

from __future__ import annotations


def fixed_beta(*, beta: float, kl: float, samples: int) -> float:
    """The next β: the same.  Nothing to oscillate, but yours to tune."""
    return beta


def adaptive_beta(*, beta: float, kl: float, samples: int, target: float, horizon: float) -> float:
    """The next β, steered so that the KL stays near its target.  (Ziegler et al., 1909.08593.)

    β·(1 + clip(kl/target − 1, ±0.2)·samples/horizon), after an update that trained on `samples`.
    When a good β changes during the run.
    """
    if not (target > 0 and horizon > 0.2 * samples):
        raise ValueError(f"target {target} must be positive, and horizon {horizon} above samples/5 = {samples / 5}")
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)


CONTROLLERS = {"fixed": fixed_beta, "adaptive": adaptive_beta}
