"""Divergences between student and teacher at one position, computed from what a cache holds.

Each returns one loss per row; nothing is summed over rows. Differentiable in `logp`, the student's log-probs; log-probs
are floored at −1e4 on entry.

Shapes: N positions, K support, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from slipstream.estimators.numerics import floored, same_shape

DenseKind = Literal["forward", "reverse", "jsd"]


def forward_kl_topk(logp_NK: Tensor, logq_NK: Tensor, *, tail: bool = False, renormalise: bool = False) -> Tensor:
    """KL(q‖p) on the teacher's top-k: Σ_S q (log q − log p).  (Agarwal et al., 2306.13649; truncated as in verl.)

    The plain form is not zero at p = q in its gradient (−Σ_S q ∇log p): it pushes mass into the support. `tail` adds
    the remaining mass of both as one more bucket; `renormalise` conditions both on the support; either one makes
    student = teacher a stationary point. Teacher-weighted, so robust to stale rollouts.
    """
    same_shape(logp=logp_NK, logq=logq_NK)
    if tail and renormalise:
        raise ValueError("tail and renormalise exclude each other: keep one of them")
    logp_NK, logq_NK = floored(logp_NK), floored(logq_NK)
    if renormalise:
        logp_NK, logq_NK = logp_NK.log_softmax(-1), logq_NK.log_softmax(-1)
    if tail:
        logp_NK, logq_NK = _with_tail(logp_NK), _with_tail(logq_NK)
    return (logq_NK.exp() * (logq_NK - logp_NK)).sum(-1)


def dense(logp_NV: Tensor, logq_NV: Tensor, *, kind: DenseKind, beta: float = 0.5) -> Tensor:
    """The divergence over the whole vocabulary: forward KL(q‖p), reverse KL(p‖q), or the generalised JSD.

    jsd (Agarwal et al., 2306.13649): β·KL(q‖m) + (1−β)·KL(p‖m) with m = βq + (1−β)p; β = 0 is forward, β = 1 reverse.
    """
    same_shape(logp=logp_NV, logq=logq_NV)
    logp_NV, logq_NV = floored(logp_NV), floored(logq_NV)
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse" if beta == 1 else "forward"
    match kind:
        case "forward":
            return _kl(logq_NV, logp_NV)
        case "reverse":
            return _kl(logp_NV, logq_NV)
        case "jsd":
            if not 0 < beta < 1:
                raise ValueError(f"beta must lie in [0, 1], got {beta}")
            weights = torch.tensor([beta, 1 - beta], dtype=logp_NV.dtype, device=logp_NV.device).log()
            logm_NV = torch.logaddexp(logq_NV + weights[0], logp_NV + weights[1])
            return beta * _kl(logq_NV, logm_NV) + (1 - beta) * _kl(logp_NV, logm_NV)
    raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(get_args(DenseKind))}")


def _kl(loga: Tensor, logb: Tensor) -> Tensor:
    return (loga.exp() * (loga - logb)).sum(-1)


def _with_tail(logp_NK: Tensor) -> Tensor:
    """One more column: the log of the mass outside the support, at least the smallest normal number."""
    rest_N = (1 - logp_NK.exp().sum(-1)).clamp(min=torch.finfo(logp_NK.dtype).tiny)
    return torch.cat([logp_NK, rest_N.log()[:, None]], -1)
