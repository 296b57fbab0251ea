"""Values of a critic: λ-returns with truncated importance ratios, and the clipped value loss.

Shapes: B rows, T positions, N trained tokens.
"""

import torch
from torch import Tensor

from slipstream.estimators.numerics import same_shape, zeroed


def lambda_returns(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    bootstrap: Tensor,
    turns: Tensor,
    log_ratios: Tensor | None = None,
    gamma: float,
    lam: float,
    by_turn: bool,
    rho: float,
    c: float,
) -> tuple[Tensor, Tensor]:
    """Return advantages A and returns V + B of every valid token, [B, T] (GAE, 1506.02438; V-trace, 1802.01561).

    d_t = r_t + γ V_{t+1} − V_t
    B_t = min(ρ̄, w_t) d_t + γλ min(c̄, w_t) B_{t+1}
    A_t = d_t + γλ B_{t+1}

    Steps are valid tokens, or with `by_turn` whole turns, whose tokens share A and the return of the first. V after the
    last step is `bootstrap` [B]. w is exp(log_ratios), multiplied over the tokens of a turn. With `rho` or `c` 0 its
    factor is 1; with both, B = A, which is GAE. A leaves out w_t, which the policy loss has. With λ = 1, B is that of
    V-trace, and A = r_t + γ v_{t+1} − V_t, as there.
    """
    same_shape(rewards=rewards_BT, values=values_BT, mask=mask_BT, turns=turns)
    valid_BT = mask_BT != 0
    reward, value = zeroed(valid_BT, rewards_BT.detach().double(), values_BT.detach().double())
    log_w = torch.zeros_like(value)
    if log_ratios is not None:
        (log_w,) = zeroed(valid_BT, log_ratios.detach().double())
    first_BT = first_of_steps(valid_BT, turns, by_turn=by_turn)
    advantage_BT, return_BT = torch.zeros_like(value), torch.zeros_like(value)
    next_value, next_sum = bootstrap.detach().double(), torch.zeros_like(value[:, 0])
    reward_B, log_B = torch.zeros_like(next_sum), torch.zeros_like(next_sum)
    for t in reversed(range(value.shape[1])):
        first = first_BT[:, t]
        reward_B, log_B = reward_B + reward[:, t], log_B + log_w[:, t]
        error_B = reward_B + gamma * next_value - value[:, t]
        ahead_B = gamma * lam * next_sum
        advantage_BT[:, t] = torch.where(first, error_B + ahead_B, 0.0)
        sum_B = _cut(log_B, rho) * error_B + _cut(log_B, c) * ahead_B
        return_BT[:, t] = torch.where(first, value[:, t] + sum_B, 0.0)
        next_value, next_sum = torch.where(first, value[:, t], next_value), torch.where(first, sum_B, next_sum)
        reward_B, log_B = reward_B.masked_fill(first, 0.0), log_B.masked_fill(first, 0.0)
    for t in range(1, value.shape[1]):  # the other tokens of a step have the numbers of its first one
        for found_BT in (advantage_BT, return_BT):
            found_BT[:, t] = torch.where(first_BT[:, t], found_BT[:, t], found_BT[:, t - 1])
    return advantage_BT * valid_BT, return_BT * valid_BT


def first_of_steps(valid_BT: Tensor, turns_BT: Tensor, *, by_turn: bool) -> Tensor:
    """Return a mask of the first token of each step."""
    if not by_turn:
        return valid_BT
    first_BT, last_B = torch.zeros_like(valid_BT), torch.full_like(turns_BT[:, 0], -1)
    for t in range(valid_BT.shape[1]):
        first_BT[:, t] = valid_BT[:, t] & (turns_BT[:, t] != last_B)
        last_B = torch.where(valid_BT[:, t], turns_BT[:, t], last_B)
    return first_BT


def _cut(log_ratio_B: Tensor, bound: float) -> Tensor:
    return log_ratio_B.exp().clamp(max=bound) if bound else torch.ones_like(log_ratio_B)


def value_loss(
    values_N: Tensor,
    old_N: Tensor,
    returns_N: Tensor,
    mask_N: Tensor,
    *,
    clip: float | None,
    n_tokens: float,
    weight_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ½ Σ w max((V − R)², (clip(V, V_old ± ε) − R)²) / n_tokens over the mask, and metrics (PPO, 1707.06347).

    R are the returns, and V_old the values before the update; `clip` None leaves the second term out. The weights w are
    1 if `weight_N` is None.
    """
    same_shape(values=values_N, old=old_N, returns=returns_N, mask=mask_N)
    values, old, returns = zeroed(mask_N, values_N, old_N.to(values_N), returns_N.to(values_N))
    squared_N, clipped_N = (values - returns).square(), torch.zeros_like(mask_N)
    if clip is not None:
        bounded_N = (torch.maximum(torch.minimum(values, old + clip), old - clip) - returns).square()
        clipped_N = bounded_N > squared_N
        squared_N = torch.maximum(squared_N, bounded_N)
    if weight_N is not None:
        squared_N = weight_N * squared_N
    n, loss = max(n_tokens, 1), 0.5 * squared_N[mask_N].sum() / max(n_tokens, 1)
    return loss, {"loss": loss.detach(), "clip_fraction": (clipped_N & mask_N).sum().to(loss.dtype) / n}
