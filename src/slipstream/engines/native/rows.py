"""Packed rows as tensors on the device, and the attention that separates the items (prompt and responses) of a row.

Every token has a tree (the number of its item), a branch (0: the prompt, 1 … G: a response) and a position. Positions
of each response continue from the end of the prompt. A query sees only keys of the prompt and its own branch in its
tree; later keys and keys outside the window are hidden. So each response is computed as if it were alone with its
prompt, and the prompt is computed once. A pad is a tree of its own and sees itself, so that no value is NaN.

On the CPU, queries are computed in blocks, each with only the keys that its queries see. On CUDA, FlexAttention
computes the same from tree, branch and position. There the rows of a micro-batch are joined to one row of whole tiles:
one shape with a variable length needs one compiled graph, which takes about ten seconds.

Shapes: R rows, L positions; Q queries of a block, K keys of a block; H heads, J key/value heads, D head size; N trained
tokens: hidden states are returned only at positions that predict a trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import cache
from itertools import chain
from statistics import median
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface

from slipstream.engines.native import attention
from slipstream.engines.native.attention import Reach, check_arguments, errors, limit, reach_of
from slipstream.engines.native.model import (
    REFERENCE_ATTENTION,
    LanguageModel,
    attention_of,
    has_windows,
    is_recurrent,
    widened,
)
from slipstream.engines.native.packing import Item, MicroBatch
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.routers import Choices, choosing
from slipstream.errors import ModelError, first_line
from slipstream.records import Ints, Prompt, Rollout, one_turn

ROWS_ATTENTION = "slipstream_rows"
QUERY_BLOCK = 128
"""Number of queries whose attention is computed together on the CPU."""
TILE = 128
"""Queries and keys of a tile, the unit in which FlexAttention leaves out scores."""
LEAST_HEAD = 16
"""Least size of a head that a GPU's matrix units can multiply."""
MASKED_SCORES = 1 << 24
"""Number of scores whose mask is computed at once, to find the tiles that are needed."""


class Block(NamedTuple):
    """Queries `start` … `stop` of every row, the keys that these queries need, and an additive mask (−inf: hidden)."""

    start: int
    stop: int
    keys: Tensor | None
    """Indices [R·K] of the needed keys in the flattened rows; None: all keys before `stop`."""
    mask_R1QK: Tensor


