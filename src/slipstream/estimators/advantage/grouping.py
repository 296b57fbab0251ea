"""Statistics of rows within groups, and of tokens within the batch. Rows without valid tokens are ignored.

`group_B` numbers the groups from 0. Arithmetic is in float64. Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.estimators.numerics import same_shape, zeroed


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


def total(x: Tensor, group_B: Tensor) -> Tensor:
    """Return for every row the sum of x over its group, along the first dimension."""
    return torch.zeros_like(x).index_add(0, group_B, x)[group_B]


def sizes(mask_BT: Tensor, group_B: Tensor) -> Tensor:
    return total(mask_BT.any(-1).double(), group_B)


def standard(score_B: Tensor, mask_BT: Tensor, group_B: Tensor, norm: bool) -> Tensor:
    """Return (S − μ) / (σ + 1e-6) of each row in its group, or S − μ if not `norm`. Rows without tokens: undefined."""
    alive_B, size_B = mask_BT.any(-1), sizes(mask_BT, group_B)
    lone_B = size_B < 2
    mean_B = (total(score_B, group_B) / size_B.clamp(min=1)).masked_fill(lone_B, 0.0)
    if not norm:
        return score_B - mean_B
    square_B = total((score_B - mean_B).square() * alive_B, group_B)
    return (score_B - mean_B) / ((square_B / (size_B - 1).clamp(min=1)).sqrt().masked_fill(lone_B, 1.0) + 1e-6)


def above_weighted(score_B: Tensor, weight_B: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Return S minus the group's weighted mean of S. The mean is 0 for a lone row, or if all weights are 0."""
    (weight_B,) = zeroed(mask_BT.any(-1), weight_B)
    total_B = total(weight_B, group_B)
    none_B = (total_B == 0) | (sizes(mask_BT, group_B) < 2)
    return score_B - (total(weight_B * score_B, group_B) / total_B.masked_fill(none_B, 1.0)).masked_fill(none_B, 0.0)


def spread(row_B: Tensor, mask_BT: Tensor) -> Tensor:
    return row_B[:, None] * mask_BT
