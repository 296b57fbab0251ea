"""Advantages of tokens from rewards: how much better a sample is than expected.

`groups` labels the rows: rows with the same label answer the same prompt. Rows without valid tokens (empty or rejected)
are ignored in group sizes and baselines. A row that is alone in its group has baseline 0. Rewards at masked positions
are ignored; results are 0 at them. Arithmetic is in float64. Results have the dtype of the rewards, at least float32.

S = Σ_t reward of a row, μ and σ the mean and unbiased standard deviation of S in the group (0 and 1 for a lone row).
G_t = Σ_{s≥t} reward, the reward-to-go.

Shapes: B rows, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.numerics import floored, same_rows, same_shape, zeroed
from slipstream.estimators.options import check_options, unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.values import lambda_returns


def advantage(name: str, rewards_BT: Tensor, mask_BT: Tensor, *, groups: Tensor, **kw: Any) -> Tensor:
    """Return the advantages [B, T] by an estimator of `ADVANTAGES`, with its options `kw`."""
    if name not in ADVANTAGES:
        raise unknown("advantage", name, ADVANTAGES)
    function = ADVANTAGES[name].function
    same_rows(rewards=rewards_BT, mask=mask_BT)
    if groups.shape != mask_BT.shape[:1]:
        raise ValueError(f"groups {tuple(groups.shape)} must be [B] with B = {len(mask_BT)}")
    check_options(name, kw, function)
    dtype = torch.promote_types(rewards_BT.dtype, torch.float32)
    valid_BT = mask_BT != 0
    (rewards,) = zeroed(valid_BT, rewards_BT.detach().double())
    advantage_BT: Tensor = function(Rows(rewards, valid_BT, torch.unique(groups, return_inverse=True)[1]), **kw)
    return (advantage_BT * valid_BT).to(dtype)


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (x − mean) / √(unbiased variance + 1e-8) over the valid tokens of the batch; 0 where masked.

    The scale of whitened advantages does not depend on the scale of the rewards.
    """
    same_shape(x=x_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    if (tokens := int(valid_BT.sum())) < 2:
        raise ValueError(f"whitening needs at least two valid tokens, the mask has {tokens}")
    (x,) = zeroed(valid_BT, x_BT.double())
    centred_BT = (x - x.sum() / tokens) * valid_BT
    return (centred_BT / (centred_BT.square().sum() / (tokens - 1) + 1e-8).sqrt()).to(x_BT.dtype)


@dataclass(frozen=True)
class Rows:
    """Rewards of a batch, and the groups of its rows."""

    rewards: Tensor
    """Rewards [B, T], 0 at masked positions."""
    mask: Tensor
    """Valid tokens [B, T], as bool."""
    group: Tensor
    """Number of each row's group [B], from 0."""

    @property
    def score(self) -> Tensor:
        return self.rewards.sum(-1)

    @property
    def to_go(self) -> Tensor:
        return self.rewards.flip(-1).cumsum(-1).flip(-1)

    @property
    def alive(self) -> Tensor:
        return self.mask.any(-1)

    @property
    def sizes(self) -> Tensor:
        return self.total(self.alive.double())

    def total(self, x: Tensor) -> Tensor:
        """Return for every row the sum of x over its group, along the first dimension."""
        return torch.zeros_like(x).index_add(0, self.group, x)[self.group]

    def above_mean(self, score_B: Tensor) -> Tensor:
        """Return S − μ of each row in its group, with μ = 0 for a lone row. Rows without tokens: undefined."""
        return score_B - (self.total(score_B) / self.sizes.clamp(min=1)).masked_fill(self.sizes < 2, 0.0)

    def standard(self, score_B: Tensor) -> Tensor:
        """Return (S − μ) / (σ + 1e-6) of each row in its group, with μ = 0 and σ = 1 for a lone row."""
        centred_B, size_B = self.above_mean(score_B), self.sizes
        variance_B = self.total(centred_B.square() * self.alive) / (size_B - 1).clamp(min=1)
        return centred_B / (variance_B.sqrt().masked_fill(size_B < 2, 1.0) + 1e-6)

    def above_weighted_mean(self, weight_B: Tensor) -> Tensor:
        """Return S minus the group's weighted mean of S. The mean is 0 for a lone row, or if all weights are 0."""
        (weight_B,) = zeroed(self.alive, weight_B)
        total_B = self.total(weight_B)
        none_B = (total_B == 0) | (self.sizes < 2)
        mean_B = self.total(weight_B * self.score) / total_B.masked_fill(none_B, 1.0)
        return self.score - mean_B.masked_fill(none_B, 0.0)

    def spread(self, row_B: Tensor) -> Tensor:
        """Return the number of each row at all its valid tokens."""
        return row_B[:, None] * self.mask


# --- one number for each row ------------------------------------------------------------------------------------------


def grpo(rows: Rows, *, norm: bool = True) -> Tensor:
    """Compare each row's reward with the mean of its group (GRPO, 2402.03300; norm=False: Dr. GRPO, 2503.20783).

    (S − μ) / (σ + 1e-6), or S − μ.
    Baseline: the group's mean, divided by its σ.
    Use this advantage by default, with several answers per prompt and one reward each. Use norm=False if easy and hard
    prompts should not count alike.
    """
    return rows.spread(rows.standard(rows.score) if norm else rows.above_mean(rows.score))


def grpo_passk(rows: Rows) -> Tensor:
    """Reward only the best row of a group, by its lead over the second best (Pass@k training, 2503.19595).

    (best S − second S) / (σ + 1e-6) at the best row, 0 elsewhere and in a group of one.
    Baseline: the second best of the group, divided by its σ.
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


def grpo_turn(rows: Rows, *, turns: Tensor, norm: bool = True) -> Tensor:
    """Compare the reward-to-go of each turn with that of the same turn in the group (GRPO for turns).

    G = Σ of the rewards in this turn and later ones. (G − μ) / (σ + 1e-6), or G − μ, over the rows of the group that
    have this turn, with μ = 0 and σ = 1 for a lone one.
    Baseline: the group's mean at the same turn, divided by its σ.
    Use this advantage if the environment rewards single turns, with several answers per prompt.
    """
    turns_BT = turns.masked_fill(~rows.mask, 0).long()
    none_BK = rows.rewards.new_zeros(len(turns), 1 + int(turns_BT.max()))
    to_go_BK = none_BK.scatter_add(1, turns_BT, rows.rewards).flip(-1).cumsum(-1).flip(-1)
    has_BK = none_BK.scatter_add(1, turns_BT, rows.mask.to(none_BK.dtype)) > 0
    group_BK = rows.group[:, None] * has_BK.shape[1] + torch.arange(has_BK.shape[1])
    at_turns = Rows((to_go_BK * has_BK).reshape(-1, 1), has_BK.reshape(-1, 1), group_BK.flatten())
    found = at_turns.standard(at_turns.score) if norm else at_turns.above_mean(at_turns.score)
    return found.view_as(to_go_BK).gather(1, turns_BT) * rows.mask


def rloo(rows: Rows) -> Tensor:
    """Compare each row's reward with the mean of the other rows of its group (RLOO, 2402.14740).

    S − mean of the others' S = n/(n−1)·(S − μ); 0 in a group of one.
    Baseline: the mean of the others in the group.
    Use this advantage instead of grpo to avoid the division by σ. The baseline excludes the row, so it is unbiased.
    """
    score_B, size_B = rows.score, rows.sizes
    others_B = (rows.total(score_B) - score_B) / (size_B - 1).clamp(min=1)
    return rows.spread((score_B - others_B) * (size_B > 1))


def opo(rows: Rows) -> Tensor:
    """Compare each row's reward with the length-weighted mean of its group (OPO, 2505.23585).

    S − Σ(len·S)/Σlen. Rows are weighted by length, because gradients of longer rows are larger.
    Baseline: the group's mean weighted by length.
    Use this advantage for strictly on-policy training with answers of very different lengths.
    """
    return rows.spread(rows.above_weighted_mean(rows.mask.sum(-1).double()))


def opob(rows: Rows, *, grad_norm_squared: Tensor, weights: Tensor | None = None) -> Tensor:
    """Subtract the baseline of least variance under importance weights (OPOB in VCPO, 2602.17616).

    S − b, b = Σ w² ‖g‖² S / Σ w² ‖g‖² in the group. `weights` w and `grad_norm_squared` ‖g‖² are [B]; g is the gradient
    of the row's log-prob. With respect to the model's weights g takes one backward pass per row. With respect to the
    logits ‖g‖² is Σ_t `logit_energy`.
    Baseline: the group's mean weighted by w²‖g‖².
    Cost: a pass over the batch for π and Σπ²; ‖g‖² is with respect to logits, not weights.
    Use this advantage for stale rollouts, where few rows dominate the gradient.
    """
    weights = torch.ones_like(grad_norm_squared) if weights is None else weights  # they may be in ‖g‖² already
    same_shape(groups=rows.group, weights=weights, grad_norm_squared=grad_norm_squared)
    influence_B = weights.detach().double().square() * grad_norm_squared.detach().double()
    return rows.spread(rows.above_weighted_mean(influence_B))


def opob_exact(rows: Rows, *, grad_norm_squared: Tensor, weights: Tensor | None = None) -> Tensor:
    """Apply `opob` with the gradient with respect to the trained weights (VCPO, 2602.17616).

    Baseline: as opob, with ‖g‖² of the weights.
    Cost: a forward and a backward pass for each answer alone, before the update.
    Use this advantage for stale rollouts, where few rows dominate the gradient.
    """
    return opob(rows, grad_norm_squared=grad_norm_squared, weights=weights)


def gpg(rows: Rows) -> Tensor:
    """Subtract the group's mean, and scale up if few rows have a reward (GPG).

    α(S − μ), α = rows / max(1, rows with S ≠ 0).
    Baseline: the group's mean, scaled by the share of rewarded rows.
    Use this advantage with the loss gpg: the gradient keeps its scale if rewards are sparse.
    """
    alpha = rows.alive.sum().double() / (rows.score != 0).sum().clamp(min=1)
    return alpha * rows.spread(rows.above_mean(rows.score))


def gdpo(
    rows: Rows, *, components: Mapping[str, Tensor], component_weights: Mapping[str, float] | None = None
) -> Tensor:
    """Normalise each kind of reward separately before adding them (GDPO, 2601.05242).

    whiten(Σ_k w_k·GRPO(reward k)). `components` = {name: [B]} replace the rewards; w is 1 if not given.
    Baseline: each reward's group mean and σ, then whitened.
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
    Baseline: the group's soft maximum.
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
    Baseline: the group's mean, then whitened.
    Use this advantage instead of grpo if σ is tiny in groups whose rewards nearly agree.
    """
    return whiten(rows.spread(rows.above_mean(rows.score)), rows.mask)


# --- one number for each token ----------------------------------------------------------------------------------------


def reinforce_plus_plus(rows: Rows, *, gamma: float = 1.0) -> Tensor:
    """Compare the discounted reward-to-go with the average of the batch (REINFORCE++, 2501.03262).

    whiten(G), G_t = reward_t + gamma·G_{t+1}, unchanged over masked tokens.
    Baseline: the batch mean of the discounted reward-to-go.
    Use this advantage with one answer per prompt and no critic.
    """
    running_B, returns_BT = torch.zeros_like(rows.score), torch.zeros_like(rows.rewards)
    for t in reversed(range(rows.rewards.shape[-1])):
        running_B = torch.where(rows.mask[:, t], rows.rewards[:, t] + gamma * running_B, running_B)
        returns_BT[:, t] = running_B
    return whiten(returns_BT, rows.mask)


def gae(
    rows: Rows,
    *,
    values: Tensor,
    bootstrap: Tensor,
    turns: Tensor,
    log_ratios: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    by_turn: bool = False,
    rho: float = 0.0,
    c: float = 0.0,
    normalised: bool = True,
) -> Tensor:
    """Compare with the values of a critic, over later tokens or turns (GAE, 1506.02438).

    A_t = d_t + gamma·lam·A_{t+1}, d_t = r_t + gamma·V_{t+1} − V_t, whitened over the batch if `normalised`. Steps are
    drawn tokens, or turns with by_turn; tokens of tools are no steps. `bootstrap` [B] is V after an episode that a
    limit has cut, else 0. Bounds rho and c truncate importance ratios of later steps, as in V-trace (1802.01561); 0
    leaves the ratios out.
    Baseline: the value V of the state, by the critic.
    Cost: a pass over the batch for the values, and with rho or c another for the ratios.
    Use this advantage with one answer per prompt, or long episodes whose early turns decide the reward.
    """
    options: dict[str, Any] = {"gamma": gamma, "lam": lam, "by_turn": by_turn, "rho": rho, "c": c}
    columns: dict[str, Any] = {"bootstrap": bootstrap, "turns": turns, "log_ratios": log_ratios}
    advantage_BT, _ = lambda_returns(rows.rewards, values, rows.mask, **columns, **options)
    return whiten(advantage_BT, rows.mask) if normalised else advantage_BT


def remax(rows: Rows, *, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the greedy answer to the same prompt (ReMax, 2310.10505).

    G_t − greedy_rewards [B].
    Baseline: the greedy answer's reward.
    Cost: one more greedy answer per prompt, which is graded but not trained on.
    Use this advantage with one answer per prompt, if a greedy rollout is cheaper than a group.
    """
    if greedy_rewards.shape != rows.group.shape:
        raise ValueError(f"greedy_rewards {tuple(greedy_rewards.shape)} must be [B] with B = {len(rows.group)}")
    (greedy_B,) = zeroed(rows.alive, greedy_rewards.detach().double())
    return rows.to_go - greedy_B[:, None]


def logit_energy(logp: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Return ‖∂ log π(y) / ∂ logits‖² = 1 − 2π(y) + Σ_v π_v² of each token. For a row, sum over its tokens."""
    return 1 - 2 * floored(logp).exp() + sum_pi_squared


def optimal_token_baseline(
    rows: Rows,
    *,
    logp: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
    multi_turn: bool = False,
) -> Tensor:
    """Subtract a baseline for every position: the group's reward-to-go, weighted by gradient energy (2602.07078).

    G − B_t, B_t = Σ_i G W / (Σ_i W + 1e-8) over the rows valid at t, W_t = Σ_{s≤t} w_s ρ̄_s², w = 1 − 2π + Σ_v π_v².
    B is 0 where only one row of the group continues. `logp` and `sum_pi_squared` [B, T] belong to the trained policy.
    `weights` [B, T] are truncated importance weights ρ̄, 1 if not given. `multi_turn` aligns rows by token number,
    without tool output, instead of by position.
    Baseline: the group's reward-to-go at each position, weighted by gradient energy.
    Cost: a pass over the batch for π and Σπ².
    Use this advantage for long answers, where early and late tokens need different baselines; with multi_turn = true
    (TIR-OTB) if tool output is in between. `weights` correct for staleness.
    """
    columns = {"logp": logp, "sum_pi_squared": sum_pi_squared} | ({} if weights is None else {"weights": weights})
    same_shape(mask=rows.mask, **columns)
    logp_BT, square_BT, *rest = zeroed(rows.mask, *(each.detach().double() for each in columns.values()))
    energy_BT = logit_energy(logp_BT, square_BT) * (rest[0].square() if rest else 1)
    tensors = (rows.to_go, (energy_BT * rows.mask).cumsum(-1), rows.mask)
    if not multi_turn:
        return rows.to_go - _token_baseline(rows, *tensors)
    order_BT = (~rows.mask).int().argsort(dim=-1, stable=True)
    baseline_BT = _token_baseline(rows, *(each.gather(-1, order_BT) for each in tensors))
    return rows.to_go - torch.zeros_like(baseline_BT).scatter(-1, order_BT, baseline_BT)


def _token_baseline(rows: Rows, to_go_BT: Tensor, path_BT: Tensor, mask_BT: Tensor) -> Tensor:
    weight_BT = path_BT * mask_BT
    baseline_BT = rows.total(to_go_BT * weight_BT) / (rows.total(weight_BT) + 1e-8)
    going_on_BT = mask_BT.flip(-1).cumsum(-1).flip(-1) > 0
    return torch.where(rows.total(going_on_BT.double()) > 1, baseline_BT, 0.0)
