"""The output head of a language model, and two passes over a tile of its raw products, limited by memory bandwidth.

`Head` is the output layer, and `Bend` turns a product into a logit, with the scale and the cap of some models. `fold`
reads a tile once and returns each row's log-sum-exp. `to_gradient` turns a tile in place into the gradient with respect
to the products. Both process parts of a tile that fit the cache, so that a tile in low precision is never stored in
float32. `tiles_triton` has both functions for CUDA.

Shapes: C rows, W columns of a tile, P columns of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.estimators.products import linear

PART_LOGITS = 1 << 20
"""Number of logits of a tile that are processed at a time."""
LOWEST_BIAS = -1e30
"""Replacement for a bias of −inf, which padded vocabularies have: probability 0, and 0 · x stays 0."""


class Bend(NamedTuple):
    """Function from x = product + bias to a logit: scale·x, or cap·tanh(scale·x / cap), divided by the temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        if self.cap is not None:
            return (x * (self.scale / self.cap)).tanh_() * (self.cap / self.temperature)
        factor = self.scale / self.temperature
        return x if factor == 1.0 else x * factor

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of a logit with respect to its product."""
        factor = self.scale / self.temperature
        if self.cap is None:
            return factor
        return (1 - (logits * (self.temperature / self.cap)).square_()).mul_(factor)


def wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass(frozen=True)
class Head:
    """Head with logits = cap · tanh(scale · (hidden · weightᵀ + bias) / cap); without a cap only scaled."""

    linear: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @property
    def bend(self) -> dict[str, Any]:
        return {"scale": self.scale, "cap": self.cap}

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden state, weight and bias in the lower of the two precisions of hidden state and weight."""
        dtype = min(hidden.dtype, self.weight.dtype, key=lambda each: each.itemsize)
        return hidden.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return logits by the given or the head's own weights. Scaled or capped logits are in at least float32."""
        own = self.inputs(hidden)
        if weight is not None:
            x = linear(own[0], weight, bias)
        else:
            x = self.linear.forward(own[0]) if own[1] is self.weight else linear(*own)
        if self.scale == 1.0 and self.cap is None:
            return x
        return Bend(1.0, self.scale, self.cap).logits(x.to(wide(x)))

    def to(self, device: torch.device) -> Head:
        return Head(self.linear.to(device), self.scale, self.cap)


def fold(tile_CW: Tensor, bias_W: Tensor | None, bend: Bend, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """Return for every row the log-sum-exp of its logits and, with `entropy`, their mean under softmax (else 0)."""
    lse_C = tile_CW.new_full((len(tile_CW),), -torch.inf, dtype=wide(tile_CW))
    mean_C = torch.zeros_like(lse_C)
    for columns in _parts(tile_CW):
        x_CP = _logits(tile_CW, bias_W, bend, columns)
        part_C, inner_C = _with_mean(x_CP) if entropy else (x_CP.logsumexp(1), mean_C)
        lse_C, mean_C = merge(lse_C, mean_C, part_C, inner_C)
    return lse_C, mean_C


def _with_mean(x_CP: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and mean under softmax of each row, with only one exp."""
    most_C1 = x_CP.amax(1, keepdim=True)
    weight_CP = (x_CP - most_C1).exp_()
    sum_C = weight_CP.sum(1)
    return most_C1[:, 0] + sum_C.log(), torch.linalg.vecdot(weight_CP, x_CP) / sum_C


def merge(lse_C: Tensor, mean_C: Tensor, other_lse_C: Tensor, other_mean_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `fold` for two tiles of the same rows together."""
    both_C = torch.logaddexp(lse_C, other_lse_C)
    mean_C = (lse_C - both_C).exp() * mean_C + (other_lse_C - both_C).exp() * other_mean_C
    return both_C, mean_C


def to_gradient(
    tile_CW: Tensor,
    bias_W: Tensor | None,
    bend: Bend,
    *,
    lse_C: Tensor,
    total_C: Tensor,
    entropy_C: Tensor | None = None,
    grad_entropy_C: Tensor | None = None,
) -> None:
    """Replace the tile by p · (−total − (log p + entropy) · ∂entropy) · slope, in place.

    This is the gradient with respect to the products, without the part of the chosen ids themselves. `total` is the sum
    of the gradients of the log-probs; ∂entropy is the gradient of the entropy.
    """
    for columns in _parts(tile_CW):
        x_CP = _logits(tile_CW, bias_W, bend, columns)
        logp_CP = x_CP - lse_C[:, None]
        factor_CP = -total_C[:, None]
        if entropy_C is not None and grad_entropy_C is not None:
            factor_CP = factor_CP - (logp_CP + entropy_C[:, None]) * grad_entropy_C[:, None]
        tile_CW[:, columns] = logp_CP.exp_().mul_(factor_CP).mul_(bend.slope(x_CP))


def slices(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _parts(tile_CW: Tensor) -> Iterator[slice]:
    rows, width = tile_CW.shape
    return slices(width, max(1, PART_LOGITS // rows))


def _logits(tile_CW: Tensor, bias_W: Tensor | None, bend: Bend, columns: slice) -> Tensor:
    x_CP = tile_CW[:, columns].to(wide(tile_CW))
    if bias_W is not None:
        x_CP = (x_CP + bias_W[columns]).clamp(min=LOWEST_BIAS)
    return bend.logits(x_CP)
