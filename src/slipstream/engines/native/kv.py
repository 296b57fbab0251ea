"""Keys and values of many sequences, one slot each, and the attention that reads and writes them.

Active sequences always fill the first slots, so a step works on a prefix of every buffer and the batch shrinks and
grows without copying. Sequences stand at different positions; a row's mask ends at its own. The attention is registered
with HF transformers under a name of ours, so that any model which supports attention backends decodes here unchanged,
sliding windows and grouped heads included.

Shapes: S slots, N rows of a step, Q new tokens per row, L positions, H heads, J key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.errors import ModelError

NAME = "slipstream_slots"
GROWTH = 64
"""Buffers grow by whole multiples of this many positions."""


class Slots:
    """The buffers, [S, J, L, D] per layer; made when the first keys arrive, longer when a sequence needs it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        held = self.buffers.get(index)
        if held is None or held[0].shape[2] < length:
            longer = -(-length // GROWTH) * GROWTH
            made = [like.new_zeros(self.count, like.shape[1], longer, like.shape[3]) for _ in range(2)]
            if held is not None:
                for old, new in zip(held, made, strict=True):
                    new[:, :, : old.shape[2]] = old
            held = self.buffers[index] = (made[0], made[1])
        return held

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Slots `target` become what slots `source` are, up to `length` positions."""
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer[target, :, :length] = buffer[source, :, :length]


class Step:
    """One forward pass over slots `start … start+N`: Q tokens for each row, at the given positions."""

    def __init__(self, slots: Slots, start: int, positions_NQ: Tensor, length: int) -> None:
        self.slots, self.start, self.positions_NQ, self.length = slots, start, positions_NQ, length
        self.rows = torch.arange(start, start + len(positions_NQ), device=positions_NQ.device)
        self.masks: dict[tuple[int | None, int], Tensor] = {}

    def write(self, layer: int, key_NJQD: Tensor, value_NJQD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all those of the step's rows."""
        keys, values = self.slots.layer(layer, key_NJQD, self.length)
        stop, q = self.start + len(key_NJQD), key_NJQD.shape[2]
        if q == 1:
            at = self.positions_NQ[:, 0]
            keys[self.rows, :, at] = key_NJQD[:, :, 0]
            values[self.rows, :, at] = value_NJQD[:, :, 0]
        else:  # from the beginning of every row; what lies past a shorter row is overwritten before it is seen
            keys[self.start : stop, :, :q] = key_NJQD
            values[self.start : stop, :, :q] = value_NJQD
        return keys[self.start : stop, :, : self.length], values[self.start : stop, :, : self.length]

    def mask(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """What each row does not see, as −inf: [N, 1, heads·Q, L]; queries of grouped heads lie one after the other.

        The same for every layer with the same window, and additive, because a mask of booleans is converted anew in
        every layer.
        """
        key = (window, heads)
        if key not in self.masks:
            at_L = torch.arange(self.length, device=self.positions_NQ.device)
            hidden_NQL = at_L > self.positions_NQ[:, :, None]
            if window is not None:
                hidden_NQL |= at_L <= self.positions_NQ[:, :, None] - window
            mask_NQL = torch.zeros(hidden_NQL.shape, dtype=dtype, device=at_L.device)
            self.masks[key] = mask_NQL.masked_fill_(hidden_NQL, -torch.inf).repeat(1, heads, 1)[:, None]
        return self.masks[key]


def attend(
    module: nn.Module,
    query_NHQD: Tensor,
    key_NJQD: Tensor,
    value_NJQD: Tensor,
    attention_mask: Tensor | None,
    *,
    slots_step: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if rest.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} uses {unknown[0]}, which the native sampler does not support")
    keys_NJLD, values_NJLD = slots_step.write(int(module.layer_idx), key_NJQD, value_NJQD)  # type: ignore[arg-type]
    n, h, q, d = query_NHQD.shape
    j = key_NJQD.shape[1]
    # grouped heads share keys: they become more queries of the same head, and no key is copied
    out = scaled_dot_product_attention(
        query_NHQD.reshape(n, j, h // j * q, d),
        keys_NJLD,
        values_NJLD,
        attn_mask=slots_step.mask(sliding_window, h // j, query_NHQD.dtype),
        scale=scaling,
    )
    return out.reshape(n, h, q, -1).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
