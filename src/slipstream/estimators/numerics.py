"""The two numeric bounds of this package, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_FLOOR = -1e4
"""Log-probs are floored here on entry, so that log 0 never makes a NaN."""
RATIO_BOUND = 20.0
"""Every log-ratio is clamped to ± this before exp."""


def floored(logp: Tensor) -> Tensor:
    return logp.clamp(min=LOG_FLOOR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-RATIO_BOUND, RATIO_BOUND).exp()


def same_shape(**tensors: Tensor) -> torch.Size:
    """The common shape of the arguments, or a ValueError that names all of them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return next(iter(tensors.values())).shape
