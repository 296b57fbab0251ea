"""Advantages that differ from token to token within a row. Callers use `advantage.advantage`.

G_t = Σ_{s≥t} reward, the reward-to-go.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.advantage.grouping import Rows, whiten
from slipstream.estimators.numerics import floored, same_shape, zeroed


def reinforce_plus_plus(rows: Rows, *, gamma: float = 1.0) -> Tensor:
    """Compare the discounted reward-to-go with the average of the batch (REINFORCE++, 2501.03262).

    whiten(G), G_t = reward_t + gamma·G_{t+1}, unchanged over masked tokens.
    Use this advantage with one answer per prompt and no critic.
    """
    running_B, returns_BT = torch.zeros_like(rows.score), torch.zeros_like(rows.rewards)
    for t in reversed(range(rows.rewards.shape[-1])):
        running_B = torch.where(rows.mask[:, t], rows.rewards[:, t] + gamma * running_B, running_B)
        returns_BT[:, t] = running_B
    return whiten(returns_BT, rows.mask)


def remax(rows: Rows, *, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the greedy answer to the same prompt (ReMax, 2310.10505).

    G_t − greedy_rewards [B].
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
    Use this advantage for long answers, where early and late tokens need different baselines; with multi_turn = true
    (TIR-OTB) if tool output is in between. `weights` correct for staleness.
    """
    given = {"logp": logp, "sum_pi_squared": sum_pi_squared} | ({} if weights is None else {"weights": weights})
    same_shape(mask=rows.mask, **given)
    logp_BT, square_BT, *rest = zeroed(rows.mask, *(each.detach().double() for each in given.values()))
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
