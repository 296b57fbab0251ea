"""Numbers that follow what was measured: controllers of the KL's coefficient β, and two guards. No tensor here."""

from __future__ import annotations

from collections.abc import Sequence


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


def length_surge(
    lengths: Sequence[float], *, fired: int = 0, window: int = 100, rise: float = 0.2, factor: float = 0.5
) -> float:
    """What to multiply the learning rate by now: `factor` if answers grew by more than `rise` over the last `window`.

    `lengths` are the mean response lengths of the updates so far, `fired` how many there were when the guard last
    fired: it then waits for a whole window of new ones. A surge precedes collapse by tens of steps.  (2602.01826.)
    """
    if len(lengths) - fired <= window:
        return 1.0
    return factor if lengths[-1] > (1 + rise) * lengths[-1 - window] else 1.0


def ess_lr(*, ess: float) -> float:
    """What to multiply the learning rate by: the effective sample size as a share of the batch.  (VCPO, 2602.17616.)

    1 on-policy; small steps when a few samples dominate the gradient.
    """
    if not ess >= 0:
        raise ValueError(f"ess must be a share of the batch, got {ess}")
    return min(ess, 1.0)
