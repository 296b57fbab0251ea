"""Auxiliary terms: KL to a reference policy in the loss or in the reward, and the balance of experts.

The estimates of the KL are those of `divergence.kl_estimate`. π is the current policy, π_ref the reference, sg
stop-gradient. The right estimate depends on where the term is used; tests check every combination.

Shapes: B rows, T positions, N tokens, E experts, X of which a router chooses for a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.divergence import kl_estimate
from slipstream.estimators.numerics import (
    aggregate,
    bounded_exp,
    floored,
    same_rows,
    same_shape,
    with_gradient,
    zeroed,
)
from slipstream.estimators.tables.policy import Mode

Metrics = dict[str, Tensor]


def kl_loss(
    logp_BT: Tensor,
    logp_ref_BT: Tensor,
    mask_BT: Tensor,
    *,
    logp_old: Tensor | None = None,
    weights: Tensor | None = None,
    kind: str | None = None,
    agg: Mode = "token-mean",
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
    sequence_tokens: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return KL(π‖π_ref) as a term of the loss, to be multiplied by β, and its mean over tokens as metric `kl_loss`.

    On-policy: k2, whose gradient is that of the KL (Schulman 2020).
    With `logp_old` [B, T], the log-probs of the policy that drew the tokens: r·k3, r = π/π_old (DeepSeek-V3.2,
    2512.02556). The gradient r·(log π − log π_ref) is that of the KL for every sampling policy. It contains the
    gradient of r, so detached importance weights cannot replace it. The gradient is written out, because k3's value is
    clamped. A clamped value times the gradient of r would push away from the reference.
    `kind` selects another estimate. On-policy it has its own gradient; with `logp_old` only its value is used.
    `weights` [B, T] are importance weights of samples that were drawn by priority (PER, 1511.05952). They multiply the
    term, and not the metric.
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
    mean = aggregate(kl_BT.detach(), mask_BT, "token-mean", n_tokens=n_tokens)
    if weights is not None:
        same_shape(logp=logp_BT, weights=weights)
        kl_BT = kl_BT * weights.detach()
    counts: Any = {"n_tokens": n_tokens, "n_sequences": n_sequences, "scale": scale, "sequence_tokens": sequence_tokens}
    return aggregate(kl_BT, mask_BT, agg, **counts), {"kl_loss": mean}


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


def balance_loss(logits_NE: Sequence[Tensor], share_E: Tensor, *, n_tokens: float) -> Tensor:
    """Return E · Σ_e f_e P_e, which spreads tokens over experts (Switch Transformers, 2101.03961, equations 4 to 6).

    f_e is `share_E`, and P_e the mean of the softmax over n_tokens tokens and all routers. As in transformers, several
    experts may be chosen for each token, and layers are pooled. Here the loss covers the trained tokens, and the shares
    are those of the whole update, so that micro-batches and ranks change nothing.
    `logits_NE` has one tensor for each router. `share_E` is the number of choices of an expert, divided by the number
    of tokens and routers; it has no gradient. If all experts are alike, the loss is X.
    """
    p_E = torch.stack([logits.float().softmax(-1).sum(0) for logits in logits_NE]).sum(0) / (n_tokens * len(logits_NE))
    return len(share_E) * (share_E.to(p_E) * p_E).sum()
