"""Key/value cache and recurrent states with one slot per sequence, and the attention that reads them.

A slot is a row of the cache. Running sequences use the first slots, so a step reads a prefix of every buffer without
copies. Each sequence adds one token or a range of tokens to a step. Attention is computed block by block; a block has
sequences of similar length. The model uses a step as a Hugging Face cache: keys and values by position, and one state
per slot of each recurrent layer (linear attention, state spaces, convolutions). A recurrent state includes every token
of a row, also padding, so recurrent models need rows of equal length.

Shapes: S slots, T tokens of a step, W writes to the cache; N rows of a block, Q new tokens per row, L positions;
H heads, J key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionLayer

from slipstream.engines.native.attention import Reach, attend, check_arguments, reach_of
from slipstream.engines.native.routers import FREE

SLOTS_ATTENTION = "slipstream_slots"
BUFFER_STEP = 64
"""Buffers grow in multiples of this number of positions."""
MASKED_AT_ONCE = 1 << 25
"""Number of scores whose mask is in memory at once: that of a whole long answer would grow with its length squared."""


class Slots:
    def __init__(self, count: int, config: Any) -> None:
        self.count = count
        states = [getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers]
        self.recurrent = any(states)
        self.layers = [Layer(self, number) for number in states]
        self.step: Step | None = None
        self.last: Layer | None = None
        """Layer that is the last to write keys and values in a pass; None before the first pass."""
        self.reaches: set[Reach] = set()
        """Reaches (window or chunk limits) that the layers have used."""
        self.router_SLRX: Tensor | None = None
        """Experts that each of R routers chose in the pass over each position; None before the first are recorded."""

    def record(self, slot_W: Tensor, at_W: Tensor, router_WRX: Tensor, length: int) -> None:
        """Write routers' choices at these positions; the sequences have at most `length` tokens now."""
        buffer, shape = self.router_SLRX, router_WRX.shape[1:]
        if buffer is None or buffer.shape[1] < length:
            longer = router_WRX.new_full(
                (self.count, -(-length // BUFFER_STEP) * BUFFER_STEP, *shape), FREE, dtype=torch.int16
            )
            if buffer is not None:
                longer[:, : buffer.shape[1]] = buffer
            self.router_SLRX = buffer = longer
        buffer[slot_W, at_W] = router_WRX.to(buffer)

    def layer(self, index: int) -> Layer:
        """Return the layer with this index; add layers if the model has more layers than its config states."""
        while len(self.layers) <= index:
            self.layers.append(Layer(self, 0))
        return self.layers[index]

    def copy(self, source_M: Tensor, target_M: Tensor, *, length: int) -> None:
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer[target_M, :, :length] = buffer[source_M, :, :length]
            for state in layer.states.values():
                state[target_M] = state[source_M]
        if self.router_SLRX is not None:
            self.router_SLRX[target_M, :length] = self.router_SLRX[source_M, :length]


class Layer(LinearAttentionLayer, CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [S, J, L, D] and recurrent states [S, …] of one layer, allocated at the first write."""

    def __init__(self, slots: Slots, number_of_states: int) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.slots, self.states = slots, dict[tuple[str, int], Tensor]()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all keys and all values of the layer, [S, J, L, D]."""
        step = self.slots.step
        assert step is not None
        self.keys = self._stored(step, self.keys, key_states)
        self.values = self._stored(step, self.values, value_states)
        return self.keys, self.values

    def _stored(self, step: Step, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write the keys or values of a step into the buffer of all slots, and return the buffer, which may grow."""
        if buffer is None or buffer.shape[2] < step.length:
            longer = new.new_zeros(
                self.slots.count, new.shape[1], -(-step.length // BUFFER_STEP) * BUFFER_STEP, new.shape[3]
            )
            if buffer is not None:
                longer[:, :, : buffer.shape[2]] = buffer
            buffer = longer
        new_TJD = new.transpose(1, 2).flatten(0, 1)
        buffer[step.slot_W, :, step.at_W] = new_TJD if step.token_W is None else new_TJD[step.token_W]
        return buffer

    def get_seq_length(self) -> int:
        step = self.slots.step
        return step.length - 1 if step is not None and step.goes_on else 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def begin(self, step: Step) -> None:
        """Set up the states for a step: none for new sequences; for running ones, views that the model may update."""
        for i in range(self.number_of_states):
            self.has_previous_state[i] = step.goes_on
        for kind, views, initialized in self._kinds():
            for i in range(self.number_of_states):
                state = self.states.get((kind, i)) if step.goes_on else None
                views[i] = None if state is None else state[: len(step.slot_W)]
                initialized[i] = state is not None

    def end(self, step: Step) -> None:
        """Store the states of new sequences, and those of running sequences if the model replaced the views."""
        for kind, views, _ in self._kinds():
            for i, view in views.items():
                if view is None:
                    continue
                state = self.states.get((kind, i))
                if state is None or state.shape[1:] != view.shape[1:]:
                    state = self.states[kind, i] = view.new_zeros(self.slots.count, *view.shape[1:])
                if not step.goes_on:
                    state[step.blocks[0].slots] = view
                elif state.data_ptr() != view.data_ptr():
                    state[: len(view)] = view

    def _kinds(self) -> Iterator[tuple[str, dict[int, Any], dict[int, bool]]]:
        yield "conv", self.conv_states, self.is_conv_states_initialized
        yield "recurrent", self.recurrent_states, self.is_recurrent_states_initialized


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a step whose attention is computed together; shorter rows are padded to Q tokens."""

    slots: slice | Tensor
    """Slot of each row; a slice if the slots are adjacent, which needs no copy."""
    at_NQ: Tensor
    """Position of each token in its sequence; results at padded tokens are dropped."""
    length: int
    """Number of key positions that the attention reads, from position 0."""
    token_NQ: Tensor | None = None
    """Index of each token among the tokens of the step; None if no row is padded."""
    real_T: Tensor | None = None
    """Indices of the real tokens among the N·Q tokens of the block; None if no row is padded."""
    whole: bool = False
    """True if every row starts at position 0, so that the block needs no older keys."""
    going: bool = False
    """True if each row is the next token of a running sequence."""

    def rows_of(self, buffer_SJLD: Tensor) -> Tensor:
        if isinstance(self.slots, slice):
            return buffer_SJLD[self.slots]
        return buffer_SJLD.index_select(0, self.slots)  # four times as fast as indexing by a tensor


class Filled(Exception):
    """Raised to end a pass early, when the last layer has written its keys and values."""


class Step(Cache):  # type: ignore[misc]
    """One forward pass over the tokens of `blocks`, in the form of a Hugging Face cache."""

    def __init__(
        self,
        slots: Slots,
        blocks: Sequence[Block],
        slot_W: Tensor,
        at_W: Tensor,
        token_W: Tensor | None,
        *,
        goes_on: bool = False,
        fills: bool = False,
    ) -> None:
        """Plan writes: token `token_W` (None: each token once) goes to slot `slot_W` at position `at_W`.

        `goes_on` (recurrent models only): rows are the next tokens of running sequences, not new sequences. `fills`:
        raise `Filled` when the last layer has written its keys and values.
        """
        super().__init__(layers=slots.layers)
        self.slots, self.blocks, self.goes_on, self.fills = slots, blocks, goes_on, fills
        self.slot_W, self.at_W, self.token_W = slot_W, at_W, token_W
        self.length = max(block.length for block in blocks)
        self.going = [block.slots for block in blocks if block.going and isinstance(block.slots, slice)]
        """Slots of each block of running sequences; these are the first blocks."""
        self.masks: dict[tuple[int, Reach, int], Tensor] = {}
        self.masks_of: dict[tuple[Reach, int, int], list[tuple[slice, int, Tensor]]] = {}
        self.newest: Layer | None = None
        """Layer that has written its keys and values most recently."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.slots.step = self
        token = CURRENT_STEP.set(self)
        for layer in self.slots.layers:
            layer.begin(self)
        try:
            yield
            self.slots.last = self.newest
        finally:
            CURRENT_STEP.reset(token)
            self.slots.step = None
        for layer in self.slots.layers:
            layer.end(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.newest = self.slots.layer(layer_idx)
        states = self.newest.update(key_states, value_states)
        if self.fills and self.newest is self.slots.last:
            raise Filled
        return states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.goes_on

    def mask(self, number: int, reach: Reach, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [N, 1, heads·Q, L] of a block (−inf: hidden), cached for layers of one reach."""
        block = self.blocks[number]
        key = (-1 if block.going else number, reach, heads)
        if key not in self.masks:
            # blocks of running sequences share one mask, and each uses its own rows
            sharing = [other for other in self.blocks if other.going] if block.going else [block]
            at_NQ, length = torch.cat([each.at_NQ for each in sharing]), max(each.length for each in sharing)
            self.masks[key] = additive_mask(reach, at_NQ, length, heads, dtype)
        return self.masks[key][block.slots, :, :, : block.length] if block.going else self.masks[key]

    def masks_of_next(self, reach: Reach, j: int, heads: int, dtype: torch.dtype) -> list[tuple[slice, int, Tensor]]:
        """Return rows of slots and heads, length, and mask [N·J, heads, L] of each block of running sequences."""
        key = reach, j, heads
        if key not in self.masks_of:
            self.masks_of[key] = [
                (
                    slice(slots.start * j, slots.stop * j),
                    block.length,
                    self.mask(number, reach, heads, dtype).expand(-1, j, -1, -1).flatten(0, 1),
                )
                for number, (block, slots) in enumerate(zip(self.blocks, self.going, strict=False))
            ]
        return self.masks_of[key]


def additive_mask(reach: Reach, at_NQ: Tensor, length: int, heads: int, dtype: torch.dtype) -> Tensor:
    hidden_NQL = reach.hides(at_NQ[:, :, None], torch.arange(length, device=at_NQ.device)).repeat(1, heads, 1)
    mask_NQL = torch.zeros(hidden_NQL.shape, dtype=dtype, device=at_NQ.device)
    return mask_NQL.masked_fill_(hidden_NQL, -torch.inf)[:, None]


CURRENT_STEP: ContextVar[Step] = ContextVar("step")
"""Step of the current pass; a context variable, because some models pass no extra arguments to their attention."""


def attend_slots(
    module: nn.Module,
    query_BHRD: Tensor,
    key_SJLD: Tensor,
    value_SJLD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, R, H, D]; the B·R tokens are those of the current step, block after block."""
    check_arguments(module, attention_mask, rest)
    step, reach = CURRENT_STEP.get(), reach_of(module, sliding_window)
    step.slots.reaches.add(reach)
    b, h, r, d = query_BHRD.shape
    j = key_SJLD.shape[1]
    sinks = None if s_aux is None else s_aux.view(1, j, h // j, 1)
    out_THD = attend_blocks(
        step,
        reach,
        query_BHRD.transpose(1, 2).reshape(b * r, h, d),
        key_SJLD,
        value_SJLD,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
    )
    return out_THD.reshape(b, r, h, -1).contiguous(), None  # models take views of it


def attend_blocks(
    step: Step,
    reach: Reach,
    query_THD: Tensor,
    key_SJLD: Tensor,
    value_SJLD: Tensor,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output [T, H, D] of a step's tokens, block after block; sinks are logits [1, J, H/J, 1]."""
    h, d = query_THD.shape[1:]
    j = key_SJLD.shape[1]
    plain = softcap is None and sinks is None
    blocks, done, start = list(enumerate(step.blocks)), list[Tensor](), 0
    if plain and step.going and query_THD.dtype.itemsize >= 4:  # in half precision SDPA rounds less
        start = step.going[-1].stop
        done.append(attend_next(step, reach, query_THD[:start], key_SJLD, value_SJLD, scaling))
        blocks = blocks[len(step.going) :]
    for number, block in blocks:
        n, q = block.at_NQ.shape
        if block.token_NQ is None:
            query_NHQD = query_THD[start : start + n * q].view(n, q, h, d).transpose(1, 2)
        else:
            query_NHQD = query_THD[block.token_NQ].transpose(1, 2)
        key_NJLD, value_NJLD = (block.rows_of(buffer[:, :, : block.length]) for buffer in (key_SJLD, value_SJLD))
        if block.whole and plain and reach == Reach():
            out_NHQD = scaled_dot_product_attention(
                query_NHQD, key_NJLD, value_NJLD, is_causal=True, scale=scaling, enable_gqa=h != j
            )
        else:  # grouped heads share keys: stack their queries in one head, so that no key is copied
            parts = list[Tensor]()
            size = max(1, MASKED_AT_ONCE // (n * (h // j if plain else h) * block.length))
            split = torch.split(query_NHQD, size, 2), torch.split(block.at_NQ, size, 1)
            for part_NHQD, at_NQ in zip(*split, strict=True):
                few = part_NHQD.shape[2]
                if few == q:
                    mask_N1QL = step.mask(number, reach, h // j, query_THD.dtype)
                else:  # made anew in each layer
                    mask_N1QL = additive_mask(reach, at_NQ, block.length, h // j, query_THD.dtype)
                out_NHQD = attend(
                    part_NHQD.reshape(n, j, h // j * few, d),
                    key_NJLD,
                    value_NJLD,
                    mask_N1QL,
                    scaling=scaling,
                    softcap=softcap,
                    sinks=None if sinks is None else sinks.expand(1, j, h // j, few).reshape(1, j, -1, 1),
                )
                parts.append(out_NHQD.reshape(n, h, few, -1))  # on CUDA it is a transposed view
            out_NHQD = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        out_THD = out_NHQD.transpose(1, 2).flatten(0, 1)
        done.append(out_THD if block.real_T is None else out_THD[block.real_T])
        start += len(done[-1])
    return done[0] if len(done) == 1 else torch.cat(done)


def attend_next(
    step: Step, reach: Reach, query_NHD: Tensor, key_SJLD: Tensor, value_SJLD: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention output [N, H, D] of the next tokens of running sequences.

    With one query per row, matrix products are faster than SDPA on a CPU: they only read keys and values.
    """
    (n, h, d), j = query_NHD.shape, key_SJLD.shape[1]
    query, key, value = query_NHD.reshape(n * j, h // j, d), key_SJLD.flatten(0, 1), value_SJLD.flatten(0, 1)
    out = query.new_empty(n * j, h // j, value.shape[-1])
    scale = d**-0.5 if scaling is None else scaling
    for slots, length, mask in step.masks_of_next(reach, j, h // j, query.dtype):
        scores = torch.baddbmm(mask, query[slots], key[slots, :length].mT, alpha=scale)
        torch.bmm(scores.softmax(-1), value[slots, :length], out=out[slots])
    return out.view(n, h, -1)


AttentionInterface.register(SLOTS_ATTENTION, attend_slots)
