"""Importance ratios at every unit of correction, and what is done to them before they weigh a loss.

The unit is where the bias and the variance are paid: `token` ignores that the prefix was drawn by another policy (bias
grows with drift and length), `sequence` is exact and explodes with length, the others lie between. Every log-ratio is
clamped to ±20, and so is every sum, before exp; gradients pass those bounds. Masked positions never contribute and have
ratio 0. Arithmetic is in float64; the result has the dtype of the log-ratio, float32 at least.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.estimators.numerics import RATIO_BOUND, bounded, bounded_exp, same_shape
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.correction import CTPO_CLIP, UNIT_SCOPE, Threshold, Unit


def importance_ratio(
    unit: Unit, log_ratio_BT: Tensor, mask_BT: Tensor, *, turns: Tensor | None = None, c: float = CTPO_CLIP
) -> Tensor:
    """The ratio of two policies at each token, ρ_t = exp(log_ratio_t), put together over a unit. Differentiable.

    token       ρ_t: low variance, for mild drift
    sequence    Π_t ρ_t: the exact weight of the whole row, for short rows
    geometric   exp(mean_t log ρ_t): does not grow with length  (GSPO, 2507.18071)
    prefix_min  (min_{s<t} ρ_s)·ρ_t, 1 for the empty prefix: the causal unit without the product  (MinPRO, 2601.22718)
    cumulative  Π_{s≤t} ρ_s, its log clipped to ±c√t, t the token's number in the row: the causal unit, for drift that
                is spread evenly  (CTPO, 2605.07331)
    turn        Π of ρ over the tokens of the row with the same entry in `turns` (integers, [B, T]): for agents, whose
                action is a turn  (ST-PPO, 2511.20718)
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
            unit_BT = _turn_sum(log_BT, turns)
        case _:
            raise unknown("unit", unit, UNIT_SCOPE)
    dtype = torch.promote_types(log_ratio_BT.dtype, torch.float32)
    return bounded_exp(unit_BT).masked_fill(~valid_BT, 0.0).to(dtype)


def same_rows(**tensors: Tensor) -> None:
    """The arguments are [B, T] and agree, or a ValueError that names them: a packed batch has no rows to sum over."""
    if len(shape := same_shape(**tensors)) != 2:
        raise ValueError(f"{', '.join(tensors)} must be [B, T], one row per sample, got {tuple(shape)}")


def truncate(ratio_BT: Tensor, threshold: Threshold) -> Tensor:
    """min(ρ, C) for one number; for a pair ρ inside the band and 0 outside it (IcePop, 2510.18855)."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0.0)
    return ratio_BT.clamp(max=threshold)


def normaliser(weights_BT: Tensor, mask_BT: Tensor, *, over_rows: bool = False) -> Tensor:
    """What weights are divided by to have mean 1: their mean over tokens, or over non-empty rows. Batch scope.

    1 where every weight is 0, so that dividing is always allowed.
    """
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    mean = row_mean(weights_BT, valid_BT) if over_rows else token_mean(weights_BT, valid_BT)
    return torch.where(mean == 0, 1.0, mean)


def effective_sample_size(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """1 / E[w̃²], w̃ = w / E[w], over tokens: the share of the batch that really counts; 0 where no weight is left."""
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    second = token_mean(weights_BT.square(), valid_BT)
    return token_mean(weights_BT, valid_BT).square() / torch.where(second == 0, 1.0, second)


def weight_metrics(
    ratio_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor, *, threshold: Threshold, over_rows: bool
) -> dict[str, Tensor]:
    """Of truncated weights, over tokens; and the share of ratios (of rows, with `over_rows`) beyond C, below 1/C.

    A single threshold C truncates only above: what lies below 1/C is counted, not changed. A pair drops both.
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
    """The share of valid tokens that are hit, or of non-empty rows with any hit."""
    if of_rows:
        hit_BT, valid_BT = (hit_BT & valid_BT).any(-1, keepdim=True), valid_BT.any(-1, keepdim=True)
    return token_mean(hit_BT.double(), valid_BT)


def token_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Over valid tokens; 0 without any."""
    return x_BT.masked_fill(~valid_BT, 0.0).sum() / valid_BT.sum().clamp(min=1)


def row_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean over non-empty rows of each row's mean; 0 without any."""
    each_B = x_BT.masked_fill(~valid_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp(min=1)
    return each_B.sum() / valid_BT.any(-1).sum().clamp(min=1)


def _least_before(log_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """The least of the valid log-ratios strictly before each position, 0 where there are none."""
    least_BT = log_BT.masked_fill(~valid_BT, torch.inf).cummin(-1).values
    before_BT = pad(least_BT[:, :-1], (1, 0), value=torch.inf)
    return torch.where(before_BT.isinf(), 0.0, before_BT)


def _turn_sum(log_BT: Tensor, turns_BT: Tensor | None) -> Tensor:
    if turns_BT is None or turns_BT.is_floating_point():
        raise ValueError(
            "unit 'turn' needs turns, the number of each token's turn: an integer tensor of the mask's shape"
        )
    same_shape(log_ratio=log_BT, turns=turns_BT)
    found, ids_BT = torch.unique(turns_BT, return_inverse=True)
    sums = log_BT.new_zeros(len(log_BT), len(found)).scatter_add(-1, ids_BT, log_BT)
    return sums.gather(-1, ids_BT)
