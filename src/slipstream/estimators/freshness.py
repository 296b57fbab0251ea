"""Freshness and weight of buffered samples: f-OPD.

Chen, Zhang and Wu, "f-OPD: Stabilizing Long-Horizon On-Policy Distillation with Freshness-Aware Control", equations 10
to 13 and 16. The paper gives no default values; the defaults here are our own. The baselines of its ablation are
special cases: alpha = beta = 0 weights by lag only, anchor = 0 has no anchor, and a weight of 1 is no weighting.

Row scope: a score belongs to a whole sample. Shapes: B rows (samples), T positions, N flat positions, M cached draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.numerics import RATIO_BOUND, bounded, floored, same_shape


def score(
    lag: Tensor | float,
    rollout_kl: Tensor | float,
    supervision_kl: Tensor | float,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Return the freshness f = exp(−α√D_roll − β√D_sup) / (lag + 1), 1 for a sample of the current policy (Eq. 11).

    Drifts are means over the aligned positions (`aligned_mean`). A sample without aligned positions has an infinite
    drift, and its score is 0. Negative drifts are rounding errors and count as 0. Scalars broadcast; there is no
    gradient. If contexts are just prefixes and the teacher is frozen, supervision_kl is 0.
    """
    lag, rollout_kl, supervision_kl = _tensor(lag), _tensor(rollout_kl), _tensor(supervision_kl)
    shaped = {"lag": lag, "rollout_kl": rollout_kl, "supervision_kl": supervision_kl}
    if shaped := {name: x for name, x in shaped.items() if x.ndim}:
        same_shape(**shaped)
    invalid = rollout_kl.isinf() | supervision_kl.isinf()
    roll, sup = (x.masked_fill(x.isinf(), 0.0).clamp(min=0).sqrt() for x in (rollout_kl, supervision_kl))
    return (torch.exp(-alpha * roll - beta * sup) / (lag + 1)).masked_fill(invalid, 0.0)


def weight(f: Tensor, *, threshold: float = 0.02) -> Tensor:
    """Return the weight w = sg(relu(f − ξ)): 0 at or below the threshold (f-OPD, Eq. 13)."""
    return (f.detach() - threshold).clamp(min=0)


def rollout_kl_from_cache(logp_NM: Tensor, behavior_logp_NM: Tensor) -> Tensor:
    """Estimate KL(p_θ‖p_old) from draws of p_old: 1/M Σ (ρ log ρ − ρ + 1), each term ≥ 0. Differentiable.

    Value and gradient are unbiased while no ratio is clamped and p_θ is processed exactly like p_old (temperature,
    sampling support). If the processing differs, the estimate is above 0 even at lag 0. Stored weights give the exact
    value: `dense(logp, logp_old, kind="reverse")`.
    """
    same_shape(logp=logp_NM, behavior_logp=behavior_logp_NM)
    log_ratio_NM = bounded(floored(logp_NM) - floored(behavior_logp_NM), -RATIO_BOUND, RATIO_BOUND)
    # ρ·x − expm1(x) with x = log ρ does not cancel near ρ = 1; if exp is off by an ulp the result may still be below 0
    return (log_ratio_NM.exp() * log_ratio_NM - torch.expm1(log_ratio_NM)).clamp(min=0).mean(-1)


def aligned_mean(kl_BT: Tensor, aligned_BT: Tensor) -> Tensor:
    """Return each sample's mean drift over aligned positions (with known drift); infinite without such positions."""
    same_shape(kl=kl_BT, aligned=aligned_BT)
    count_B = (aligned_BT != 0).sum(-1)
    mean_B = kl_BT.masked_fill(aligned_BT == 0, 0.0).sum(-1) / count_B.clamp(min=1)
    return mean_B.masked_fill(count_B == 0, torch.inf)


def _tensor(x: Tensor | float) -> Tensor:
    return x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
