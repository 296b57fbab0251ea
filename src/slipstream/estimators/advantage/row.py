"""Advantages with one number per row, from the row's total reward. Callers use `advantage.advantage`.

S = Σ_t reward of a row, μ and σ the mean and unbiased standard deviation of S in the group (0 and 1 for a lone row).

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.estimators.advantage.grouping import Rows, whiten
from slipstream.estimators.numerics import same_shape, zeroed
from slipstream.estimators.options import unknown


def grpo(rows: Rows, *, norm: bool = True) -> Tensor:
    """Compare each row's reward with the mean of its group (GRPO, 2402.03300; norm=False: Dr. GRPO, 2503.20783).

    (S − μ) / (σ + 1e-6), or S − μ.
    Use this advantage by default, with several answers per prompt and one reward each. Use norm=False if easy and hard
    prompts should not count alike.
    """
    return rows.spread(rows.standard(rows.score) if norm else rows.above_mean(rows.score))


def grpo_passk(rows: Rows) -> Tensor:
    """Reward only the best row of a group, by its lead over the second best (Pass@k training, 2503.19595).

    (best S − second S) / (σ + 1e-6) at the best row, 0 elsewhere and in a group of one.
    Use this advantage if one right answer among k samples is enough.
    """
    score_B = rows.score
    lead_B = torch.zeros_like(score_B)
    for group in torch.unique(rows.group[rows.alive]):
        members = ((rows.group == group) & rows.alive).nonzero().flatten()
        if len(members) > 1:
            best, at = score_B[members].topk(2)
            lead_B[members[at[0]]] = (best[0] - best[1]) / (score_B[members].std() + 1e-6)
    return rows.spread(lead_B)


def rloo(rows: Rows) -> Tensor:
    """Compare each row's reward with the mean of the other rows of its group (RLOO, 2402.14740).

    S − mean of the others' S = n/(n−1)·(S − μ); 0 in a group of one.
    Use this advantage instead of grpo to avoid the division by σ. The baseline excludes the row, so it is unbiased.
    """
    score_B, size_B = rows.score, rows.sizes
    others_B = (rows.total(score_B) - score_B) / (size_B - 1).clamp(min=1)
    return rows.spread((score_B - others_B) * (size_B > 1))


def opo(rows: Rows) -> Tensor:
    """Compare each row's reward with the length-weighted mean of its group (OPO, 2505.23585).

    S − Σ(len·S)/Σlen. Rows are weighted by length, because gradients of longer rows are larger.
    Use this advantage for strictly on-policy training with answers of very different lengths.
    """
    return rows.spread(rows.above_weighted_mean(rows.mask.sum(-1).double()))


def opob(rows: Rows, *, grad_norm_squared: Tensor, weights: Tensor | None = None) -> Tensor:
    """Subtract the baseline of least variance under importance weights (OPOB in VCPO, 2602.17616).

    S − b, b = Σ w² ‖g‖² S / Σ w² ‖g‖² in the group. `weights` w and `grad_norm_squared` ‖g‖² are [B]; g is the gradient
    of the row's log-prob. With respect to the model's weights g takes one backward pass per row. With respect to the
    logits ‖g‖² is Σ_t `logit_energy`.
    Use this advantage for stale rollouts, where few rows dominate the gradient.
    """
    weights = torch.ones_like(grad_norm_squared) if weights is None else weights  # they may be in ‖g‖² already
    same_shape(groups=rows.group, weights=weights, grad_norm_squared=grad_norm_squared)
    influence_B = weights.detach().double().square() * grad_norm_squared.detach().double()
    return rows.spread(rows.above_weighted_mean(influence_B))


def gpg(rows: Rows) -> Tensor:
    """Subtract the group's mean, and scale up if few rows have a reward (GPG).

    α(S − μ), α = rows / max(1, rows with S ≠ 0).
    Use this advantage with the loss gpg: the gradient keeps its scale if rewards are sparse.
    """
    alpha = rows.alive.sum().double() / (rows.score != 0).sum().clamp(min=1)
    return alpha * rows.spread(rows.above_mean(rows.score))


def gdpo(
    rows: Rows, *, components: Mapping[str, Tensor], component_weights: Mapping[str, float] | None = None
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
    total_B = torch.zeros_like(rows.score)
    for name, reward_B in components.items():
        same_shape(groups=rows.group, **{name: reward_B})
        (score_B,) = zeroed(rows.alive, reward_B.detach().double())
        total_B = total_B + component_weights.get(name, 1.0) * rows.standard(score_B)
    return whiten(rows.spread(total_B), rows.mask)


def oapl(rows: Rows, *, beta: float = 1.0) -> Tensor:
    """Subtract the value that the best policy near the sampler would reach (optimal advantage of OAPL, 2602.19362).

    S − beta·ln(mean of exp(S/beta) in the group): the mean of S for a large beta, the best S for a small one.
    Use this advantage with the loss oapl.
    """
    if beta <= 0:
        raise ValueError(f"beta of the advantage oapl must be above 0, got {beta}")
    score_B = rows.score
    left_B = score_B.masked_fill(~rows.alive, -torch.inf)
    best_B = torch.full_like(score_B, -torch.inf).scatter_reduce(0, rows.group, left_B, "amax")[rows.group]
    best_B = best_B.masked_fill(best_B.isinf(), 0.0)
    mean_B = rows.total(((left_B - best_B) / beta).exp()) / rows.sizes.clamp(min=1)
    soft_B = best_B + beta * mean_B.masked_fill(mean_B == 0, 1.0).log()
    return rows.spread(score_B - soft_B)


def reinforce_plus_plus_baseline(rows: Rows) -> Tensor:
    """Subtract the group's mean and scale by the batch (REINFORCE++ with baseline, 2501.03262).

    whiten(S − μ at every token).
    Use this advantage instead of grpo if σ is tiny in groups whose rewards nearly agree.
    """
    return whiten(rows.spread(rows.above_mean(rows.score)), rows.mask)
