"""Packed rows on the device, and the attention that keeps their items apart.

Every token has a tree (its item), a branch (0: the prompt, 1 … G: a response) and a position, which every response
begins anew after the prompt. A query sees a key of the same tree, of the prompt or of its own branch, that is not
behind it, nor a window or more before it. So every response is computed as if it were alone with its prompt, whatever
lies beside it, and the prompt once. A pad is a tree of its own: it sees itself, and nothing is ever NaN.

On the CPU, queries go in blocks, each with only those keys that any of its queries sees: whatever the length of a row,
little is computed to be masked away. On CUDA, FlexAttention does the same from the same three index tensors.

Shapes: R rows, L positions, Q queries of a block, K keys of a block, H heads, J key/value heads, D head size,
N predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.packing import Item, MicroBatch
from slipstream.errors import ModelError, first_line
from slipstream.records import Ints, Prompt, Rollout

NAME = "slipstream_rows"
BLOCK = 128
"""Queries whose attention is computed together on the CPU."""


class Block(NamedTuple):
    """Queries start … stop of every row, the keys that they need, and which they do not see, as −inf."""

    start: int
    stop: int
    keys: Tensor | None
    """Places of the keys in the flattened rows, [R·K]; None: all up to `stop`."""
    mask_R1QK: Tensor


class Rows:
    """One micro-batch, ready for the model."""

    def __init__(self, rollouts: Sequence[Rollout], batch: MicroBatch, device: torch.device) -> None:
        shape = rows, length = len(batch.rows), batch.length
        ids_RL, position_RL, branch_RL = (np.zeros(shape, np.int64) for _ in range(3))
        tree_RL = np.tile(-1 - np.arange(length), (rows, 1))
        predict: list[Ints] = []
        for r, row in enumerate(batch.rows):
            start = 0
            for tree, item in enumerate(row):
                stop = start + item.tokens
                ids_RL[r, start:stop] = _tokens_of(item, rollouts)
                tree_RL[r, start:stop] = tree
                branch_RL[r, start:stop], position_RL[r, start:stop] = _branches(item)
                predict.append(r * length + start + _predictors(item))
                start = stop
        self.packed = batch.packed
        self.ids_RL, self.position_RL, self.branch_RL, self.tree_RL, self.predict_N = (
            torch.from_numpy(array).to(device)
            for array in (ids_RL, position_RL, branch_RL, tree_RL, np.concatenate(predict))
        )
        self.blocks: dict[tuple[int | None, torch.dtype], list[Block]] = {}
        self.block_masks: dict[int | None, BlockMask] = {}

    def hidden(self, backbone: nn.Module) -> Tensor:
        """The hidden states that predict the response tokens, sample after sample as in `members`."""
        options: dict[str, Any] = {}
        if self.packed:
            assert _attention(backbone) == NAME, "packed rows for a model that use_rows has not seen"
            options = {"position_ids": self.position_RL, "rows": self}
        hidden_RLH: Tensor = backbone(input_ids=self.ids_RL, use_cache=False, **options).last_hidden_state
        return hidden_RLH.flatten(0, 1).index_select(0, self.predict_N)

    @property
    def windows(self) -> set[int | None]:
        """Those that layers have asked for."""
        return {*self.block_masks, *(window for window, _ in self.blocks)}

    def sees(self, window: int | None) -> Callable[..., Tensor]:
        """Which queries see which keys, at indices that broadcast; in the form that FlexAttention compiles."""
        tree_RL, branch_RL, position_RL = self.tree_RL, self.branch_RL, self.position_RL

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            branch = branch_RL[row, key]
            ahead = position_RL[row, query] - position_RL[row, key]
            behind = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
            same = (branch == 0) | (branch == branch_RL[row, query])
            return (tree_RL[row, query] == tree_RL[row, key]) & same & behind

        return seen

    def blocked(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """The same for every layer with the same window, and additive: booleans are converted anew in every layer."""
        if (window, dtype) not in self.blocks:
            length = self.ids_RL.shape[1]
            starts = range(0, length, BLOCK)
            self.blocks[window, dtype] = [self._block(s, min(s + BLOCK, length), window, dtype) for s in starts]
        return self.blocks[window, dtype]

    def _block(self, start: int, stop: int, window: int | None, dtype: torch.dtype) -> Block:
        rows, length = self.ids_RL.shape
        index = torch.arange(stop, device=self.ids_RL.device)
        row_R11 = torch.arange(rows, device=index.device)[:, None, None]
        seen_RQL = self.sees(window)(row_R11, row_R11, index[start:, None], index)
        needed_RL = seen_RQL.any(1)
        most = int(needed_RL.sum(1).max())
        keys = None
        if most < stop:
            # the needed keys of every row in their order, then some that no query of the block sees
            key_RK = needed_RL.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
            seen_RQL = seen_RQL.gather(2, key_RK[:, None].expand(-1, stop - start, -1))
            keys = (key_RK + length * row_R11[:, 0]).flatten()
        mask_RQK = torch.zeros(seen_RQL.shape, dtype=dtype, device=index.device)
        return Block(start, stop, keys, mask_RQK.masked_fill_(~seen_RQL, -torch.inf)[:, None])

    def block_mask(self, window: int | None) -> BlockMask:
        if window not in self.block_masks:
            rows, length = self.ids_RL.shape
            make = _compiled(create_block_mask) if self.ids_RL.is_cuda else create_block_mask
            made = make(self.sees(window), rows, None, length, length, device=self.ids_RL.device)
            self.block_masks[window] = made
        return self.block_masks[window]


def _tokens_of(item: Item, rollouts: Sequence[Rollout]) -> Ints:
    prompt = rollouts[item.members[0]].prompt.tokens
    return np.concatenate([prompt, *[rollouts[i].tokens for i in item.members]])


def _branches(item: Item) -> tuple[Ints, Ints]:
    """Branch and position of every token."""
    branch = np.repeat(np.arange(1 + len(item.responses)), [item.prompt, *item.responses])
    position = [np.arange(item.prompt), *[item.prompt + np.arange(length) for length in item.responses]]
    return branch, np.concatenate(position)


def _predictors(item: Item) -> Ints:
    """The tokens of the item that predict its responses: the one before, but of each first the prompt's last."""
    before = np.arange(item.prompt, item.tokens) - 1
    before[np.cumsum([0, *item.responses[:-1]])] = item.prompt - 1
    return before


