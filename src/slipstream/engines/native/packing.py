"""From samples of different lengths to rectangular micro-batches, and back to rows of predictions.

Right-padded with causal attention: no real token ever sees a pad, so no mask is needed and the fast kernels apply.

Shapes: B rows, L positions, N predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.records import Rollout

Array = NDArray[Any]
MOST_PADDED = 1.25
"""A micro-batch of several samples costs at most this times its real tokens."""


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of samples, longest first, in batches that are padded to at most `budget` tokens and MOST_PADDED."""
    batch: list[int] = []
    longest = tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padded = (len(batch) + 1) * longest
        if batch and (padded > budget or padded > MOST_PADDED * (tokens + lengths[i])):
            yield batch
            batch, tokens = [], 0
        if not batch:
            longest = lengths[i]
        batch.append(i)
        tokens += lengths[i]
    if batch:
        yield batch


def full_length(rollout: Rollout) -> int:
    return len(rollout.prompt.tokens) + len(rollout.tokens)


def padded(rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
    """Prompt and response of each sample as a row of ids."""
    ids_BL = np.zeros((len(rollouts), max(map(full_length, rollouts))), np.int64)
    for row, rollout in zip(ids_BL, rollouts, strict=True):
        prompt = rollout.prompt.tokens
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(rollout.tokens)] = rollout.tokens
    return torch.from_numpy(ids_BL).to(device)


def predictions(hidden_BLH: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """The hidden states that predict the response tokens, sample after sample: [N, H]."""
    length = hidden_BLH.shape[1]
    flat = []
    for row, rollout in enumerate(rollouts):
        first = row * length + len(rollout.prompt.tokens) - 1
        flat.append(np.arange(first, first + len(rollout.tokens)))
    index_N = torch.from_numpy(np.concatenate(flat)).to(hidden_BLH.device)
    return hidden_BLH.flatten(0, 1)[index_N]


def joined(arrays: Sequence[Array], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Per-token arrays of several samples, one after the other."""
    return torch.from_numpy(np.concatenate(arrays)).to(device, dtype)
