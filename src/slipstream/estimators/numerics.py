"""Numeric bounds, argument checks, and the reduction of token losses to one number, shared by all estimators.

Shapes: B rows, T positions.
"""

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.estimators.options import unknown
from slipstream.estimators.tables.policy import Mode

LOG_FLOOR = -1e4
"""Lowest log-prob. Estimators raise their inputs to this value, so that log 0 never produces NaN."""
RATIO_BOUND = 20.0
"""Bound of log-ratios, which are clamped to ± this value before exp."""
BINS = 100
"""Number of bins of a histogram for a factor of e between ratios."""


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
    result: Tensor = _Bounded.apply(x, least, most)  # type: ignore[no-untyped-call]
    return result


def with_gradient(value: Tensor, by: Tensor) -> Tensor:
    return value.detach() + (by - by.detach())


def floored(logp: Tensor) -> Tensor:
    """Return log-probs in at least float32, raised to at least LOG_FLOOR. The gradient is not changed."""
    return bounded(logp.to(torch.promote_types(logp.dtype, torch.float32)), LOG_FLOOR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to e^±20. The gradient is that of exp."""
    return bounded(log_ratio, -RATIO_BOUND, RATIO_BOUND).exp()


def histogram(ratios: Tensor, keep: Tensor) -> Tensor:
    """Count ratios where `keep` is True by their logarithm, in bins of 0.01 between ± 20; NaN counts as ratio 0.

    Histograms of parts add up. The function does not wait for the GPU.
    """
    places = (ratios.double().nan_to_num().log().clamp(-RATIO_BOUND, RATIO_BOUND) + RATIO_BOUND) * BINS
    counts = torch.zeros(int(2 * RATIO_BOUND * BINS) + 1, dtype=torch.int64, device=ratios.device)
    return counts.index_add_(0, places.round().long().flatten(), keep.flatten().long())


def percentile_99(counts: Tensor) -> float:
    """Return the ratio that 99 % of the counted ratios do not exceed, with a relative error of at most 0.5 %."""
    least = -(-99 * int(counts.sum()) // 100)
    place = int(torch.searchsorted(counts.cumsum(0), least))
    return math.exp(place / BINS - RATIO_BOUND)


def same_shape(**tensors: Tensor) -> torch.Size:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return next(iter(tensors.values())).shape


def same_rows(**tensors: Tensor) -> None:
    """Raise a ValueError unless all arguments are [B, T] of one shape: one row for each sample, without packing."""
    if len(shape := same_shape(**tensors)) != 2:
        raise ValueError(f"{', '.join(tensors)} must be [B, T], one row per sample, got {tuple(shape)}")


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


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: Mode,
    *,
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """Sum the masked losses and divide by the counts of the global batch, so that a batch may be cut anywhere.

    Counts of None are computed from this mask, over non-empty rows. `token-sum` divides by nothing. `…-norm` also
    divides by `scale`, by default the number of positions T of a whole batch (Dr. GRPO, 2503.20783).
    `seq-mean-token-mean` averages each row first, so all rows have equal weight. If several rows are one sequence,
    `sequence_tokens` [B] is the number of tokens of the whole sequence, and `n_sequences` the number of sequences.
    """
    same_shape(loss=loss_BT, mask=mask_BT)
    if mode not in get_args(Mode):
        raise unknown("aggregation", mode, get_args(Mode))
    if mode == "seq-mean-token-sum-norm" and n_sequences is not None and scale is None:
        raise ValueError(f"{mode} of a part of a batch needs scale=…: T of the part is not T of the batch")
    loss_BT = loss_BT.to(torch.promote_types(loss_BT.dtype, torch.float32))
    mask_BT = mask_BT.to(loss_BT.dtype)
    # masked positions may hold any value, even NaN, and must not contribute
    row_sum_B = loss_BT.masked_fill(mask_BT == 0, 0.0).mul(mask_BT).sum(-1)
    row_tokens_B = mask_BT.sum(-1)
    # an empty batch has loss 0 and not 0/0
    n_tokens = max(float(row_tokens_B.sum()) if n_tokens is None else n_tokens, 1.0)
    n_sequences = max(float((row_tokens_B > 0).sum()) if n_sequences is None else n_sequences, 1.0)
    match mode:
        case "token-mean":
            return row_sum_B.sum() / n_tokens
        case "token-sum":
            return row_sum_B.sum()
        case "seq-mean-token-sum":
            return row_sum_B.sum() / n_sequences
        case "seq-mean-token-sum-norm":
            return row_sum_B.sum() / n_sequences / (loss_BT.shape[-1] if scale is None else scale)
        case "seq-mean-token-mean":
            tokens_B = row_tokens_B if sequence_tokens is None else sequence_tokens.to(row_tokens_B)
            return (row_sum_B / tokens_B.clamp(min=1)).sum() / n_sequences
    raise AssertionError(mode)


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors of any device as floats, in one transfer."""
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
