"""Statistics of rows within groups, and of tokens within the batch. Rows without valid tokens are ignored.

Arithmetic is in float64. Shapes: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

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
