"""From per-token losses to one number. Counts are given, so that a batch may be cut anywhere.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from slipstream.estimators.numerics import same_shape

Mode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: Mode,
    *,
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Sum the masked losses and divide by the counts of the global batch.

    Without counts they are taken from this mask, over non-empty rows. `token-sum` divides by nothing. `…-norm` also
    divides by `scale`, the number of positions T by default (Dr. GRPO, 2503.20783). `seq-mean-token-mean` averages each
    row first, so short rows weigh as much as long ones.
    """
    same_shape(loss=loss_BT, mask=mask_BT)
    mask_BT = mask_BT.to(loss_BT.dtype)
    # a masked position may hold anything, NaN included, and still counts for nothing
    row_sum_B = loss_BT.masked_fill(mask_BT == 0, 0.0).mul(mask_BT).sum(-1)
    row_tokens_B = mask_BT.sum(-1)
    if n_tokens is None:
        n_tokens = max(float(row_tokens_B.sum()), 1.0)
    if n_sequences is None:
        n_sequences = max(float((row_tokens_B > 0).sum()), 1.0)
    match mode:
        case "token-mean":
            return row_sum_B.sum() / n_tokens
        case "token-sum":
            return row_sum_B.sum()
        case "seq-mean-token-sum":
            return row_sum_B.sum() / n_sequences
        case "seq-mean-token-sum-norm":
            return row_sum_B.sum() / n_sequences / (scale or loss_BT.shape[-1])
        case "seq-mean-token-mean":
            return (row_sum_B / row_tokens_B.clamp(min=1)).sum() / n_sequences
    raise ValueError(f"unknown aggregation {mode!r}; choose one of {', '.join(get_args(Mode))}")
