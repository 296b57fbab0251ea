"""What every estimator shares: the numeric bounds, and the checks at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOG_FLOOR = -1e4
"""Log-probs are floored here on entry, so that log 0 never makes a NaN."""
RATIO_BOUND = 20.0
"""Every log-ratio is clamped to ± this before exp."""


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float, most: float | None) -> Tensor:
        return x.clamp(least, most)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return outputs[0], None, None


def bounded(x: Tensor, least: float, most: float | None = None) -> Tensor:
    """x within bounds, and its gradient without them: a number must stay finite, but no token may fall silent for it.

    Where silence beyond a bound is meant, as in a trust region, that is what `Tensor.clamp` is for.
    """
    found: Tensor = _Bounded.apply(x, least, most)  # type: ignore[no-untyped-call]
    return found


def carried(value: Tensor, by: Tensor) -> Tensor:
    """The value of one, the gradient of the other."""
    return value.detach() + (by - by.detach())


def floored(logp: Tensor) -> Tensor:
    """Log-probs as every formula takes them: at least float32, at least the floor."""
    return bounded(logp.to(torch.promote_types(logp.dtype, torch.float32)), LOG_FLOOR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """A ratio within e^±20, whose slope is itself."""
    return bounded(log_ratio, -RATIO_BOUND, RATIO_BOUND).exp()


def same_shape(**tensors: Tensor) -> torch.Size:
    """The common shape of the arguments, or a ValueError that names all of them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return next(iter(tensors.values())).shape


def same_matrix(**tensors: Tensor) -> None:
    """The arguments are matrices of one shape, positions by actions: a vector would be taken for one position."""
    if len(shape := same_shape(**tensors)) != 2:
        raise ValueError(f"{', '.join(tensors)} must have two dimensions, positions by actions, got {tuple(shape)}")


def blanked(keep: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The tensors with 0 wherever `keep` is 0: no gradient there, whatever stood there (NaN too).

    `keep` has the leading dimensions of the tensors. For estimators that take no mask: their loss on zeros is 0.
    """
    out = []
    for tensor in tensors:
        if tensor.shape[: keep.ndim] != keep.shape:
            raise ValueError(f"keep {tuple(keep.shape)} must lead the shape {tuple(tensor.shape)}")
        out.append(tensor.masked_fill((keep == 0).reshape(*keep.shape, *[1] * (tensor.ndim - keep.ndim)), 0.0))
    return out


def joined(arrays: Sequence[NDArray[Any]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Per-token arrays of several samples, one after the other."""
    return torch.from_numpy(np.concatenate(arrays)).to(device, dtype)
