"""What a model remembers of many sequences, one slot each, and the attention that reads it.

Active sequences always fill the first slots, so a step works on a prefix of every buffer and the batch shrinks and
grows without copying. Sequences stand at different positions; a row's mask ends at its own. To the model a step is an
HF cache, so whatever it keeps there has its place: keys and values by position, and the states of layers that are
recurrent (linear attention, state spaces, convolutions), of which each slot has one.

A recurrent state has seen every token of a pass, padding too: such models take rows of one length (`Slots.recurrent`).

Shapes: S slots, N rows of a step, Q new tokens per row, L positions, H heads, J key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionLayer

from slipstream.engines.native.attention import Reach, attend, check_told, reach_of
from slipstream.engines.native.model import is_recurrent

NAME = "slipstream_slots"
GROWTH = 64
"""Buffers grow by whole multiples of this many positions."""


class Slots:
    def __init__(self, count: int, config: Any) -> None:
        self.count = count
        states = [getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers]
        self.recurrent = is_recurrent(config)
        self.layers = [Layer(self, number) for number in states]
        self.step: Step | None = None
        self.reaches: set[Reach] = set()
        """Those that layers have asked for."""

    def layer(self, index: int) -> Layer:
        """Some models have more layers than their config tells of."""
        while len(self.layers) <= index:
            self.layers.append(Layer(self, 0))
        return self.layers[index]

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Slots `target` become what slots `source` are, up to `length` positions."""
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer[target, :, :length] = buffer[source, :, :length]
            for state in layer.states.values():
                state[target] = state[source]


class Layer(LinearAttentionLayer, CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [S, J, L, D], of sizes of their own, and states [S, …]; made when the first ones arrive."""

    def __init__(self, slots: Slots, number_of_states: int) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.slots, self.states = slots, dict[tuple[str, int], Tensor]()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    # --- keys and values -------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all those of the step's rows."""
        step = self.slots.step
        assert step is not None
        self.keys, self.values = (
            self._long_enough(old, new, step.length)
            for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        rows = slice(step.start, step.start + len(key_states))
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if step.prefill:  # from the beginning of every row; what lies past a shorter one is overwritten unseen
                buffer[rows, :, : new.shape[2]] = new
            else:
                buffer[step.rows, :, step.positions_NQ[:, 0]] = new[:, :, 0]
        return self.keys[rows, :, : step.length], self.values[rows, :, : step.length]

    def _long_enough(self, held: Tensor | None, like: Tensor, length: int) -> Tensor:
        if held is not None and held.shape[2] >= length:
            return held
        made = like.new_zeros(self.slots.count, like.shape[1], -(-length // GROWTH) * GROWTH, like.shape[3])
        if held is not None:
            made[:, :, : held.shape[2]] = held
        return made

    def get_seq_length(self) -> int:
        step = self.slots.step
        return 0 if step is None or step.prefill else step.length - 1

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    # --- states ----------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """A prefill starts from nothing; decoding from the slots themselves, which the model then writes to."""
        for kind, held, known in self._kinds():
            for i in range(self.number_of_states):
                state = self.states.get((kind, i))
                on = state is not None and not step.prefill
                held[i] = state[step.start : step.start + len(step.rows)] if state is not None and on else None
                known[i] = self.has_previous_state[i] = on

    def end(self, step: Step) -> None:
        """Keep what a prefill left, and what decoding put elsewhere than into the slots."""
        for kind, held, _ in self._kinds():
            for i, found in held.items():
                if found is None:
                    continue
                state = self.states.get((kind, i))
                if state is None or state.shape[1:] != found.shape[1:]:
                    state = self.states[kind, i] = found.new_zeros(self.slots.count, *found.shape[1:])
                mine = state[step.start : step.start + len(found)]
                if mine.data_ptr() != found.data_ptr():
                    mine.copy_(found)

    def _kinds(self) -> Iterator[tuple[str, dict[int, Any], dict[int, bool]]]:
        yield "conv", self.conv_states, self.is_conv_states_initialized
        yield "recurrent", self.recurrent_states, self.is_recurrent_states_initialized


class Step(Cache):  # type: ignore[misc]
    """One forward pass over slots `start … start+N`: whole prefixes of rows, or one more token for each."""

    def __init__(self, slots: Slots, start: int, positions_NQ: Tensor, length: int, *, prefill: bool) -> None:
        super().__init__(layers=slots.layers)
        self.slots, self.start, self.positions_NQ = slots, start, positions_NQ
        self.length, self.prefill = length, prefill
        self.rows = torch.arange(start, start + len(positions_NQ), device=positions_NQ.device)
        self.masks: dict[tuple[Reach, int], Tensor] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.slots.step = self
        token = CURRENT.set(self)
        for layer in self.slots.layers:
            layer.begin(self)
        try:
            yield
        finally:
            CURRENT.reset(token)
            self.slots.step = None
        for layer in self.slots.layers:
            layer.end(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.slots.layer(layer_idx).update(key_states, value_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self.prefill

    def mask(self, reach: Reach, heads: int, dtype: torch.dtype) -> Tensor:
        """What each row does not see, as −inf: [N, 1, heads·Q, L]; queries of grouped heads lie one after the other.

        The same for every layer with the same reach, and additive, because a mask of booleans is converted anew in
        every layer.
        """
        key = (reach, heads)
        if key not in self.masks:
            self.slots.reaches.add(reach)
            at_L = torch.arange(self.length, device=self.positions_NQ.device)
            hidden_NQL = reach.hides(self.positions_NQ[:, :, None], at_L)
            mask_NQL = torch.zeros(hidden_NQL.shape, dtype=dtype, device=at_L.device)
            self.masks[key] = mask_NQL.masked_fill_(hidden_NQL, -torch.inf).repeat(1, heads, 1)[:, None]
        return self.masks[key]


CURRENT: ContextVar[Step] = ContextVar("step")
"""The pass that this thread makes: not every model hands arguments of ours on to its attention."""


def attend_slots(
    module: nn.Module,
    query_NHQD: Tensor,
    key_NJLD: Tensor,
    value_NJLD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    check_told(module, attention_mask, rest)
    step = CURRENT.get()
    n, h, q, d = query_NHQD.shape
    j = key_NJLD.shape[1]
    # grouped heads share keys: they become more queries of the same head, and no key is copied
    out = attend(
        query_NHQD.reshape(n, j, h // j * q, d),
        key_NJLD,
        value_NJLD,
        step.mask(reach_of(module, sliding_window), h // j, query_NHQD.dtype),
        scaling=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.view(1, j, h // j, 1, 1).expand(1, j, h // j, q, 1).reshape(1, j, -1, 1),
    )
    return out.reshape(n, h, q, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend_slots)
