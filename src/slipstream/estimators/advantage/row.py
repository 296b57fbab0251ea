"""Advantages with one number per row, from the row's total reward. Callers use `advantage.advantage`.

S = Σ_t reward of a row, μ and σ the mean and unbiased standard deviation of S in the group (0 and 1 for a lone row).

Shapes: B rows, T positions. `mask` is bool; masked rewards are 0; `group_B` numbers the groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.estimators.advantage.grouping import above_weighted, sizes, spread, standard, total, whiten
from slipstream.estimators.numerics import same_shape, zeroed
from slipstream.estimators.options import unknown


def grpo(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor, *, norm: bool = True) -> Tensor:
    """Compare each row's reward with the mean of its group (GRPO, 2402.03300; norm=False: Dr. GRPO, 2503.20783).

    (S − μ) / (σ + 1e-6), or S − μ.
    Use this advantage by default with one reward per answer. Use norm=False if easy and hard prompts should not count
    alike.
    """
    return spread(standard(rewards_BT.sum(-1), mask_BT, group_B, norm), mask_BT)


def grpo_passk(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Reward only the best row of a group, by its lead over the second best (Pass@k training, 2503.19595).

    (best S − second S) / (σ + 1e-6) at the best row, 0 elsewhere and in a group of one.
    Use this advantage if one right answer among k samples is enough.
    """
    score_B, alive_B = rewards_BT.sum(-1), mask_BT.any(-1)
    lead_B = torch.zeros_like(score_B)
    for group in torch.unique(group_B[alive_B]):
        rows = ((group_B == group) & alive_B).nonzero().flatten()
        if len(rows) > 1:
            best, at = score_B[rows].topk(2)
            lead_B[rows[at[0]]] = (best[0] - best[1]) / (score_B[rows].std() + 1e-6)
    return spread(lead_B, mask_BT)


def rloo(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Compare each row's reward with the mean of the other rows of its group (RLOO, 2402.14740).

    S − mean of the others' S = n/(n−1)·(S − μ); 0 in a group of one.
    Use this advantage instead of `grpo` to avoid the division by σ. The baseline excludes the row, so it is unbiased.
    """
    score_B, size_B = rewards_BT.sum(-1), sizes(mask_BT, group_B)
    others_B = (total(score_B, group_B) - score_B) / (size_B - 1).clamp(min=1)
    return spread((score_B - others_B) * (size_B > 1), mask_BT)


def opo(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Compare each row's reward with the length-weighted mean of its group (OPO, 2505.23585).

    S − Σ(len·S)/Σlen. Rows are weighted by length, because gradients of longer rows are larger.
    Use this advantage for strictly on-policy training with answers of very different lengths.
    """
    length_B = mask_BT.sum(-1).double()
    return spread(above_weighted(rewards_BT.sum(-1), length_B, mask_BT, group_B), mask_BT)


def opob(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    *,
    grad_norm_squared: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Subtract the baseline of least variance under importance weights (OPOB in VCPO, 2602.17616).

    S − b, b = Σ w² ‖g‖² S / Σ w² ‖g‖² in the group. `weights` w and `grad_norm_squared` ‖g‖² are [B]; g is the gradient
    of the row's log-prob. With respect to the model's weights g takes one backward pass per row. With respect to the
    logits ‖g‖² is Σ_t `logit_energy`.
    Use this advantage for stale rollouts, where few rows dominate the gradient.
    """
    weights = torch.ones_like(grad_norm_squared) if weights is None else weights  # they may be in ‖g‖² already
    same_shape(groups=group_B, weights=weights, grad_norm_squared=grad_norm_squared)
    influence_B = weights.detach().double().square() * grad_norm_squared.detach().double()
    return spread(above_weighted(rewards_BT.sum(-1), influence_B, mask_BT, group_B), mask_BT)


def gpg(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the group's mean, and scale up if few rows have a reward (GPG).

    α(S − μ), α = rows / max(1, rows with S ≠ 0).
    Use this advantage with the loss `gpg`: the gradient keeps its scale if rewards are sparse.
    """
    score_B, alive_B = rewards_BT.sum(-1), mask_BT.any(-1)
    alpha = alive_B.sum().double() / (score_B != 0).sum().clamp(min=1)
    return alpha * spread(standard(score_B, mask_BT, group_B, norm=False), mask_BT)


def gdpo(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    *,
    components: Mapping[str, Tensor],
    component_weights: Mapping[str, float] | None = None,
) -> Tensor:
    """Normalise each kind of reward separately before adding them (GDPO, 2601.05242).

    whiten(Σ_k w_k·GRPO(reward k)). `components` = {name: [B]} replace the rewards; w is 1 if not given.
    Use this advantage for several rewards of different scale, so that none dominates the others.
    """
    if not components:
        raise ValueError("gdpo needs components={name: reward of each row, …}, at least one")
    component_weights = component_weights or {}
    for name in component_weights:
        if name not in components:
            raise unknown("component", name, components)
    total_B = rewards_BT.new_zeros(len(rewards_BT))
    for name, reward_B in components.items():
        same_shape(groups=group_B, **{name: reward_B})
        (score_B,) = zeroed(mask_BT.any(-1), reward_B.detach().double())
        total_B = total_B + component_weights.get(name, 1.0) * standard(score_B, mask_BT, group_B, norm=True)
    return whiten(spread(total_B, mask_BT), mask_BT)


def reinforce_plus_plus_baseline(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the group's mean and scale by the batch (REINFORCE++ with baseline, 2501.03262).

    whiten(S − μ at every token).
    Use this advantage instead of `grpo` if σ is tiny in groups whose rewards nearly agree.
    """
    return whiten(spread(standard(rewards_BT.sum(-1), mask_BT, group_B, norm=False), mask_BT), mask_BT)
