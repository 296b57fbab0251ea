"""Advantages that differ from token to token within a row. Callers use `advantage.advantage`.

G_t = Σ_{s≥t} reward, the reward-to-go.

Shapes: B rows, T positions. `mask` is bool; masked rewards are 0; `group_B` numbers the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.advantage.grouping import total, whiten
from slipstream.estimators.numerics import floored, same_shape, zeroed


def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Compare the discounted reward-to-go with the average of the batch (REINFORCE++, 2501.03262).

    whiten(G), G_t = reward_t + gamma·G_{t+1}, unchanged over masked tokens.
    Use this advantage with one answer per prompt and no critic.
    """
    running_B, returns = rewards_BT.new_zeros(len(rewards_BT)), []
    for t in reversed(range(rewards_BT.shape[-1])):
        running_B = torch.where(mask_BT[:, t], rewards_BT[:, t] + gamma * running_B, running_B)
        returns.append(running_B)
    return whiten(torch.stack(returns[::-1], -1), mask_BT)


def remax(rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the greedy answer to the same prompt (ReMax, 2310.10505).

    G_t − greedy_rewards [B].
    Use this advantage with one answer per prompt, if a greedy rollout is cheaper than a group.
    """
    if greedy_rewards.shape != group_B.shape:
        raise ValueError(f"greedy_rewards {tuple(greedy_rewards.shape)} must be [B] with B = {len(group_B)}")
    (greedy_B,) = zeroed(mask_BT.any(-1), greedy_rewards.detach().double())
    return _to_go(rewards_BT) - greedy_B[:, None]


def gae(
    rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sum exponentially weighted temporal differences of a critic; return (advantages, returns) (GAE, 1506.02438).

    A_t = d_t + gamma·lam·A_{t+1}, d_t = reward_t + gamma·V_{t+1} − V_t. V and A are unchanged over masked tokens.
    returns = A + V; advantages = whiten(A). `values` are the critic's, [B, T].
    Use this advantage with a critic, if credit within an answer matters.
    """
    same_shape(rewards=rewards_BT, values=values)
    (values_BT,) = zeroed(mask_BT, values.detach().double())
    next_value_B = running_B = rewards_BT.new_zeros(len(rewards_BT))
    steps = []
    for t in reversed(range(rewards_BT.shape[-1])):
        difference_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        running_B = torch.where(mask_BT[:, t], difference_B + gamma * lam * running_B, running_B)
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        steps.append(running_B)
    advantages_BT = torch.stack(steps[::-1], -1)
    return whiten(advantages_BT, mask_BT), advantages_BT + values_BT


def logit_energy(logp: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Return ‖∂ log π(y) / ∂ logits‖² = 1 − 2π(y) + Σ_v π_v² of each token. For a row, sum over its tokens."""
    return 1 - 2 * floored(logp).exp() + sum_pi_squared


def optimal_token_baseline(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
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
    Use this advantage for long answers, where early and late tokens need different baselines. `weights` correct for
    staleness.
    """
    given = {"logp": logp, "sum_pi_squared": sum_pi_squared} | ({} if weights is None else {"weights": weights})
    same_shape(mask=mask_BT, **given)
    logp_BT, square_BT, *rest = zeroed(mask_BT, *(each.detach().double() for each in given.values()))
    energy_BT = logit_energy(logp_BT, square_BT) * (rest[0].square() if rest else 1)
    path_BT, to_go_BT = (energy_BT * mask_BT).cumsum(-1), _to_go(rewards_BT)
    if not multi_turn:
        return to_go_BT - _token_baseline(to_go_BT, path_BT, mask_BT, group_B)
    order_BT = (~mask_BT).int().argsort(dim=-1, stable=True)
    to_go, path, mask = (each.gather(-1, order_BT) for each in (to_go_BT, path_BT, mask_BT))
    return to_go_BT - torch.zeros_like(to_go_BT).scatter(-1, order_BT, _token_baseline(to_go, path, mask, group_B))


def _token_baseline(to_go_BT: Tensor, path_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    weight_BT = path_BT * mask_BT
    baseline_BT = total(to_go_BT * weight_BT, group_B) / (total(weight_BT, group_B) + 1e-8)
    going_on_BT = mask_BT.flip(-1).cumsum(-1).flip(-1) > 0
    return torch.where(total(going_on_BT.double(), group_B) > 1, baseline_BT, 0.0)


def _to_go(rewards_BT: Tensor) -> Tensor:
    return rewards_BT.flip(-1).cumsum(-1).flip(-1)
