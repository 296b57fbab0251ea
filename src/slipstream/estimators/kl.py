"""Staying near a reference policy: KL in the loss or in the reward.

Estimators are those of `divergence.kl_estimate`, with s = log-prob of the emitted token under the current policy and
t under the reference. Where the term stands decides which of them is right: tests enumerate it.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.aggregate import aggregate
from slipstream.estimators.divergence import clamped, kl_estimate, raised
from slipstream.estimators.numerics import blanked, bounded_exp, carried, floored, same_matrix
from slipstream.estimators.policy.token import vanilla
from slipstream.estimators.ratio import same_rows
from slipstream.estimators.tables.policy import Mode
from slipstream.scope import Scope

Metrics = dict[str, Tensor]
SCOPE: dict[str, Scope] = {"kl_loss": "token", "kl_reward": "token"}


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
    """KL(π‖π_ref) as a term of the loss, to be multiplied by β; metrics hold its value, `kl_loss`.

    On-policy: k2, whose gradient is that of the KL.  (Schulman 2020.) With `logp_old` [B, T], the log-probs of the
    policy that drew the tokens: r·k3, r = π/π_old (DeepSeek-V3.2, 2512.02556), whose gradient r·(log π − log π_ref) is
    that of the KL whoever drew. It needs the gradient of r, so detached weights from outside are no substitute; it is
    written out, because k3's value is clamped, and a clamped value times the gradient of r would push away from the
    reference. `kind` names another estimate: on-policy with its own gradient, with `logp_old` for its value only.
    When the reference should bind every token, whatever its advantage.
    """
    kind = kind or ("k2" if logp_old is None else "k3")
    if kind in ("k1", "kl") and logp_old is None:
        raise ValueError(f"{kind} in the loss has a gradient without the reference in it: use k2, or kl_reward")
    old = logp_BT.detach() if logp_old is None else logp_old.detach()
    same_rows(logp=logp_BT, logp_ref=logp_ref_BT, logp_old=old, mask=mask_BT)
    dtype = torch.promote_types(logp_BT.dtype, torch.float32)
    logp, ref, old = blanked(mask_BT, *(floored(each.to(dtype)) for each in (logp_BT, logp_ref_BT.detach(), old)))
    kl_BT = kl_estimate(logp, ref, kind=kind)
    if logp_old is not None:
        ratio_BT = bounded_exp(logp - old).detach()
        kl_BT = carried(ratio_BT * kl_BT, by=ratio_BT * kl_estimate(logp, ref, kind="k2"))
    loss = aggregate(kl_BT, mask_BT, agg, n_tokens=n_tokens, n_sequences=n_sequences, scale=scale)
    return loss, {"kl_loss": loss.detach()}


def kl_reward(
    rewards_BT: Tensor, logp_BT: Tensor, logp_ref_BT: Tensor, mask_BT: Tensor, *, beta: float, kind: str = "k1"
) -> tuple[Tensor, Metrics]:
    """Rewards less β times the KL estimate of each token, detached; metrics hold `kl_reward`, its mean.

    r − β·sg(k1).  (Ziegler et al., 1909.08593.) The policy gradient turns k1 into the gradient of the KL, and no other
    kind: abs, k2 and k3, as verl offers them, are never negative, so they also charge the tokens that the reference
    likes better. That is a price of leaving it in either direction, and not the gradient of the KL.
    When the advantage should see the price of drifting. Masked rewards come back as 0.
    """
    same_rows(rewards=rewards_BT, logp=logp_BT, logp_ref=logp_ref_BT, mask=mask_BT)
    dtype = torch.promote_types(torch.promote_types(logp_BT.dtype, rewards_BT.dtype), torch.float32)
    tensors = (rewards_BT.to(dtype), floored(logp_BT.detach().to(dtype)), floored(logp_ref_BT.detach().to(dtype)))
    rewards, logp, ref = blanked(mask_BT, *tensors)
    kl_BT = kl_estimate(logp, ref, kind=kind)
    return rewards - beta * kl_BT, {"kl_reward": aggregate(kl_BT, mask_BT, "token-mean")}


def kl_as_reward(
    logp_NM: Tensor,
    behavior_logp_NM: Tensor,
    logq_NM: Tensor,
    *,
    kind: str,
    clip: float | tuple[float, float] = 0.2,
    dual_clip: float = 3.0,
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO on the draws with A = −sg(kl_estimate): what verl calls policy-gradient distillation.

    The clamps are those of the estimate, not of the ratio p_θ/p_old. On-policy and with k1 its mean gradient is that of
    KL(p‖q). For one stochastic reward per token where a policy gradient is wanted anyway.
    """
    same_matrix(logp=logp_NM, behavior_logp=behavior_logp_NM, logq=logq_NM)
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    ends = (raised(x.detach(), log_prob_min_clamp=log_prob_min_clamp) for x in (logp_NM, logq_NM))
    advantage_NM = -clamped(kl_estimate(*ends, kind=kind), loss_max_clamp=loss_max_clamp)
    logp_NM, behavior_NM = floored(logp_NM), floored(behavior_logp_NM)
    loss_NM, acted_NM = vanilla(
        logp_NM, behavior_NM, advantage_NM, torch.ones_like(logp_NM), clip_low=low, clip_high=high, dual_clip=dual_clip
    )
    ratio_NM = bounded_exp(logp_NM - behavior_NM).detach()
    found = {"ratio": ratio_NM, "advantage": advantage_NM, "clip_fraction": acted_NM.to(ratio_NM.dtype)}
    means = {name: x_NM.mean(-1) for name, x_NM in found.items()}
    return loss_NM.mean(-1), means | {"ratio_max": ratio_NM.amax(-1)}
