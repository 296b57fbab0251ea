"""Token sampling as a pure function of (seed, position, number of the draw) and the distribution.

Random numbers are hashes of these integers. Therefore a response does not depend on its neighbours in the batch.
Draws (extra tokens sampled at the same position) do not change the emitted token. Guarantor of invariant 4: a log-prob
belongs to the distribution that was sampled from, after temperature, min-p, top-k and top-p.

Shapes: N rows, M draws, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import NonFiniteError
from slipstream.protocols import Sampling

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64; int64 arithmetic wraps in the same way as uint64."""
    for bits, factor in _MIX:
        x = (x ^ _shift(x, bits)) * factor
    return x ^ _shift(x, 31)


def uniforms(seed_N: Tensor, position_N: Tensor, draws: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [N, M]: column j of row i is a hash of (seed, position, j)."""
    column_M = torch.arange(1, draws + 1, device=seed_N.device)
    state_N = _scramble(seed_N + _GOLDEN * (position_N + 1))
    bits_NM = _scramble(state_N[:, None] + _GOLDEN * column_M)
    return _shift(bits_NM, 12).double() * 2.0**-52  # so that u·x < x for every float64 x


def process(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probs of the distribution to sample from: −inf for cut tokens, NaN in rows with invalid logits."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if sampling.temperature == 0:
        best_N1, id_N1 = logits_NV.max(-1, keepdim=True)  # NaN if any logit is NaN
        logp_NV = torch.full_like(logits_NV, -torch.inf).scatter_(1, id_N1, 0.0)
        return logp_NV.masked_fill(~best_N1.isfinite(), torch.nan)
    logp_NV = (logits_NV / sampling.temperature).log_softmax(-1)
    if sampling.min_p > 0:
        least_N1 = logp_NV.amax(-1, keepdim=True) + torch.tensor(sampling.min_p).log()
        logp_NV = _cut(logp_NV, logp_NV < least_N1)
    if 0 < sampling.top_k < logp_NV.shape[-1]:
        best_NK = logp_NV.topk(sampling.top_k, -1).indices  # not all that equal the last of them
        logp_NV = _cut(logp_NV, torch.ones_like(logp_NV, dtype=torch.bool).scatter_(1, best_NK, False))
    if sampling.top_p < 1:
        sorted_NV, order_NV = logp_NV.sort(dim=-1, descending=True, stable=True)
        before_NV = sorted_NV.exp().cumsum(-1) - sorted_NV.exp()
        drop_NV = torch.empty_like(order_NV, dtype=torch.bool).scatter_(1, order_NV, before_NV >= sampling.top_p)
        logp_NV = _cut(logp_NV, drop_NV)
    return logp_NV


def _cut(logp_NV: Tensor, drop_NV: Tensor) -> Tensor:
    return logp_NV.masked_fill(drop_NV, -torch.inf).log_softmax(-1)


def kept_ids(logp_NV: Tensor) -> list[NDArray[np.int32]]:
    """Return the sampling support of each row: the ids that `process` did not cut."""
    row, ids = (logp_NV > -torch.inf).nonzero(as_tuple=True)
    sizes = torch.bincount(row, minlength=len(logp_NV)).tolist()
    return np.split(ids.cpu().numpy().astype(np.int32), np.cumsum(sizes)[:-1])


def fused(logits_NV: Tensor, teacher_NV: Tensor, alpha: float) -> Tensor:
    """Return logits of the mixture p_teacher^α · p_student^(1 − α), up to a constant (logit fusion)."""
    if not teacher_NV.isfinite().any(-1).all():
        raise NonFiniteError("the teacher's logits are not finite, and sampler.fusion draws from them")
    return (1 - alpha) * logits_NV.log_softmax(-1) + alpha * teacher_NV.to(logits_NV.dtype).log_softmax(-1)


def draw_with_teacher(logp_NV: Tensor, teacher_NV: Tensor, k: int, uniform_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from the student, and from the teacher's top k where the student's token is not among them.

    Speculative knowledge distillation (Xu et al., 2410.11325). With q the student's distribution, S the teacher's k
    most likely ids and p its distribution renormalised on S, an emitted token has the probability
    b(y) = q(y)·1[y ∈ S] + (1 − q(S))·p(y). The first M of the 2·M uniforms draw from q, the others from p. Return ids
    [N, M], their log b, and a mask that is True where the teacher replaced the token.
    """
    best_NK, ids_NK = teacher_NV.topk(k, -1)
    if not best_NK[:, 0].isfinite().all():
        raise NonFiniteError("the teacher's logits are not finite, and sampler.teacher_replaces draws from them")
    inside_NV = torch.zeros_like(teacher_NV, dtype=torch.bool).scatter_(1, ids_NK, True)
    teacher_NV = _cut(teacher_NV, ~inside_NV).to(logp_NV.dtype)
    first_NM, second_NM = uniform_NM.chunk(2, -1)
    drawn_NM, other_NM = draw(logp_NV, first_NM)[0], draw(teacher_NV, second_NM)[0]
    replaced_NM = ~inside_NV.gather(1, drawn_NM)
    ids_NM = torch.where(replaced_NM, other_NM, drawn_NM)
    outside_N1 = logp_NV.masked_fill(inside_NV, -torch.inf).logsumexp(-1, keepdim=True)
    behavior_NV = torch.logaddexp(logp_NV.masked_fill(~inside_NV, -torch.inf), outside_N1 + teacher_NV)
    return ids_NM, behavior_NV.gather(1, ids_NM), replaced_NM


def draw(logp_NV: Tensor, uniform_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at the uniform numbers; return ids [N, M] and their log-probs."""
    cdf_NV = logp_NV.double().exp().cumsum(-1)
    if not cdf_NV[:, -1].isfinite().all():
        raise NonFiniteError("the student's logits are not finite: has training diverged? Lower learner.lr")
    ids_NM = torch.searchsorted(cdf_NV, uniform_NM * cdf_NV[:, -1:], right=True)
    return ids_NM, logp_NV.gather(1, ids_NM)
