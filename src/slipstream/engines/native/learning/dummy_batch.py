"""What a rank computes that has nothing to compute: layers are gathered, and gradients added, by all ranks together.

Two tokens, and a loss through which every weight gets a gradient of exactly zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.packing import Item, MicroBatch
from slipstream.engines.native.rows import Rows
from slipstream.estimators.logprobs.head import Head
from slipstream.records import Prompt, Rollout

ONE_TOKEN = np.zeros(1, np.int64)
ROLLOUT = Rollout(
    prompt=Prompt(id="dummy", number=-1, tokens=ONE_TOKEN),
    index=0,
    tokens=ONE_TOKEN,
    versions=ONE_TOKEN,
    logp=np.zeros(1),
    actions=np.zeros((1, 1), np.int64),
    action_logp=np.zeros((1, 1)),
    finish="length",
    loss_mask=np.ones(1, np.bool_),
)
ITEM = Item(prompt=1, responses=(1,), members=(0,))


def dummy_batch(packed: bool, device: torch.device) -> Rows:
    return Rows([ROLLOUT], MicroBatch(((ITEM,),), packed), device)


def nothing(hidden_NH: Tensor, head: Head) -> Tensor:
    loss: Tensor = 0.0 * head(hidden_NH).sum()
    return loss
