"""Policy losses that choose tokens from the whole batch.

`choose_…` runs once over the batch without gradient and returns (chosen, metrics). The loss receives the choice as
`chosen` [B, T], so the batch may be cut anywhere afterwards. Callers use `policy.prepare` and `policy.policy_loss`.

δ = logπ − logπ_old, r = exp(δ clamped to ±20), A advantage, lo = clip_low, hi = clip_high. The covariance of a token is
(A − Ā)(logπ − mean logπ), with means over the valid tokens of the batch.

Shapes: B rows, T positions, N some of the B·T positions.
"""

import torch
from torch import Tensor

from slipstream.estimators.numerics import RATIO_BOUND
from slipstream.estimators.policy.token import Loss, Tokens, clipped_surrogate
from slipstream.estimators.surrogate import second_moment_mask

Metrics = dict[str, Tensor]
Choice = tuple[Tensor, Metrics]


def clip_cov(tokens: Tokens, *, chosen: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Exclude a few of the tokens that sharpen the policy most from PPO's loss (Clip-Cov, 2505.22617).

    max(−A r, −A clip(r, 1−lo, 1+hi)), 0 at the chosen tokens. These are max(⌊cov_fraction·valid tokens⌋, 1) tokens,
    drawn at random with `generator` from those with cov_low < covariance < cov_high that PPO does not clip.
    Trust region: hard clip, and no loss at a few tokens of high covariance.
    Importance: token ratio.
    Against: entropy collapse.
    Use this loss if entropy falls too fast and exploration stops.
    """
    loss_BT, clipped_BT = clipped_surrogate(tokens.ratio, tokens.advantage, clip_low, clip_high)
    return loss_BT.masked_fill(chosen, 0.0), clipped_BT | chosen


def choose_clip_cov(
    tokens: Tokens,
    *,
    generator: torch.Generator,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    cov_fraction: float = 2e-4,
) -> Choice:
    cov_BT = _covariance(tokens)
    _, clipped_BT = clipped_surrogate(tokens.ratio, tokens.advantage, clip_low, clip_high)
    candidates_N = (tokens.mask & ~clipped_BT & (cov_BT > cov_low) & (cov_BT < cov_high)).flatten().nonzero().flatten()
    order = torch.randperm(len(candidates_N), generator=generator, device=generator.device).to(candidates_N.device)
    drawn_N = candidates_N[order[: max(int(cov_fraction * int(tokens.mask.sum())), 1)]]
    return _marked(drawn_N, tokens.mask), {"cov_candidates": cov_BT.new_tensor(float(len(candidates_N)))}


def kl_cov(tokens: Tokens, *, chosen: Tensor, kl_coef: float = 0.1) -> Loss:
    """Restrain the tokens that sharpen the policy most in an unclipped surrogate (KL-Cov, 2505.22617).

    −A r, plus kl_coef·|δ| at the chosen tokens: the max(1, ⌊cov_fraction·valid tokens⌋) tokens of largest covariance.
    Eq. 14 of the paper has KL(π_old‖π) instead of |δ|; the authors' code and verl compute |δ|. For one drawn token |δ|
    is better: |δ| pulls the token back to δ = 0 from both sides. The KL's estimate −δ would raise its probability.
    Trust region: |δ| penalty at the tokens of highest covariance.
    Importance: token ratio.
    Against: entropy collapse.
    Use this loss like clip_cov, if that removes too much: the chosen tokens are restrained and not left out.
    """
    return -tokens.advantage * tokens.ratio + kl_coef * tokens.delta.abs() * chosen, chosen


def choose_kl_cov(tokens: Tokens, *, cov_fraction: float = 2e-4) -> Choice:
    valid = int(tokens.mask.sum())
    cov_BT = _covariance(tokens).masked_fill(~tokens.mask, -torch.inf)
    top_N = cov_BT.flatten().topk(min(valid, max(1, int(cov_fraction * valid)))).indices
    return _marked(top_N, tokens.mask), {}


def m2po(tokens: Tokens, *, chosen: Tensor) -> Loss:
    """Mask outliers of an unclipped surrogate until a second-moment budget is met (M2PO, 2510.01161).

    −A r, 0 at the chosen tokens. Harmful tokens have A > 0 and r > 1, or A < 0 and r < 1. Those with the largest
    (log r)² are chosen, until the mean of (log r)² over the tokens left is ≤ budget. If the budget cannot be met, all
    harmful tokens are chosen and the metric `budget_missed` is 1.
    Trust region: bound on the batch mean of δ².
    Importance: token ratio.
    Against: extreme ratios of stale tokens.
    Use this loss for very stale batches: far fewer tokens are masked than with a clip, and only outliers.
    """
    return (-tokens.advantage * tokens.ratio).masked_fill(chosen, 0.0), chosen


def choose_m2po(tokens: Tokens, *, budget: float = 0.04) -> Choice:
    log_ratio_BT = tokens.delta.clamp(-RATIO_BOUND, RATIO_BOUND)
    keep_BT, metrics = second_moment_mask(log_ratio_BT, tokens.advantage, tokens.mask, budget=budget)
    return tokens.mask & ~keep_BT, metrics


def _covariance(tokens: Tokens) -> Tensor:
    """Return the covariance of each valid token; undefined at masked tokens."""
    valid, logp_BT, advantage_BT = tokens.mask.sum().clamp(min=1), tokens.logp.double(), tokens.advantage.double()
    return (advantage_BT - advantage_BT.sum() / valid) * (logp_BT - logp_BT.sum() / valid)


def _marked(at_N: Tensor, like_BT: Tensor) -> Tensor:
    marks = torch.zeros(like_BT.numel(), dtype=torch.bool, device=like_BT.device)
    marks[at_N] = True
    return marks.reshape(like_BT.shape)