def _attention(backbone: nn.Module) -> Any:
    return getattr(backbone.config, "_attn_implementation", None)


# --- the attention ---------------------------------------------------------------------------------------


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def attend(
    module: nn.Module,
    query_RHLD: Tensor,
    key_RJLD: Tensor,
    value_RJLD: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if rest.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} uses {unknown[0]}")
    # under autocast, rotary embeddings leave queries and keys in float32
    query_RHLD, key_RJLD = query_RHLD.to(value_RJLD.dtype), key_RJLD.to(value_RJLD.dtype)
    if query_RHLD.is_cuda:
        flex, mask = _compiled(flex_attention), rows.block_mask(sliding_window)
        out_RHLD = flex(query_RHLD, key_RJLD, value_RJLD, block_mask=mask, scale=scaling, enable_gqa=True)
        return out_RHLD.transpose(1, 2).contiguous(), None
    return _by_blocks(query_RHLD, key_RJLD, value_RJLD, rows.blocked(sliding_window, value_RJLD.dtype), scaling), None


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scaling: float | None) -> Tensor:
    """[R, L, H, D]"""
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value)]
    out = []
    for start, stop, keys, mask_R1QK in blocks:
        if keys is None:
            k, v = key[:, :, :stop], value[:, :, :stop]
        else:
            k, v = (x.index_select(0, keys).reshape(len(key), -1, *x.shape[1:]).transpose(1, 2) for x in flat)
        q = query[:, :, start:stop]
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask_R1QK, scale=scaling, enable_gqa=True)
        out.append(o.transpose(1, 2))
    return torch.cat(out, 1)


