"""Divergences between student and teacher at each position, computed from a cache of teacher scores.

Each function returns one loss per position (token scope), differentiable in `logp`. p is the student (`logp`), q the
teacher (`logq`). Log-probs are floored at −1e4 on entry.

Shapes: N positions, K support, V vocabulary.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from slipstream.estimators.numerics import RATIO_BOUND, bounded, floored, same_matrix, same_shape, with_gradient
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.policy import Estimate

DenseKind = Literal["forward", "reverse", "jsd"]
KL_KINDS = get_args(Estimate)
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(logp: Tensor, logq: Tensor, *, kind: str) -> Tensor:
    """Estimate the reverse KL from one drawn token (Schulman 2020, "Approximating KL Divergence"; kinds as in verl).

    k1 log p − log q; abs |k1|; k2 ½k1²; k3 e^u − u − 1 with u = −k1 clamped to ±20 and the value to ±10, gradient 1 −
    e^u (at these clamps verl's gradient is 0). k1+ and k3+ have the value of k1 and k3 and the gradient of k2. kl, mse
    and low_var_kl are k1, k2 and k3.
    For tokens drawn from p the mean of k1 and of k3 is KL(p‖q). The mean gradient is that of KL(p‖q) for k2, k1+ and
    k3+, that of KL(q‖p) for k3, and 0 for k1. Stale draws bias all of them; `mc_reverse_kl` corrects this bias.
    Use k1+ or k3+ as a loss on the emitted token, and k1 as an advantage.
    """
    same_shape(logp=logp, logq=logq)
    logp, logq = floored(logp), floored(logq)
    kind = KL_ALIASES.get(kind, kind)
    match kind:
        case "k1":
            return logp - logq
        case "abs":
            return (logp - logq).abs()
        case "k2":
            return 0.5 * (logp - logq) ** 2
        case "k3":
            u = bounded(logq - logp, -RATIO_BOUND, RATIO_BOUND)
            return bounded(torch.expm1(u) - u, -10, 10)
        case "k1+" | "k3+":
            return with_gradient(kl_estimate(logp, logq, kind=kind[:-1]), by=kl_estimate(logp, logq, kind="k2"))
    raise unknown("KL estimate", kind, [*KL_KINDS, *KL_ALIASES])


def cross_entropy(logp_NM: Tensor) -> Tensor:
    """Return −log p of given tokens, the loss of supervised fine-tuning.

    Its minimum is the distribution of the data. In expectation over tokens of a teacher q its gradient is that of
    KL(q‖p).
    Unit: given token.
    Importance: not needed: the student drew no token.
    Against: a student whose own rollouts teach it nothing.
    Cost: none: no teacher scores.
    Use this loss to warm up a student that is too far from its teacher to learn from its own rollouts.
    """
    return -floored(logp_NM)


def clamped(loss: Tensor, *, loss_max_clamp: float | None = None) -> Tensor:
    """Return the losses clamped to ±loss_max_clamp as in verl, without gradient at the clamp. None changes nothing."""
    return loss if loss_max_clamp is None else loss.clamp(-loss_max_clamp, loss_max_clamp)


def raised(logp: Tensor, *, log_prob_min_clamp: float | None = None, absent: bool = False) -> Tensor:
    """Return log-probs of at least log_prob_min_clamp, as in verl; None does nothing.

    With `absent`, −∞ means that there is no such token, and stays.
    """
    if log_prob_min_clamp is None:
        return logp
    least = logp.clamp(min=log_prob_min_clamp)
    return torch.where(logp == -torch.inf, logp, least) if absent else least


def forward_kl_topk(logp_NK: Tensor, logq_NK: Tensor, *, tail: bool = False, renormalise: bool = False) -> Tensor:
    """Return KL(q‖p) on the teacher's top-k: Σ_S q (log q − log p) (Agarwal et al., 2306.13649; truncated as in verl).

    Without options there is a gradient at p = q (−Σ_S q ∇log p), which pushes mass into the support. `tail` adds the
    remaining mass of both models as one more bucket. `renormalise` conditions both on the support. Either option makes
    student = teacher a stationary point.
    Unit: support.
    Importance: not needed: weighted by the teacher.
    Against: stale supports; modes of the teacher that the student misses.
    Cost: 8·k bytes per position.
    Use this loss for stale rollouts: the teacher's probabilities q do not depend on the sampling policy.
    """
    same_matrix(logp=logp_NK, logq=logq_NK)
    logp_NK, logq_NK = (_completed(x, tail=tail, renormalise=renormalise) for x in (logp_NK, logq_NK))
    return _kl(logq_NK, logp_NK)


def reverse_kl_topk(
    logp_NK: Tensor,
    logq_NK: Tensor,
    behavior_logp: Tensor | None = None,
    *,
    tail: bool = False,
    renormalise: bool = True,
    detach_mass: bool = False,
) -> Tensor:
    """Return KL(p‖q) on the student's top-k: Σ_S p̃ (log p̃ − log q̃) (AsyncOPD, 2606.24143, Eq. 10; "+RW" there).

    p̃ and q̃ are conditioned on S (`renormalise`), or completed by a bucket with the remaining mass (`tail`, which
    needs renormalise=False). If neither is set, p = q is no stationary point: the gradient contains that of the mass,
    ∇Σ_S p. `detach_mass` leaves it out, by the idea of 2605.11182, whose text was not at hand. With `behavior_logp`
    [N, K] the result is the "plain" form without reweighting, −Σ_S sg(p̃_old Ã) log p̃ with Ã = log q̃ − log p̃. Its
    gradient is the same on-policy and biased on stale rollouts.
    Unit: support.
    Importance: reweighted on the support; tokens outside are ignored (reweight = false: none).
    Against: variance of sampling.
    Cost: 12·k bytes per position.
    Use this loss for fresh rollouts: it has low variance. On stale rollouts S misses tokens that only the current
    student likes, and weights on S cannot replace teacher scores of these tokens; use `mc_reverse_kl`.
    """
    same_matrix(logp=logp_NK, logq=logq_NK, behavior_logp=logp_NK if behavior_logp is None else behavior_logp)
    logp_NK, logq_NK = (_completed(x, tail=tail, renormalise=renormalise) for x in (logp_NK, logq_NK))
    if behavior_logp is None:
        mass_N = logp_NK.exp().sum(-1) if detach_mass else torch.zeros_like(logp_NK[:, 0])
        return _kl(logp_NK, logq_NK) - (mass_N - mass_N.detach())
    old_NK = _completed(behavior_logp, tail=tail, renormalise=renormalise)
    return -((old_NK.exp() * (logq_NK - logp_NK)).detach() * logp_NK).sum(-1)


def generalised_kl_topk(logp_NK: Tensor, logq_NK: Tensor) -> Tensor:
    """Return the generalised KL on the teacher's top-k: Σ_S p (log p − log q) − p + q (MOPD, 2606.30406, Eq. 5).

    Probabilities are not scaled to sum to 1. Each id has a term of at least 0, which is 0 only at p = q. The gradient
    Σ_S p (log p − log q) ∇log p thus vanishes if both models agree on S, unlike that of the truncated reverse KL.
    Unit: support.
    Importance: not needed: the teacher chooses the support.
    Against: the truncated reverse KL, which moves the student's mass out of the support.
    Cost: 8·k bytes per position.
    Use this loss for reverse KL with a teacher that gives its top-k only, such as an endpoint.
    """
    same_matrix(logp=logp_NK, logq=logq_NK)
    logp_NK, logq_NK = floored(logp_NK), floored(logq_NK)
    return _kl(logp_NK, logq_NK) + (logq_NK.exp() - logp_NK.exp()).sum(-1)


def entropy_gated(
    logp_NX: Tensor, logq_NX: Tensor, *, threshold: float, forward: float, tail: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return KL(p‖q) + forward·1[H(q) > threshold]·KL(q‖p): forward KL where the teacher is unsure (EOPD, 2603.07079).

    H(q) is the teacher's entropy in nats. X is the vocabulary, or with `tail` the teacher's top-k, to which the mass of
    all other tokens is added as one more bucket. The entropy is then a lower bound. The metric is the share of
    positions with forward KL. Departure: the reverse KL is a sum over the support; the paper has a clipped surrogate on
    the emitted token.
    Unit: vocabulary, or support and tail.
    Importance: not needed.
    Against: a student that loses the teacher's variety at its unsure tokens.
    Cost: as reverse_kl, or forward_kl.
    Use this loss if the student's entropy falls below that of the teacher, and answers lose their variety.
    """
    same_matrix(logp=logp_NX, logq=logq_NX)
    logp_NX, logq_NX = (with_tail(x) if tail else floored(x) for x in (logp_NX, logq_NX))
    unsure_N = (-(logq_NX.exp() * logq_NX).sum(-1) > threshold).to(logp_NX.dtype).detach()
    loss_N = _kl(logp_NX, logq_NX) + forward * unsure_N * _kl(logq_NX, logp_NX)
    return loss_N, {"unsure": unsure_N}


def dense(logp_NV: Tensor, logq_NV: Tensor, *, kind: DenseKind, beta: float = 0.5) -> Tensor:
    """Return the exact reverse KL(p‖q) over the vocabulary; by `kind`, the forward KL(q‖p) or the generalised JSD.

    jsd (Agarwal et al., 2306.13649): β·KL(q‖m) + (1−β)·KL(p‖m) with m = βq + (1−β)p; β = 0 is forward, β = 1 reverse.
    Unit: vocabulary.
    Importance: not needed: exact at every visited prefix.
    Against: support mismatch and variance.
    Cost: 2·D bytes per position, and the teacher's head at the learner.
    Use this loss with caches of the whole distribution (hidden), or with a top-k completed by `with_tail`. The result
    is exact for tokens of any sampling policy.
    """
    same_matrix(logp=logp_NV, logq=logq_NV)
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
                raise ValueError(f"beta must be in [0, 1], got {beta}")
            weights = torch.tensor([beta, 1 - beta], dtype=logp_NV.dtype, device=logp_NV.device).log()
            logm_NV = torch.logaddexp(logq_NV + weights[0], logp_NV + weights[1])
            return beta * _kl(logq_NV, logm_NV) + (1 - beta) * _kl(logp_NV, logm_NV)
    raise unknown("kind of divergence", kind, get_args(DenseKind))


def jsd_topk(logp_NK: Tensor, logq_NK: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return the generalised JSD on the teacher's top-k, with the remaining mass of both models as one more bucket.

    Unit: vocabulary, or support and tail.
    Importance: not needed.
    Against: forward KL is too broad, reverse KL too narrow.
    Cost: as reverse_kl, or forward_kl.
    Use this loss if student and teacher differ so much that one direction alone is unstable.
    """
    same_matrix(logp=logp_NK, logq=logq_NK)
    return dense(with_tail(logp_NK), with_tail(logq_NK), kind="jsd", beta=beta)


def ranked(logp_NV: Tensor, logq_NW: Tensor) -> Tensor:
    """Return ULD (Boizard et al., 2402.12030): Σ |p₍ᵢ₎ − q₍ᵢ₎| of the probabilities in descending order.

    The vocabularies may differ in size and order: only the sizes of the probabilities are compared, and the smaller
    vocabulary is filled up with zeros.
    Unit: vocabulary, by rank.
    Importance: not needed.
    Against: another tokenizer.
    Cost: as reverse_kl, and a sort of both distributions.
    Use this loss if student and teacher share hardly any token. It does not say which tokens are likely.
    """
    return _distance_by_rank(floored(logp_NV).exp(), logq_NW.exp())


def shared_and_ranked(logp_NV: Tensor, logq_NX: Tensor, *, beta: float = 0.5, rest: float = 1.0) -> Tensor:
    """Return GOLD's sum: a JSD on the tokens that both vocabularies share, and ULD with weight `rest` on all others.

    Column v of `logq_NX` is the student's token v, −∞ if the teacher has no such token. Columns beyond V are tokens of
    the teacher alone. The JSD is β·Σ q log(q/m) + (1−β)·Σ p log(p/m) with m = βq + (1−β)p, over the shared tokens,
    whose probabilities are not scaled to a sum of 1.
    Unit: vocabulary: shared tokens exactly, others by rank.
    Importance: not needed.
    Against: another tokenizer.
    Cost: as reverse_kl, and a sort of both distributions.
    Use this loss with a teacher that has another tokenizer and shares many of the student's tokens. gold leaves out
    spans of several tokens. gold_merged multiplies both distributions at the first token of a span by the
    probabilities of its later tokens, as TRL's GOLD does. Departure: recorded ones, which have no gradient.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, got {beta}")
    logp_NV, vocabulary = floored(logp_NV), logp_NV.shape[1]
    own_NV = logq_NX[:, :vocabulary]
    shared_NV = own_NV > -torch.inf
    p_NV, q_NV, logq_NV = logp_NV.exp(), own_NV.exp(), own_NV.masked_fill(~shared_NV, 0.0)
    logm_NV = (beta * q_NV + (1 - beta) * p_NV).clamp(min=torch.finfo(p_NV.dtype).tiny).log()
    each_NV = beta * q_NV * (logq_NV - logm_NV) + (1 - beta) * p_NV * (logp_NV - logm_NV)
    exact_N = each_NV.masked_fill(~shared_NV, 0.0).sum(-1)
    return exact_N + rest * _distance_by_rank(p_NV.masked_fill(shared_NV, 0.0), logq_NX[:, vocabulary:].exp())


def common_topk(logp_NV: Tensor, logq_NX: Tensor, *, k: int, beta: float = 0.0) -> Tensor:
    """Return the generalised JSD on the teacher's k most likely shared tokens, all other mass as one more bucket.

    The columns of `logq_NX` are those of `shared_and_ranked`. β = 0 is the forward KL, β = 1 the reverse KL. If fewer
    than k tokens are shared, all of these are compared. The columns may also be k tokens alone, with −∞ for tokens that
    only the teacher has.
    Unit: shared support and tail.
    Importance: not needed.
    Against: another tokenizer.
    Cost: as reverse_kl, or forward_kl.
    Use this loss with a teacher that has another tokenizer and shares most of its likely tokens with the student.
    """
    own_NV = logq_NX[:, : logp_NV.shape[1]]
    logq_NK, ids_NK = own_NV.topk(min(k, own_NV.shape[1]), -1)
    logp_NK = logp_NV.gather(1, ids_NK).masked_fill(logq_NK == -torch.inf, -torch.inf)
    return jsd_topk(logp_NK, logq_NK, beta=beta)


def _distance_by_rank(p_NV: Tensor, q_NW: Tensor) -> Tensor:
    width = max(p_NV.shape[1], q_NW.shape[1])
    p_NX, q_NX = (
        torch.nn.functional.pad(x, (0, width - x.shape[1])).sort(descending=True).values for x in (p_NV, q_NW)
    )
    return (p_NX - q_NX).abs().sum(-1)


def with_tail(logp_NK: Tensor) -> Tensor:
    """Return the log-probs with one more column: the log of the mass outside the support.

    The mass is at least the smallest normal number. A mass at this bound has no gradient, because it is only a rounding
    error.
    """
    logp_NK = floored(logp_NK)
    rest_N = (1 - logp_NK.exp().sum(-1)).clamp(min=torch.finfo(logp_NK.dtype).tiny)
    return torch.cat([logp_NK, rest_N.log()[:, None]], -1)


# --- metrics of the support, without gradient -------------------------------------------------------------------------


def support_mass(logp_NK: Tensor, logq_NK: Tensor) -> dict[str, Tensor]:
    """Return the probability mass of student and teacher on the support, per position.

    Low masses mean that k is too small. Pass log-probs that are not clamped. Each mass is returned under three
    names, for the mean, `…_min` and `…_max`, because metrics are merged by name.
    """
    same_matrix(logp=logp_NK, logq=logq_NK)
    masses = {"student_mass": logp_NK.detach().exp().sum(-1), "teacher_mass": logq_NK.detach().exp().sum(-1)}
    return {name + suffix: mass_N for name, mass_N in masses.items() for suffix in ("", "_min", "_max")}


def overlap_ratio(student_ids_NK: Tensor, teacher_ids_NK: Tensor) -> Tensor:
    """Return |TopK_q ∩ TopK_p| / k per position: the share of the top-k ids that student and teacher have in common."""
    return _shared(student_ids_NK, teacher_ids_NK).float().mean(-1)


def overlap_token_advantage(
    student_ids_NK: Tensor, teacher_ids_NK: Tensor, logp_NK: Tensor, logq_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean of −q (log q − log p) over ids in both top-k sets, and a mask of positions with such ids.

    p is the student, q the teacher; log-probs are at the teacher's ids. At positions without shared ids the mean is 0;
    verl leaves these positions out.
    """
    same_shape(teacher_ids=teacher_ids_NK, logp=logp_NK, logq=logq_NK)
    shared_NK = _shared(student_ids_NK, teacher_ids_NK)
    logp_NK, logq_NK = floored(logp_NK.detach()), floored(logq_NK.detach())
    advantage_NK = (logq_NK.exp() * (logp_NK - logq_NK)).masked_fill(~shared_NK, 0.0)
    return advantage_NK.sum(-1) / shared_NK.sum(-1).clamp(min=1), shared_NK.any(-1)


def _shared(student_ids_NK: Tensor, teacher_ids_NK: Tensor) -> Tensor:
    """Return a mask of the teacher's ids that are also in the student's top-k. The padding id −1 is never shared."""
    same_shape(student_ids=student_ids_NK, teacher_ids=teacher_ids_NK)
    return (teacher_ids_NK[:, :, None] == student_ids_NK[:, None, :]).any(-1) & (teacher_ids_NK >= 0)


def _kl(loga: Tensor, logb: Tensor) -> Tensor:
    return (loga.exp() * (loga - logb)).sum(-1)


def _completed(logp_NK: Tensor, *, tail: bool, renormalise: bool) -> Tensor:
    if tail and renormalise:
        raise ValueError("tail and renormalise exclude each other: keep one of them")
    if renormalise:
        return floored(logp_NK).log_softmax(-1)
    return with_tail(logp_NK) if tail else floored(logp_NK)
