"""Numeric bounds and argument checks shared by all estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOG_FLOOR = -1e4
"""Lowest log-prob. Estimators raise their inputs to this value, so that log 0 never produces NaN."""
RATIO_BOUND = 20.0
"""Bound of log-ratios, which are clamped to ± this value before exp."""


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float, most: float | None) -> Tensor:
        return x.clamp(least, most)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return outputs[0], None, None


def bounded(x: Tensor, least: float, most: float | None = None) -> Tensor:
    """Clamp x to bounds and pass the gradient unchanged: values stay finite, and every token keeps its gradient.

    Use `Tensor.clamp` if the gradient beyond a bound must be 0, as in a trust region.
    """
    found: Tensor = _Bounded.apply(x, least, most)  # type: ignore[no-untyped-call]
    return found


def with_gradient(value: Tensor, by: Tensor) -> Tensor:
    return value.detach() + (by - by.detach())


def floored(logp: Tensor) -> Tensor:
    """Return log-probs in at least float32, raised to at least LOG_FLOOR. The gradient is not changed."""
    return bounded(logp.to(torch.promote_types(logp.dtype, torch.float32)), LOG_FLOOR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to e^±20. The gradient is that of exp."""
    return bounded(log_ratio, -RATIO_BOUND, RATIO_BOUND).exp()


def same_shape(**tensors: Tensor) -> torch.Size:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return next(iter(tensors.values())).shape


def same_matrix(**tensors: Tensor) -> None:
    if len(shape := same_shape(**tensors)) != 2:
        raise ValueError(f"{', '.join(tensors)} must have two dimensions, positions by actions, got {tuple(shape)}")


def zeroed(keep: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with 0 where `keep` is 0. The gradient is 0 at these positions, even if the values were NaN.

    `keep` has the leading dimensions of the tensors. Estimators that take no mask return loss 0 for zeros.
    """
    out = []
    for tensor in tensors:
        if tensor.shape[: keep.ndim] != keep.shape:
            raise ValueError(f"keep {tuple(keep.shape)} must lead the shape {tuple(tensor.shape)}")
        out.append(tensor.masked_fill((keep == 0).reshape(*keep.shape, *[1] * (tensor.ndim - keep.ndim)), 0.0))
    return out


def joined(arrays: Sequence[NDArray[Any]], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device, dtype)