# --- does this model do what its rows say? ---------------------------------------------------------------


def use_rows(lm: LanguageModel, *, field: str = "learner.packing") -> None:
    """Give the model this attention, and see that it answers as before; `field` is what to turn off if it does not."""
    former = _attention(lm.backbone)
    if former == NAME:
        return
    training = lm.model.training
    lm.model.eval()  # with dropout, nothing equals anything
    reason = _obstacle(lm.model.config.get_text_config()) or _failure(lm)
    lm.model.train(training)
    if reason:
        lm.model.set_attn_implementation(former)
        kind = type(lm.model).__name__
        raise ModelError(f"{lm.name}: {kind} cannot take packed rows: {reason}: write {field} = false")


@torch.no_grad()
def _failure(lm: LanguageModel) -> str | None:
    """Two sequences, and a prompt with two responses: packed, and one by one with the attention the model came with."""
    rollouts, packed, apart = _probe(lm.vocab_size)
    rows = Rows(rollouts, packed, lm.device)
    expected = [Rows(rollouts, batch, lm.device).hidden(lm.backbone) for batch in apart]
    lm.model.set_attn_implementation(NAME)  # a model that cannot tells a log only
    if _attention(lm.backbone) != NAME:
        return "its attention cannot be replaced"
    try:
        found = torch.split(rows.hidden(lm.backbone), [len(part) for part in expected])
    except (ModelError, TypeError, ValueError, NotImplementedError) as error:
        return first_line(error)
    if _slides(lm.model.config.get_text_config()) and not rows.windows - {None}:
        return "its attention is not told of the sliding window"
    difference = _difference(found, expected)
    if not difference <= (1e-3 if lm.head.weight.dtype.itemsize >= 4 else 0.1):
        return f"a sequence among others differs by {difference:.1%} from the same sequence alone"
    return None


def _obstacle(config: Any) -> str | None:
    """Attention in chunks of thousands, say, which so short a probe does not see."""
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    return f"it has {min(kinds)} layers" if kinds else None


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative, of the middle token of the worst sequence: in half precision, a router that turns moves a token far."""
    errors = [
        (f.double() - e.double()).norm(dim=-1) / e.double().norm(dim=-1) for f, e in zip(found, expected, strict=True)
    ]
    return max(float(error_T.median()) for error_T in errors)


def _probe(vocabulary: int) -> tuple[list[Rollout], MicroBatch, list[MicroBatch]]:
    """Four samples; together, the last two with one prompt, and each alone."""
    rollouts = []
    for number, index, prompt, response in [(0, 0, 5, 6), (1, 0, 3, 9), (2, 0, 4, 8), (2, 1, 4, 5)]:
        ids = (np.arange(prompt + response) * (5 + 2 * index) + 3 * number + 1) % vocabulary
        ids[:prompt] = np.arange(prompt) * (number + 3) % vocabulary
        tokens, logp = ids[prompt:], np.zeros(response)
        rollouts.append(
            Rollout(
                prompt=Prompt(id="probe", number=number, tokens=ids[:prompt]),
                index=index,
                tokens=tokens,
                versions=np.zeros(response, np.int64),
                logp=logp,
                actions=tokens[:, None],
                action_logp=logp[:, None],
                finish="length",
                loss_mask=np.ones(response, np.bool_),
            )
        )
    one, two, three, four = (Item(len(r.prompt.tokens), (len(r.tokens),), (i,)) for i, r in enumerate(rollouts))
    both = Item(three.prompt, three.responses + four.responses, (2, 3))
    return rollouts, MicroBatch(((one, two), (both,))), [MicroBatch(((i,),), False) for i in (one, two, three, four)]


AttentionInterface.register(NAME, attend)
