"""A dummy batch of two tokens for ranks that have no samples left: all ranks must make equally many passes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.packing import Item, MicroBatch
from slipstream.engines.native.rows import Rows
from slipstream.estimators.logprobs.head import Head
from slipstream.records import Prompt, one_turn

ONE_TOKEN = np.zeros(1, np.int64)
ROLLOUT = one_turn(
    Prompt(id="dummy", number=-1, tokens=ONE_TOKEN),
    0,
    actions=ONE_TOKEN[:, None],
    action_logp=np.zeros((1, 1)),
    versions=ONE_TOKEN,
    finish="length",
)
ITEM = Item(prompt=1, responses=(1,), members=(0,))


def dummy_batch(packed: bool, device: torch.device) -> Rows:
    return Rows([ROLLOUT], MicroBatch(((ITEM,),), packed), device)


def nothing(hidden_NH: Tensor, head: Head) -> Tensor:
    """Return a loss that gives every weight a gradient of exactly zero."""
    loss: Tensor = 0.0 * head(hidden_NH).sum()
    return loss
