"""Reduction of token losses to one number. Counts are arguments, so that a batch may be cut anywhere.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from slipstream.estimators.numerics import same_shape
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.policy import Mode


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
    """Sum the masked losses and divide by the counts of the global batch.

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
