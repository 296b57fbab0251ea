"""KL to a reference policy, as a term of the loss or of the reward.

The estimates are those of `divergence.kl_estimate`. π is the current policy, π_ref the reference, sg
stop-gradient. The right estimate depends on where the term is used; tests check every combination.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.aggregate import aggregate
from slipstream.estimators.divergence import clamped, kl_estimate, raised
from slipstream.estimators.numerics import bounded_exp, floored, same_matrix, with_gradient, zeroed
from slipstream.estimators.options import only
from slipstream.estimators.policy.token import Tokens
from slipstream.estimators.ratio import same_rows
from slipstream.estimators.surrogate import Clip, clip_bounds
from slipstream.estimators.tables.policy import Mode, find_loss

Metrics = dict[str, Tensor]


def kl_loss(
    logp_BT: Tensor,
    logp_ref_BT: Tensor,
    mask_BT: Tensor,
    *,
    logp_old: Tensor | None = None,
    kind: str | None = None,
    agg: Mode = "token-mean",
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Return KL(π‖π_ref) as a term of the loss, to be multiplied by β, and its value as metric `kl_loss`.

    On-policy: k2, whose gradient is that of the KL (Schulman 2020).
    With `logp_old` [B, T], the log-probs of the policy that drew the tokens: r·k3, r = π/π_old (DeepSeek-V3.2,
    2512.02556). The gradient r·(log π − log π_ref) is that of the KL for every sampling policy. It contains the
    gradient of r, so detached importance weights cannot replace it. The gradient is written out, because k3's value is
    clamped. A clamped value times the gradient of r would push away from the reference.
    `kind` selects another estimate. On-policy it has its own gradient; with `logp_old` only its value is used.
    Use this term if the reference should limit every token, whatever its advantage.
    """
    kind = kind or ("k2" if logp_old is None else "k3")
    if kind in ("k1", "kl") and logp_old is None:
        raise ValueError(f"{kind} in the loss has a gradient without the reference in it: use k2, or kl_reward")
    old = logp_BT.detach() if logp_old is None else logp_old.detach()
    same_rows(logp=logp_BT, logp_ref=logp_ref_BT, logp_old=old, mask=mask_BT)
    dtype = torch.promote_types(logp_BT.dtype, torch.float32)
    logp, ref, old = zeroed(mask_BT, *(floored(each.to(dtype)) for each in (logp_BT, logp_ref_BT.detach(), old)))
    kl_BT = kl_estimate(logp, ref, kind=kind)
    if logp_old is not None:
        ratio_BT = bounded_exp(logp - old).detach()
        kl_BT = with_gradient(ratio_BT * kl_BT, by=ratio_BT * kl_estimate(logp, ref, kind="k2"))
    loss = aggregate(kl_BT, mask_BT, agg, n_tokens=n_tokens, n_sequences=n_sequences, scale=scale)
    return loss, {"kl_loss": loss.detach()}


def kl_reward(
    rewards_BT: Tensor, logp_BT: Tensor, logp_ref_BT: Tensor, mask_BT: Tensor, *, beta: float, kind: str = "k1"
) -> tuple[Tensor, Metrics]:
    """Return rewards minus β times the detached KL estimate of each token, and its mean as metric `kl_reward`.

    r − β·sg(k1) (Ziegler et al., 1909.08593). The policy gradient turns k1 into the gradient of the KL. Other kinds do
    not have this property. abs, k2 and k3, which verl offers, are never negative, so they also penalise tokens that the
    reference prefers. They penalise any distance from the reference.
    Use this term if advantages should contain the price of drift. Masked rewards are returned as 0.
    """
    same_rows(rewards=rewards_BT, logp=logp_BT, logp_ref=logp_ref_BT, mask=mask_BT)
    dtype = torch.promote_types(torch.promote_types(logp_BT.dtype, rewards_BT.dtype), torch.float32)
    tensors = (rewards_BT.to(dtype), floored(logp_BT.detach().to(dtype)), floored(logp_ref_BT.detach().to(dtype)))
    rewards, logp, ref = zeroed(mask_BT, *tensors)
    kl_BT = kl_estimate(logp, ref, kind=kind)
    return rewards - beta * kl_BT, {"kl_reward": aggregate(kl_BT, mask_BT, "token-mean")}


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
    ratio_NM = tokens.ratio.detach()
    found = {"ratio": ratio_NM, "advantage": advantage_NM, "clip_fraction": acted_NM.to(ratio_NM.dtype)}
    means = {name: x_NM.mean(-1) for name, x_NM in found.items()}
    return loss_NM.mean(-1), means | {"ratio_max": ratio_NM.amax(-1)}
