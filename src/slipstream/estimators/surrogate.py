"""Reverse KL on actions that the behaviour policy drew: surrogates whose gradient is what counts.

Shapes: N positions, M cached actions. Log-probs are floored at −1e4 on entry and log-ratios clamped to ±20 before exp.
Metrics have one value per position, detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.numerics import bounded_exp, floored, same_shape

Clip = float | tuple[float, float] | None


def mc_reverse_kl(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    logq_NM: Tensor,
    *,
    advantage: str = "current",
    clip: Clip = None,
    importance: bool = True,
    ratio_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multi-sample Monte-Carlo reverse KL: −1/M Σ ρ_i sg(A_i) over draws a_i ~ p_old.  (AsyncOPD, 2606.24143.)

    ρ = p_θ/p_old, A = log q − log p_θ recomputed under the current student (`advantage="current"`) or
    log q − log p_old (`"behavior"`). `current` without clip is the default: its expected gradient is that of the dense
    reverse KL whatever policy drew the actions, and it vanishes when student = teacher. `behavior` is that only
    on-policy. `clip` = ε or (low, high): the PPO minimum. `ratio_cap` = c: weight sg(min(ρ, c)), so that capped draws
    keep a gradient. `importance=False` drops ρ (biased when stale; for ablations).
    """
    same_shape(logp=logp_NM, behavior_logp=behavior_logp_NM, logq=logq_NM)
    if clip is not None and ratio_cap is not None:
        raise ValueError("clip and ratio_cap both bound the ratio: keep one of them")
    logp_NM, behavior_NM, logq_NM = floored(logp_NM), floored(behavior_logp_NM), floored(logq_NM)
    ratio_NM = bounded_exp(logp_NM - behavior_NM)
    match advantage:
        case "current":
            advantage_NM = (logq_NM - logp_NM).detach()
        case "behavior":
            advantage_NM = logq_NM - behavior_NM
        case _:
            raise ValueError(f"advantage must be 'current' or 'behavior', got {advantage!r}")

    clipped_NM = torch.zeros_like(ratio_NM)
    if not importance:
        loss_NM = -advantage_NM * logp_NM
    elif ratio_cap is not None:
        weight_NM = ratio_NM.detach().clamp(max=ratio_cap)
        clipped_NM = (ratio_NM.detach() > ratio_cap).to(ratio_NM.dtype)
        loss_NM = -weight_NM * advantage_NM * (logp_NM - logp_NM.detach()).exp()
    elif clip is not None:
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        plain_NM = ratio_NM * advantage_NM
        bounded_NM = ratio_NM.clamp(1 - low, 1 + high) * advantage_NM
        clipped_NM = (bounded_NM < plain_NM).to(ratio_NM.dtype)
        loss_NM = -torch.minimum(plain_NM, bounded_NM)
    else:
        loss_NM = -ratio_NM * advantage_NM

    metrics = {
        "ratio": ratio_NM.detach().mean(-1),
        "ratio_max": ratio_NM.detach().amax(-1),
        "advantage": advantage_NM.detach().mean(-1),
        "clip_fraction": clipped_NM.mean(-1),
    }
    return loss_NM.mean(-1), metrics
