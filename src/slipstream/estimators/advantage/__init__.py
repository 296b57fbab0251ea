"""Advantages of tokens from rewards: how much better a sample is than expected.

`groups` labels the rows: rows with the same label answer the same prompt. Rows without valid tokens (empty or rejected)
are ignored in group sizes and baselines. A row that is alone in its group has baseline 0. Rewards at masked positions
are ignored; results are 0 at them. Arithmetic is in float64. Results have the dtype of the rewards, at least float32.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.advantage.grouping import Rows
from slipstream.estimators.numerics import zeroed
from slipstream.estimators.options import check_options, unknown
from slipstream.estimators.ratio import same_rows
from slipstream.estimators.tables.advantage import ADVANTAGES


def advantage(name: str, rewards_BT: Tensor, mask_BT: Tensor, *, groups: Tensor, **kw: Any) -> Tensor:
    """Return the advantages [B, T] by an estimator of `ADVANTAGES`, with its options `kw`."""
    if name not in ADVANTAGES:
        raise unknown("advantage", name, ADVANTAGES)
    function = ADVANTAGES[name].function
    same_rows(rewards=rewards_BT, mask=mask_BT)
    if groups.shape != mask_BT.shape[:1]:
        raise ValueError(f"groups {tuple(groups.shape)} must be [B] with B = {len(mask_BT)}")
    check_options(name, kw, function)
    dtype = torch.promote_types(rewards_BT.dtype, torch.float32)
    valid_BT = mask_BT != 0
    (rewards,) = zeroed(valid_BT, rewards_BT.detach().double())
    advantage_BT: Tensor = function(Rows(rewards, valid_BT, torch.unique(groups, return_inverse=True)[1]), **kw)
    return (advantage_BT * valid_BT).to(dtype)
