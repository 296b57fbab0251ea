"""Reverse KL on draws of the behaviour policy. Use the gradients of these losses; the values have no meaning.

Draws are tokens sampled at one position. p_θ is the student, p_old the behaviour policy, q the teacher. Log-probs are
floored at −1e4 and log-ratios clamped to ±20 before exp; gradients pass these bounds. Metrics have one detached value
per position, except `ratio_p99`: the ratios [N, M], of which the caller computes the percentile. Token scope, except
`m2po_mask`, which needs the batch.

Shapes: N positions, M cached draws.
"""

import torch
from torch import Tensor

from slipstream.estimators.divergence import clamped, kl_estimate, raised
from slipstream.estimators.numerics import RATIO_BOUND, bounded_exp, floored, same_matrix, same_shape, zeroed
from slipstream.estimators.options import only, unknown
from slipstream.estimators.policy.token import Tokens, clipped_surrogate, self_ratio
from slipstream.estimators.tables.policy import find_loss

Clip = float | tuple[float, float]
Metrics = dict[str, Tensor]


def mc_reverse_kl(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    logq_NM: Tensor,
    reference_logp_NM: Tensor | None = None,
    *,
    advantage: str = "current",
    clip: Clip | None = None,
    importance: bool = True,
    ratio_cap: float | None = None,
    baseline: bool = False,
    reward_scale: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Estimate the reverse KL from several draws a_i ~ p_old: −1/M Σ ρ_i sg(A_i) (AsyncOPD, 2606.24143).

    ρ = p_θ/p_old. A = log q − log p_θ recomputed under the current student (`advantage="current"`), or log q − log
    p_old (`"behavior"`).
    `current` without clip, the default, has the expected gradient of the dense reverse KL for every sampling policy.
    This gradient vanishes if student = teacher. `behavior` has these properties only on-policy.
    `clip` = ε or (low, high) is the PPO minimum. `ratio_cap` = c uses the weight sg(min(ρ, c)), so that capped draws
    keep a gradient. `importance=False` drops ρ; this is biased on stale draws and only for ablations.
    `baseline` subtracts from A_i the mean of the other draws' A_j at its position. A draw is not part of its own
    baseline and E ρ ∇log p_θ = 0, so the expected gradient stays. It has less noise where (E A)² is larger than
    Var(A)/(M − 1), so far from the teacher and with many draws, and more elsewhere. With `ratio_cap` it removes what
    score centering does (`centring.centre_of_draws`, here for all draws).
    With reference log-probs, λ log q + (1 − λ) log p_ref replaces log q, where λ = `reward_scale` (G-OPD, 2602.12125).
    The target is then proportional to q (q/p_ref)^(λ−1); λ > 1 goes beyond the teacher (ExOPD).
    `config.losses.ReverseKLMC` refuses combinations of these options that contradict each other.
    Unit: draw.
    Trust region: none; clip or ratio_cap if set.
    Importance: token ratio to the sampling policy, advantage recomputed: unbiased at any staleness.
    Against: stale draws.
    Cost: 12·M bytes per position; variance 1/M.
    Use this loss by default, for every schedule; raise m if the gradient is noisy. reward_scale > 1 goes beyond the
    teacher (ExOPD, 2602.12125, with the student at the start as reference).
    """
    same_matrix(logp=logp_NM, behavior_logp=behavior_logp_NM, logq=logq_NM)
    logp_NM, behavior_NM, logq_NM = floored(logp_NM), floored(behavior_logp_NM), floored(logq_NM)
    if reference_logp_NM is not None:
        same_matrix(logp=logp_NM, reference_logp=reference_logp_NM)
        logq_NM = reward_scale * logq_NM + (1 - reward_scale) * floored(reference_logp_NM)
    ratio_NM = bounded_exp(logp_NM - behavior_NM)
    advantage_NM = _advantage(advantage, logq_NM, current=logp_NM, behavior=behavior_NM)
    bounded_NM = torch.zeros_like(ratio_NM, dtype=torch.bool)
    if clip is not None:
        loss_NM, bounded_NM = clipped_surrogate(ratio_NM, advantage_NM, *clip_bounds(clip))
        return loss_NM.mean(-1), _metrics(ratio_NM, advantage_NM, clip_fraction=bounded_NM)
    weight_NM = ratio_NM if importance else logp_NM
    if ratio_cap is not None:
        bounded_NM = ratio_NM > ratio_cap
        weight_NM = ratio_NM.detach().clamp(max=ratio_cap) * self_ratio(logp_NM)
    loss_NM = -weight_NM * advantage_NM
    if baseline:
        others_NM = (advantage_NM.sum(-1, keepdim=True) - advantage_NM) / (advantage_NM.shape[-1] - 1)
        loss_NM = loss_NM + (weight_NM - weight_NM.detach()) * others_NM  # in the gradient alone
    return loss_NM.mean(-1), _metrics(ratio_NM, advantage_NM, clip_fraction=bounded_NM)


def decoupled_ppo(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    proximal_logp_NM: Tensor,
    logq_NM: Tensor,
    *,
    advantage: str = "behavior",
    clip: Clip = 0.2,
    weight_cap: float = 5.0,
) -> tuple[Tensor, Metrics]:
    """Apply PPO around a proximal policy, weighted by p_prox/p_old: −1/M Σ sg(w) min(rA, clip(r)A) (AReaL, 2505.24298).

    p_prox is the learner when the batch arrived. r = p_θ/p_prox has the gradient and the clip. w = p_prox/p_old
    corrects for staleness and is 0 above `weight_cap`. A = log q − log p_old (`advantage="behavior"`, PPO's
    convention), − log p_prox (`"proximal"`) or − sg(log p_θ) (`"current"`). Only `current` has the mean gradient of the
    dense reverse KL, while neither bound acts.
    Unit: draw.
    Trust region: PPO clip around the learner when the batch arrived.
    Importance: proximal/behaviour ratio, 0 above weight_cap.
    Against: a clip that measures staleness instead of the step.
    Cost: as reverse_kl_mc, plus one forward pass for the proximal log-probs.
    Use this loss for several optimizer steps on one batch: the clip then measures the step and not the staleness.
    """
    same_matrix(logp=logp_NM, behavior_logp=behavior_logp_NM, proximal_logp=proximal_logp_NM, logq=logq_NM)
    logp_NM, logq_NM = floored(logp_NM), floored(logq_NM)
    behavior_NM, proximal_NM = floored(behavior_logp_NM), floored(proximal_logp_NM)
    ratio_NM = bounded_exp(logp_NM - proximal_NM)
    weight_NM = bounded_exp(proximal_NM - behavior_NM).detach()
    dropped_NM = weight_NM > weight_cap
    weight_NM = weight_NM.masked_fill(dropped_NM, 0.0)
    advantage_NM = _advantage(advantage, logq_NM, behavior=behavior_NM, proximal=proximal_NM, current=logp_NM)
    loss_NM, clipped_NM = clipped_surrogate(ratio_NM, advantage_NM, *clip_bounds(clip))
    metrics = _metrics(ratio_NM, advantage_NM, clip_fraction=clipped_NM, weight=weight_NM, dropped_fraction=dropped_NM)
    return (weight_NM * loss_NM).mean(-1), metrics


def kept_reverse_kl(
    logp_NM: Tensor, behavior_logp_NM: Tensor, logq_NM: Tensor, keep_NM: Tensor
) -> tuple[Tensor, Metrics]:
    """Apply `mc_reverse_kl` to the draws that `m2po_mask` keeps: −1/M Σ keep·ρ sg(A) (M2PO, 2510.01161).

    Removed draws have loss 0 and still count in the mean over draws.
    Unit: draw.
    Trust region: bound on the batch mean of (log ρ)², by masking harmful draws.
    Importance: token ratio of the kept draws.
    Against: extreme ratios ρ.
    Cost: as reverse_kl_mc, plus one pass over the batch without gradient.
    Use this loss for stale data with a few extreme ratios.
    """
    return mc_reverse_kl(*zeroed(keep_NM, logp_NM, behavior_logp_NM, logq_NM))


def m2po_mask(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    logq_NM: Tensor,
    *,
    mask: Tensor | None = None,
    budget: float = 0.04,
) -> tuple[Tensor, Metrics]:
    """Return a mask [N, M] of the draws in the whole batch that `kept_reverse_kl` keeps, and metrics; no gradient.

    Batch scope. `mask` [N] or [N, M] marks the draws that count. Metrics are those of `second_moment_mask`.
    """
    same_matrix(logp=logp_NM, behavior_logp=behavior_logp_NM, logq=logq_NM)
    if mask is None:
        mask = torch.ones_like(logp_NM)
    if mask.shape not in (logp_NM.shape, logp_NM.shape[:1]):
        raise ValueError(f"mask {tuple(mask.shape)} must be [N] or [N, M], with logp {tuple(logp_NM.shape)}")
    valid_NM = (mask if mask.ndim == 2 else mask[:, None]).ne(0).expand_as(logp_NM)
    logp_NM, behavior_NM, logq_NM = (floored(x.detach()) for x in zeroed(valid_NM, logp_NM, behavior_logp_NM, logq_NM))
    log_ratio_NM = (logp_NM - behavior_NM).clamp(-RATIO_BOUND, RATIO_BOUND)
    return second_moment_mask(log_ratio_NM, logq_NM - logp_NM, valid_NM, budget=budget)


def second_moment_mask(log_ratio: Tensor, advantage: Tensor, valid: Tensor, *, budget: float) -> tuple[Tensor, Metrics]:
    """Remove harmful tokens, largest (log ρ)² first, until the mean over the kept tokens is within the budget (M2PO).

    Harmful means that the update moves the ratio further from 1 (A > 0 and ρ > 1, or A < 0 and ρ < 1). Equal values are
    removed together, so the order of the batch has no effect. If the budget cannot be met, all harmful tokens are
    removed and `budget_missed` is 1. Any shape; metrics are of the whole batch (scalars).
    """
    same_shape(log_ratio=log_ratio, advantage=advantage, valid=valid)
    square = log_ratio.masked_fill(~valid, 0.0).double().square()
    harmful = valid & (advantage.sign() * log_ratio > 0)
    harmless = valid & ~harmful
    ascending = square[harmful].sort().values
    # entry i: sum over the harmless tokens and the i smallest harmful tokens
    sums = square[harmless].sum() + torch.cat([ascending.new_zeros(1), ascending.cumsum(0)])
    counts = harmless.sum() + torch.arange(len(sums), device=sums.device)
    met = (sums / counts.clamp(min=1) <= budget).nonzero()
    stay = int(met[-1]) if len(met) else 0
    keep = valid if stay == len(ascending) else harmless | (harmful & (square < ascending[stay]))
    metrics = {
        "second_moment_before": _mean(square, valid),
        "second_moment": _mean(square, keep),
        "masked_fraction": _mean((~keep).double(), valid),
        "budget_missed": torch.as_tensor(float(not len(met)), device=square.device),
    }
    return keep, metrics


def kl_as_reward(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    logq_NM: Tensor,
    *,
    kind: str,
    policy: str = "vanilla",
    clip: Clip = 0.2,
    dual_clip: float = 3.0,
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Apply PPO to the draws with A = −sg(kl_estimate), which verl calls policy-gradient distillation.

    `policy` is a policy loss of token scope: vanilla is PPO's, others have no clip or another one. The clamps apply to
    the estimate and not to the ratio p_θ/p_old. On-policy with k1 the mean gradient is that of KL(p‖q).
    Use this loss if one stochastic reward per token and a policy gradient are wanted.
    """
    same_matrix(logp=logp_NM, behavior_logp=behavior_logp_NM, logq=logq_NM)
    ends = (raised(x.detach(), log_prob_min_clamp=log_prob_min_clamp) for x in (logp_NM, logq_NM))
    advantage_NM = -clamped(kl_estimate(*ends, kind=kind), loss_max_clamp=loss_max_clamp)
    logp_NM, behavior_NM = floored(logp_NM), floored(behavior_logp_NM)
    tokens = Tokens(logp_NM, behavior_NM, advantage_NM, torch.ones_like(logp_NM, dtype=torch.bool))
    low, high = clip_bounds(clip)
    loss = find_loss(policy).loss
    loss_NM, acted_NM = loss(tokens, **only({"clip_low": low, "clip_high": high, "dual_clip": dual_clip}, loss))
    return loss_NM.mean(-1), _metrics(tokens.ratio, advantage_NM, clip_fraction=acted_NM)


def clip_bounds(clip: Clip) -> tuple[float, float]:
    return clip if isinstance(clip, tuple) else (clip, clip)


def _advantage(name: str, logq_NM: Tensor, **policies: Tensor) -> Tensor:
    if name not in policies:
        raise unknown("advantage", name, policies)
    return (logq_NM - policies[name]).detach()


def _metrics(ratio_NM: Tensor, advantage_NM: Tensor, **more_NM: Tensor) -> Metrics:
    ratio_NM = ratio_NM.detach()
    means = {"ratio": ratio_NM, "advantage": advantage_NM, **more_NM}
    of_rows = {name: x_NM.to(ratio_NM.dtype).mean(-1) for name, x_NM in means.items()}
    return of_rows | {"ratio_max": ratio_NM.amax(-1), "ratio_p99": ratio_NM}


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return values[where].sum() / where.sum().clamp(min=1)