class Rows:
    def __init__(self, rollouts: Sequence[Rollout], batch: MicroBatch, device: torch.device) -> None:
        if batch.packed and device.type == "cuda":
            batch = MicroBatch((tuple(chain.from_iterable(batch.rows)),))
        length = batch.length
        if device.type == "cuda":  # for a single tile there is another kernel, which not all models can use
            length = max(2, -(-length // TILE)) * TILE
        shape = len(batch.rows), length
        ids_RL, position_RL, branch_RL = (np.zeros(shape, np.int64) for _ in range(3))
        tree_RL = np.tile(-1 - np.arange(length), (len(batch.rows), 1))
        predict: list[Ints] = []
        for r, row in enumerate(batch.rows):
            start = 0
            for tree, item in enumerate(row):
                stop = start + item.tokens
                members = [rollouts[i] for i in item.members]
                ids_RL[r, start:stop] = np.concatenate([members[0].prompt.tokens, *[each.tokens for each in members]])
                tree_RL[r, start:stop] = tree
                branch_RL[r, start:stop] = np.repeat(np.arange(1 + len(members)), [item.prompt, *item.responses])
                responses = [item.prompt + np.arange(count) for count in item.responses]
                position_RL[r, start:stop] = np.concatenate([np.arange(item.prompt), *responses])
                trained = np.concatenate([each.loss_mask for each in members])
                predict.append(r * length + start + _predictors(item)[trained])
                start = stop
        self.packed, self.batch = batch.packed, batch
        self.choices: Choices | None = None
        """Choices of the model's routers in a pass over these rows; None: not recorded."""
        self.ids_RL, self.position_RL, self.branch_RL, self.tree_RL, self.predict_N = (
            torch.from_numpy(array).to(device)
            for array in (ids_RL, position_RL, branch_RL, tree_RL, np.concatenate(predict))
        )
        self.blocks: dict[tuple[Reach, torch.dtype], list[Block]] = {}
        self.block_masks: dict[Reach, BlockMask] = {}
        self.elsewhere: dict[torch.device, Rows] = {}

    def hidden(self, backbone: nn.Module) -> Tensor:
        """Return the hidden states that predict trained tokens [N, …], in the sample order of `MicroBatch.members`."""
        assert not self.packed or attention_of(backbone) == ROWS_ATTENTION, (
            "packed rows need a model that use_rows has prepared"
        )
        # not every model accepts positions; rows of one sequence do not need them
        options: dict[str, Any] = {"position_ids": self.position_RL} if self.packed else {}
        with reading(self):
            out = backbone(input_ids=self.ids_RL, use_cache=False, **options)
        hidden_RLH: Tensor = out.last_hidden_state
        return hidden_RLH.flatten(0, 1).index_select(0, self.predict_N)

    def inputs(self) -> list[Ints]:
        """Return for each sample the flat indices of all tokens before its last one; a shared prompt is in several."""
        places = []
        for r, row in enumerate(self.batch.rows):
            start = r * self.ids_RL.shape[1]
            for item in row:
                prompt, edges = np.arange(item.prompt - 1), np.cumsum(item.responses)[:-1]
                places += [start + np.concatenate([prompt, part]) for part in np.split(_predictors(item), edges)]
                start += item.tokens
        return places

    def on(self, device: torch.device) -> Rows:
        """Return these rows on a device; a model whose layers are on several devices reads them on each."""
        if device == self.ids_RL.device:
            return self
        if device not in self.elsewhere:
            other = self.elsewhere[device] = copy(self)
            for name in ("ids_RL", "position_RL", "branch_RL", "tree_RL", "predict_N"):
                setattr(other, name, getattr(self, name).to(device))
            other.blocks, other.block_masks = {}, {}
        return self.elsewhere[device]

    @property
    def reaches(self) -> set[Reach]:
        """Set of all reaches (window or chunk limits) that the layers have used."""
        every = (self, *self.elsewhere.values())
        return {reach for rows in every for reach in (*rows.block_masks, *(reach for reach, _ in rows.blocks))}

    def sees(self, reach: Reach) -> Callable[..., Tensor]:
        """Return a mask function with FlexAttention's arguments, which returns True if a query sees a key."""
        tree_RL, branch_RL, position_RL = self.tree_RL, self.branch_RL, self.position_RL

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            branch = branch_RL[row, key]
            same = (branch == 0) | (branch == branch_RL[row, query])
            hidden = reach.hides(position_RL[row, query], position_RL[row, key])
            return (tree_RL[row, query] == tree_RL[row, key]) & same & ~hidden

        return seen

    def blocked(self, reach: Reach, dtype: torch.dtype) -> list[Block]:
        """Return the cached blocks for all layers of this reach; masks are additive, since boolean ones are slower."""
        if (reach, dtype) not in self.blocks:
            length = self.ids_RL.shape[1]
            starts = range(0, length, QUERY_BLOCK)
            self.blocks[reach, dtype] = [self._block(s, min(s + QUERY_BLOCK, length), reach, dtype) for s in starts]
        return self.blocks[reach, dtype]

    def _block(self, start: int, stop: int, reach: Reach, dtype: torch.dtype) -> Block:
        rows, length = self.ids_RL.shape
        index = torch.arange(stop, device=self.ids_RL.device)
        row_R11 = torch.arange(rows, device=index.device)[:, None, None]
        seen_RQL = self.sees(reach)(row_R11, row_R11, index[start:, None], index)
        needed_RL = seen_RQL.any(1)
        most = int(needed_RL.sum(1).max())
        keys = None
        if most < stop:
            # the needed keys of every row in order, then padding with keys that no query of the block sees
            key_RK = needed_RL.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
            seen_RQL = seen_RQL.gather(2, key_RK[:, None].expand(-1, stop - start, -1))
            keys = (key_RK + length * row_R11[:, 0]).flatten()
        mask_RQK = torch.zeros(seen_RQL.shape, dtype=dtype, device=index.device)
        return Block(start, stop, keys, mask_RQK.masked_fill_(~seen_RQL, -torch.inf)[:, None])

    def block_mask(self, reach: Reach) -> BlockMask:
        """Return FlexAttention's cached mask: the tiles of the L×L scores that some query sees, and those that all see.

        It is computed for a few rows of tiles at a time: `create_block_mask` needs L×L elements if it is not compiled.
        """
        if reach not in self.block_masks:
            rows, length = self.ids_RL.shape
            index, sees = torch.arange(length, device=self.ids_RL.device), self.sees(reach)
            row_R11 = torch.arange(rows, device=index.device)[:, None, None]
            some, every, pads = [], [], -length % TILE
            for queries_Q in torch.split(index, TILE * max(1, MASKED_SCORES // (rows * TILE * length))):
                seen_RQK = sees(row_R11, row_R11, queries_Q[:, None], index)
                to_edges = (0, pads, 0, -len(queries_Q) % TILE)
                tiles = nn.functional.pad(seen_RQK, to_edges).reshape(rows, -1, TILE, (length + pads) // TILE, TILE)
                some.append(tiles.any(4).any(2))
                every.append(tiles.all(4).all(2))
            some_R1BB, every_R1BB = torch.cat(some, 1)[:, None], torch.cat(every, 1)[:, None]
            listed = [_tiles(some_R1BB & ~every_R1BB), _tiles(every_R1BB)]
            self.block_masks[reach] = BlockMask.from_kv_blocks(
                *listed[0], *listed[1], BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(length, length)
            )
        return self.block_masks[reach]


def _tiles(chosen_R1BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of tiles the number of chosen ones, and the indices of all tiles, the chosen ones first."""
    order = chosen_R1BB.int().sort(dim=-1, descending=True, stable=True).indices
    return chosen_R1BB.sum(-1, dtype=torch.int32), order.int()


def _predictors(item: Item) -> Ints:
    """Return, for each response token, the index in the item that predicts it: for first tokens, the prompt's last."""
    before = np.arange(item.prompt, item.tokens) - 1
    before[np.cumsum([0, *item.responses[:-1]])] = item.prompt - 1
    return before


def by_sample(x_N: Tensor, rollouts: Sequence[Rollout]) -> tuple[Tensor, ...]:
    """Split values at the trained tokens of all samples into one tensor per sample."""
    return torch.split(x_N, [rollout.trained_tokens for rollout in rollouts])


def over_tokens(x_N: Tensor, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Return one tensor [T, …] per sample: its values at trained tokens, and 0 at all other response tokens."""
    masks = [torch.from_numpy(rollout.loss_mask).to(x_N.device) for rollout in rollouts]
    parts = by_sample(x_N, rollouts)
    return [
        x_N.new_zeros(len(mask_T), *x_N.shape[1:]).index_put((mask_T,), part)
        for mask_T, part in zip(masks, parts, strict=True)
    ]


# --- the attention ---------------------------------------------------------------------------------------


CURRENT_ROWS: ContextVar[Rows] = ContextVar("rows")
"""Rows of the current pass; a context variable, because some models pass no extra arguments to their attention."""


@contextmanager
def reading(rows: Rows) -> Iterator[None]:
    token = CURRENT_ROWS.set(rows)
    try:
        with choosing(rows.choices):
            yield
    finally:
        CURRENT_ROWS.reset(token)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the forward and recompute contexts of activation checkpointing; the recomputation uses the same rows."""
    return nullcontext(), reading(CURRENT_ROWS.get())


def attend(
    module: nn.Module,
    query_RHLD: Tensor,
    key_RJLD: Tensor,
    value_RJLD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **rest: Any,
) -> tuple[Tensor, None]:
    check_arguments(module, attention_mask, rest)
    rows, reach = CURRENT_ROWS.get().on(query_RHLD.device), reach_of(module, sliding_window)
    dtype = value_RJLD.dtype
    # under autocast, rotary embeddings leave queries and keys in float32; a CPU's backward pass in 16 bits is slower
    wide = dtype if query_RHLD.is_cuda else torch.promote_types(dtype, torch.float32)
    query_RHLD, key_RJLD, value_RJLD = query_RHLD.to(wide), key_RJLD.to(wide), value_RJLD.to(wide)
    if query_RHLD.is_cuda:
        if dropout:
            raise ModelError("packed rows on CUDA do not support attention dropout: write learner.dropout = false")
        if min(query_RHLD.shape[-1], value_RJLD.shape[-1]) < LEAST_HEAD:
            raise ModelError(f"FlexAttention needs heads of at least {LEAST_HEAD} values")
        return by_flex(query_RHLD, key_RJLD, value_RJLD, rows, reach, scaling, softcap, s_aux), None
    options = {"scaling": scaling, "softcap": softcap, "dropout": dropout}
    sinks = None if s_aux is None else s_aux.view(1, -1, 1, 1)
    with torch.autocast(query_RHLD.device.type, enabled=False):
        blocks = rows.blocked(reach, wide)
        return _by_blocks(query_RHLD, key_RJLD, value_RJLD, blocks, sinks=sinks, **options).to(dtype), None


def is_compiled(tensor: Tensor) -> bool:
    """Return True if attention over this tensor must be compiled; the CPU has its own attention, by blocks."""
    return tensor.is_cuda


@cache
def _compiled(**mode: object) -> Callable[..., Any]:
    """Return FlexAttention compiled for one mode; beyond dynamo's limit of graphs it raises an error.

    Without compilation it would need L×L scores. Dynamo counts the graphs of a code object (at most
    `torch._dynamo.config.recompile_limit`, 8), so each mode has a code object of its own, in which lengths are
    variables.
    """

    def flex(*args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    graphs = torch.compile(FunctionType(flex.__code__.replace(), globals()), fullgraph=True, dynamic=True)

    def call(*args: Any, **options: Any) -> Any:
        try:
            with torch._dynamo.config.patch(specialize_float=True):  # a cap that is a variable has no gradient
                return graphs(*args, **options)
        except FailOnRecompileLimitHit:
            settings = ", ".join(f"{name} {value}" for name, value in mode.items())
            raise ModelError(
                f"FlexAttention needs more than {torch._dynamo.config.recompile_limit} compiled graphs in one mode "
                f"({settings}): run with TORCH_LOGS=recompiles, and report its output"
            ) from None

    return call


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, row, head, query, key: softcap * torch.tanh(score / softcap)


def by_flex(
    query_RHLD: Tensor,
    key_RJLD: Tensor,
    value_RJLD: Tensor,
    rows: Rows,
    reach: Reach,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return the attention output [R, L, H, D]."""
    flex: Callable[..., Any] = flex_attention
    if is_compiled(query_RHLD):
        flex = _compiled(
            reach=reach,
            softcap=softcap,
            scaling=scaling,
            sinks=sinks_H is not None,
            heads=(query_RHLD.shape[1], query_RHLD.shape[3], *key_RJLD.shape[1:2], value_RJLD.shape[3]),
            device=query_RHLD.device,
            dtype=query_RHLD.dtype,
            autocast=torch.is_autocast_enabled(query_RHLD.device.type),
            gradients=(torch.is_grad_enabled(), *(x.requires_grad for x in (query_RHLD, key_RJLD, value_RJLD))),
            one_row=len(query_RHLD) == 1,  # dynamo has a graph of its own for sizes of 1
            one_tile=query_RHLD.shape[2] <= TILE,
        )
    bend = None if softcap is None else _capped(softcap)
    options = {"score_mod": bend, "block_mask": rows.block_mask(reach), "scale": scaling, "enable_gqa": True}
    out_RHLD: Tensor
    if sinks_H is None:
        out_RHLD = flex(query_RHLD, key_RJLD, value_RJLD, **options)
    else:  # a sink is a key without a value: it only reduces the other softmax weights
        out_RHLD, aux = flex(query_RHLD, key_RJLD, value_RJLD, **options, return_aux=AuxRequest(lse=True))
        kept_RHL = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[None, :, None])
        out_RHLD = out_RHLD * kept_RHL[..., None].to(out_RHLD.dtype)
    return out_RHLD.transpose(1, 2).contiguous()


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], **options: Any) -> Tensor:
    """Return the attention output [R, L, H, D]."""
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value)]
    out = []
    for start, stop, keys, mask_R1QK in blocks:
        if keys is None:
            k, v = key[:, :, :stop], value[:, :, :stop]
        else:
            k, v = (x.index_select(0, keys).reshape(len(key), -1, *x.shape[1:]).transpose(1, 2) for x in flat)
        o = attention.attend(query[:, :, start:stop], k, v, mask_R1QK, **options)
        out.append(o.transpose(1, 2))
    return torch.cat(out, 1)


# --- check that a model computes rows correctly ----------------------------------------------------------


def use_rows(lm: LanguageModel, *, packed: bool = True, field: str = "learner.packing") -> None:
    """Select an attention for rows; raise a ModelError if no candidate gives the results of single sequences.

    Packed rows need the attention of this file. Unpacked rows try this attention first, because it needs no L×L matrix,
    and then those of the model. `field` is the config key that the error message suggests to set to false.
    """
    training = lm.model.training
    lm.model.eval()  # dropout would make any two passes differ
    reasons = []
    for name in [ROWS_ATTENTION] if packed else [ROWS_ATTENTION, "sdpa", REFERENCE_ATTENTION]:
        with widened(lm.model):
            reason = _failure(lm, name, packed)
        reason = reason or _failure(lm, name, packed)
        if reason is None:
            break
        reasons.append(reason)
    else:
        lm.model.set_attn_implementation(REFERENCE_ATTENTION)
        kind = type(lm.model).__name__
        fix = f"write {field} = false" if packed else "this model cannot be trained"
        raise ModelError(f"{lm.name}: {kind} cannot take {'packed ' * packed}rows: {reasons[0]}: {fix}")
    lm.model.train(training)


def recheck_rows(lm: LanguageModel, ranks: Ranks, hidden: Callable[[Rows], Tensor], *, packed: bool) -> None:
    """Repeat the check of `use_rows` where the ranks train: on their device, with shared weights.

    `hidden` computes hidden states. All ranks must call this function.
    """
    name = attention_of(lm.backbone) or REFERENCE_ATTENTION
    failed = [reason for reason in ranks.gathered(_failure(lm, name, packed, hidden)) if reason]
    if failed:
        fix = "write learner.packing = false" if packed else "this model cannot be trained"
        raise ModelError(f"{lm.name}: {'packed ' * packed}rows on {lm.device.type}, over ranks: {failed[0]}: {fix}")


@torch.no_grad()
def _failure(lm: LanguageModel, name: str, packed: bool, hidden: Callable[[Rows], Tensor] | None = None) -> str | None:
    """Return an error text if rows with attention `name` differ from single sequences with the reference, else None."""
    hidden = hidden or (lambda rows: rows.hidden(lm.backbone))
    if packed and is_recurrent(lm.model.config):
        return "its recurrent layers would carry one sequence into the next"
    rollouts, together, apart = _samples(lm.vocab_size, packed)
    rows, each = Rows(rollouts, together, lm.device), [Rows(rollouts, batch, lm.device) for batch in apart]
    try:
        lm.model.set_attn_implementation(REFERENCE_ATTENTION)
        expected = [hidden(one) for one in each]
        lm.model.set_attn_implementation(name)  # on failure transformers only logs a warning
        if attention_of(lm.backbone) != name:
            return "its attention cannot be replaced"
        usual = [difference([hidden(one)], [e]) for one, e in zip(each, expected, strict=True)]
        states = torch.split(hidden(rows), [len(part) for part in expected])
    except Exception as error:  # any exception of the model's code means that it cannot use rows
        return first_line(error)
    if name == ROWS_ATTENTION and has_windows(lm.model.config) and not any(reach.window for reach in rows.reaches):
        return "it does not pass its sliding window to the attention"
    allowed = limit(lm.head.weight.dtype, usual)
    if not median(usual) <= allowed:
        return f"its hidden states differ by {median(usual):.2%} from those of its own attention"
    if not (off := difference(states, expected)) <= allowed:
        return f"a sequence among others differs by {off:.2%} from the same sequence alone"
    return None


def probe(lm: LanguageModel, packed: bool) -> list[Tensor]:
    """Return the hidden states of each test sample, computed in rows with the model in its current mode."""
    rollouts, together, _ = _samples(lm.vocab_size, packed)
    hidden_NH = Rows(rollouts, together, lm.device).hidden(lm.backbone)
    return list(torch.split(hidden_NH, [len(rollouts[i].tokens) for i in together.members]))


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest of the sequences' median errors; a median ignores single tokens sent to other experts."""
    return max(median(errors(f_TH, e_TH)) for f_TH, e_TH in zip(found, expected, strict=True))


def _samples(vocabulary: int, packed: bool) -> tuple[list[Rollout], MicroBatch, list[MicroBatch]]:
    """Return four test samples, one micro-batch of all samples (if packed, two share a prompt), and one per sample."""
    rollouts = []
    for number, index, prompt, response in [(0, 0, 5, 6), (1, 0, 3, 9), (2, 0, 4, 8), (2, 1, 4, 5)]:
        ids = (np.arange(prompt + response) * (5 + 2 * index) + 3 * number + 1) % vocabulary
        ids[:prompt] = np.arange(prompt) * (number + 3) % vocabulary
        rollouts.append(placeholder(ids[:prompt], ids[prompt:], number=number, index=index))
    items = [Item(len(r.prompt.tokens), (len(r.tokens),), (i,)) for i, r in enumerate(rollouts)]
    one, two, three, four = items
    both = Item(three.prompt, three.responses + four.responses, (2, 3))
    together = ((one, two), (both,)) if packed else tuple((item,) for item in items)
    return rollouts, MicroBatch(together, packed), [MicroBatch(((item,),), False) for item in items]


def placeholder(prompt: Ints, response: Ints, *, number: int = -1, index: int = 0) -> Rollout:
    """Return a rollout of these tokens for passes that concern no sample."""
    return one_turn(
        Prompt(id="placeholder", number=number, tokens=prompt),
        index,
        actions=response[:, None],
        action_logp=np.zeros((len(response), 1)),
        versions=np.zeros(len(response), np.int64),
        finish="length",
    )


AttentionInterface.register(ROWS_ATTENTION, attend)
