"""Importance ratios for each unit of correction, and their truncation and normalisation.

The unit trades bias against variance. `token` ignores that the prefix was drawn by another policy; this bias grows with
drift and length. `sequence` is exact and explodes with length. The other units are in between. Every log-ratio and
every sum is clamped to ±20 before exp; gradients pass these bounds. Masked positions never contribute and have ratio 0.
Arithmetic is in float64. Results have the dtype of the log-ratio, at least float32.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.estimators.numerics import RATIO_BOUND, bounded, bounded_exp, same_shape
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.correction import CTPO_CLIP, UNITS, Threshold, Unit


def importance_ratio(
    unit: Unit, log_ratio_BT: Tensor, mask_BT: Tensor, *, turns: Tensor | None = None, c: float = CTPO_CLIP
) -> Tensor:
    """Return the ratio of two policies at each token, ρ_t = exp(log_ratio_t), combined over a unit; differentiable.

    token       ρ_t: low variance, for mild drift
    sequence    Π_t ρ_t: the exact weight of the whole row, for short rows
    geometric   exp(mean_t log ρ_t): does not grow with length  (GSPO, 2507.18071)
    prefix_min  (min_{s<t} ρ_s)·ρ_t, 1 for the empty prefix: causal, without the product  (MinPRO, 2601.22718)
    cumulative  Π_{s≤t} ρ_s, its log clipped to ±c√t, t the token's number in the row: causal, for drift that is spread
                evenly  (CTPO, 2605.07331)
    turn        Π of ρ over the tokens of the row with the same entry in `turns` (integers, [B, T]): for agents, whose
                actions are turns  (ST-PPO, 2511.20718)
    """
    same_rows(log_ratio=log_ratio_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    log_BT = bounded(log_ratio_BT.masked_fill(~valid_BT, 0.0).double(), -RATIO_BOUND, RATIO_BOUND)
    match unit:
        case "token":
            unit_BT = log_BT
        case "sequence":
            unit_BT = log_BT.sum(-1, keepdim=True).expand_as(log_BT)
        case "geometric":
            unit_BT = (log_BT.sum(-1) / valid_BT.sum(-1).clamp(min=1))[:, None].expand_as(log_BT)
        case "prefix_min":
            unit_BT = _least_before(log_BT, valid_BT) + log_BT
        case "cumulative":
            bound_BT = c * valid_BT.cumsum(-1).clamp(min=1).to(log_BT.dtype).sqrt()
            unit_BT = log_BT.cumsum(-1).clamp(-bound_BT, bound_BT)
        case "turn":
            unit_BT = turn_sum(log_BT, turns)
        case _:
            raise unknown("unit", unit, UNITS)
    dtype = torch.promote_types(log_ratio_BT.dtype, torch.float32)
    return bounded_exp(unit_BT).masked_fill(~valid_BT, 0.0).to(dtype)


def same_rows(**tensors: Tensor) -> None:
    """Raise a ValueError unless all arguments are [B, T] of one shape: one row for each sample, without packing."""
    if len(shape := same_shape(**tensors)) != 2:
        raise ValueError(f"{', '.join(tensors)} must be [B, T], one row per sample, got {tuple(shape)}")


def truncate(ratio_BT: Tensor, threshold: Threshold) -> Tensor:
    """Return min(ρ, C) for one number. For a pair return ρ inside the band and 0 outside (IcePop, 2510.18855)."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0.0)
    return ratio_BT.clamp(max=threshold)


def normaliser(weights_BT: Tensor, mask_BT: Tensor, *, over_rows: bool = False) -> Tensor:
    """Return the mean of importance weights over tokens, or over non-empty rows; 1 if all are 0. Batch scope."""
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    mean = row_mean(weights_BT, valid_BT) if over_rows else token_mean(weights_BT, valid_BT)
    return torch.where(mean == 0, 1.0, mean)


def effective_sample_size(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the effective sample size as a share of the tokens: 1 / E[w̃²], w̃ = w / E[w]; 0 if all weights are 0."""
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    second = token_mean(weights_BT.square(), valid_BT)
    return token_mean(weights_BT, valid_BT).square() / torch.where(second == 0, 1.0, second)


def weight_metrics(
    ratio_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor, *, threshold: Threshold, over_rows: bool
) -> dict[str, Tensor]:
    """Return statistics of truncated importance weights over tokens, and the shares of ratios above C and below 1/C.

    With `over_rows` the shares are of rows. A single threshold C truncates only above: ratios below 1/C are counted and
    not changed. A pair (low, high) replaces 1/C and C; ratios outside the band get weight 0.
    """
    valid_BT = mask_BT != 0
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
    mean = token_mean(weights_BT, valid_BT)
    least = weights_BT.masked_fill(~valid_BT, torch.inf).amin()
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": token_mean((weights_BT - mean).square(), valid_BT).sqrt(),
        "rollout_is_min": torch.where(least.isinf(), 0.0, least),
        "rollout_is_max": weights_BT.masked_fill(~valid_BT, 0.0).amax(),
        "rollout_is_ratio_fraction_high": share(ratio_BT > high, valid_BT, of_rows=over_rows),
        "rollout_is_ratio_fraction_low": share(ratio_BT < low, valid_BT, of_rows=over_rows),
    }


def share(hit_BT: Tensor, valid_BT: Tensor, *, of_rows: bool = False) -> Tensor:
    """Return the share of valid tokens in `hit_BT`; with `of_rows` the share of non-empty rows with any such token."""
    if of_rows:
        hit_BT, valid_BT = (hit_BT & valid_BT).any(-1, keepdim=True), valid_BT.any(-1, keepdim=True)
    return token_mean(hit_BT.double(), valid_BT)


def token_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the mean over valid tokens; 0 if no token is valid."""
    return x_BT.masked_fill(~valid_BT, 0.0).sum() / valid_BT.sum().clamp(min=1)


def row_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the mean over non-empty rows of each row's mean; 0 if all rows are empty."""
    each_B = x_BT.masked_fill(~valid_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp(min=1)
    return each_B.sum() / valid_BT.any(-1).sum().clamp(min=1)


def _least_before(log_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the smallest valid log-ratio strictly before each position; 0 if no valid token is before it."""
    least_BT = log_BT.masked_fill(~valid_BT, torch.inf).cummin(-1).values
    before_BT = pad(least_BT[:, :-1], (1, 0), value=torch.inf)
    return torch.where(before_BT.isinf(), 0.0, before_BT)


def turn_sum(x_BT: Tensor, turns_BT: Tensor | None) -> Tensor:
    """Return at each token the sum over the tokens of its row with the same entry in `turns`."""
    if turns_BT is None or turns_BT.is_floating_point():
        raise ValueError(
            "unit 'turn' needs turns, the number of each token's turn: an integer tensor of the mask's shape"
        )
    same_shape(log_ratio=x_BT, turns=turns_BT)
    found, ids_BT = torch.unique(turns_BT, return_inverse=True)
    sums = x_BT.new_zeros(len(x_BT), len(found)).scatter_add(-1, ids_BT, x_BT)
    return sums.gather(-1, ids_BT)
