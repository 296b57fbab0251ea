"""Compute the next tokens of sequences in slots (rows of the KV cache), and check the results against plain passes.

A model may have state that the slots do not store, and continued sequences would silently lose this state. So before a
model is used, test sequences are prefilled together, continued token by token, and rebuilt. Each hidden state must
match a plain pass (whole sequence, no cache) with the reference attention.

Shapes: S slots, L positions, N rows, Q new tokens per row, T tokens of a pass, W written tokens, H hidden.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from slipstream.engines.native.attention import errors, limit
from slipstream.engines.native.model import (
    REFERENCE_ATTENTION,
    LanguageModel,
    attention_of,
    has_windows,
    is_recurrent,
    widened,
)
from slipstream.engines.native.routers import Choices, Routers, choosing, together
from slipstream.engines.native.sampling import kv
from slipstream.engines.native.sampling.direct import Direct, is_direct
from slipstream.errors import ModelError, first_line

TEST_PROMPTS = (9, 9, 4, 1)
"""Lengths of the test prompts."""
CONTINUED = 4
"""Number of tokens that continue each test prompt."""
CONTINUED_STATES = 64
"""CONTINUED for recurrent models, if the context allows: errors may accumulate or occur at few positions only."""
ROUNDING_FACTOR = 8.0
"""Allowed error of recurrent layers, as a multiple of the error after rounding noise in the embeddings."""
PASS_TOKENS = 1 << 15
"""Maximum number of tokens in one pass; a longer sequence has its own pass."""
BLOCK_SLOTS, MIN_SHORTER = 16, 12
"""Blocks grow by BLOCK_SLOTS slots: the next join a block unless all are at least MIN_SHORTER positions shorter."""
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which models of different versions of transformers, and recurrent models, take their cache."""
MAX_READ_RATIO = 1.5
"""Maximum ratio between the number of tokens of a read and that of the first read in its attention block."""


@dataclass(frozen=True, slots=True)
class Read:
    """Positions `first` … `stop` of a sequence to compute into these slots; earlier positions are already cached."""

    slots: Sequence[int]
    first: int
    stop: int
    every: bool = False
    """True if the hidden states of all positions are needed; False: only that of the last."""

    @property
    def count(self) -> int:
        return self.stop - self.first


class Decoder:
    def __init__(self, lm: LanguageModel, slots: int, routers: Routers | None = None) -> None:
        """Create the cache with this number of slots for a model that `prove` has accepted.

        The choices of `routers` are recorded in every step; a read that only fills the cache leaves them as they are.
        """
        self.lm, self.slots, self.routers = lm, kv.Slots(slots, lm.model.config), routers
        self.accepted = inspect.signature(type(lm.backbone).forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in self.accepted), None)
        self.direct = Direct(lm) if is_direct(lm) else None

    def step(self, ids_SL: Tensor, at: Sequence[int], reads: Sequence[Read] = ()) -> Tensor:
        """Compute position `at[i]` of each slot i, and all `reads`; return their hidden states [N + …, H]."""
        parts = [self._pass(ids_SL, *some) for some in self._passes(at, reads)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, ids_SL: Tensor, reads: Sequence[Read]) -> None:
        """Fill the cache with these reads; no hidden states are returned."""
        for some in self._passes((), reads):
            with suppress(kv.Filled):
                self._pass(ids_SL, *some, fills=True)

    def _passes(self, at: Sequence[int], reads: Sequence[Read]) -> Iterator[tuple[Sequence[int], Sequence[Read]]]:
        """Yield passes of at most PASS_TOKENS tokens; for recurrent models, all reads of a pass have equal length."""
        start = stop = 0
        while start < len(reads) or at:
            tokens = len(at)
            while stop < len(reads):
                same_length = not self.slots.recurrent or (stop > start and reads[start].count == reads[stop].count)
                if tokens and not (same_length and tokens + reads[stop].count <= PASS_TOKENS):
                    break
                tokens += reads[stop].count
                stop += 1
            yield at, reads[start:stop]
            at, start = (), stop

    def _pass(self, ids_SL: Tensor, at: Sequence[int], reads: Sequence[Read], *, fills: bool = False) -> Tensor:
        device, n, recurrent = ids_SL.device, len(at), self.slots.recurrent
        ends = np.cumsum([n, *[read.count for read in reads]])
        slot, position = np.arange(ends[-1]), np.array([*at, *[0] * int(ends[-1] - n)])
        for end, read in zip(ends[1:], reads, strict=True):
            slot[end - read.count : end] = read.slots[0]
            position[end - read.count : end] = np.arange(read.first, read.stop)
        slot_T, at_T = torch.from_numpy(np.stack([slot, position])).to(device)
        slot_W, at_W, token_W = slot_T, at_T, None
        if others := [(i, other) for i, read in enumerate(reads) for other in read.slots[1:]]:
            again = [np.arange(ends[i], ends[i + 1]) for i, _ in others]
            token = np.concatenate([np.arange(ends[-1]), *again])
            slot = np.concatenate(
                [slot, *[np.full_like(t, other) for t, (_, other) in zip(again, others, strict=True)]]
            )
            slot_W, at_W, token_W = torch.from_numpy(np.stack([slot, position[token], token])).to(device)
        blocks = [kv.Block(slice(a, b), at_T[a:b, None], max(at[a:b]) + 1, going=True) for a, b in ranges(at)]
        blocks += [_block(reads[a:b], int(ends[a]), at_T) for a, b in similar_runs(reads)]
        step = kv.Step(
            self.slots, blocks, slot_W, at_W, token_W, goes_on=recurrent and n > 0, fills=fills and not recurrent
        )
        shape = (n, 1) if recurrent and n else (len(reads), -1) if recurrent else (1, -1)
        choices = None if fills or self.routers is None else Choices(self.routers)
        with choosing(choices):
            hidden_TH = self._forward(step, ids_SL[slot_T, at_T].view(shape), at_T.view(shape))
        if choices is not None:
            used_TRX = together(choices.used)
            self.slots.record(slot_W, at_W, used_TRX if token_W is None else used_TRX[token_W], step.length)
        if not reads:
            return hidden_TH
        if recurrent and others:
            pairs_M2 = torch.tensor([(reads[i].slots[0], other) for i, other in others], device=device)
            self.slots.copy(*pairs_M2.T, length=max(read.stop for read in reads))
        counts = [read.count if read.every else 1 for read in reads]
        needed = [np.arange(end - count, end) for end, count in zip(ends[1:], counts, strict=True)]
        return hidden_TH[torch.from_numpy(np.concatenate([np.arange(n), *needed])).to(device)]

    def _forward(self, step: kv.Step, ids: Tensor, positions: Tensor) -> Tensor:
        backbone = self.lm.backbone
        hooked = backbone._forward_hooks or backbone._forward_pre_hooks  # hooks must see what the model computes
        if self.direct is not None and not hooked:
            with step.taken():
                return self.direct(step, ids.flatten(), positions.flatten())
        if self.cache_argument is None:
            raise ModelError(f"its forward pass takes no cache by any of the names {', '.join(CACHE_ARGUMENTS)}")
        options: dict[str, object] = {self.cache_argument: step}
        if "position_ids" in self.accepted:  # fully recurrent models take none
            options["position_ids"] = positions
        with step.taken():
            out = backbone(input_ids=ids, use_cache=True, **options)
        hidden_TH: Tensor = out.last_hidden_state.flatten(0, 1)
        return hidden_TH


def ranges(at: Sequence[int]) -> list[tuple[int, int]]:
    """Return the slot range of each block; a new block begins at a slot with a much smaller position."""
    cuts, most = list[int](), 0
    for start in range(0, len(at), BLOCK_SLOTS):
        longest = max(at[start : start + BLOCK_SLOTS])
        if cuts and longest > most - MIN_SHORTER:
            most = max(most, longest)
        else:
            cuts.append(start)
            most = longest
    return list(pairwise([*cuts, len(at)])) if at else []


def compacted(ended: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the old slots of the remaining rows in their new order, after rows `ended` are removed; few rows move.

    Much longer rows move in front of shorter rows, so that blocks keep rows of similar length.
    """
    order = list(range(len(lengths)))
    for hole in sorted(ended, reverse=True):
        while (block := (hole // BLOCK_SLOTS + 1) * BLOCK_SLOTS) < len(order):
            longest = max(range(block, min(block + BLOCK_SLOTS, len(order))), key=lambda slot: lengths[order[slot]])
            if lengths[order[longest]] < lengths[order[-1]] + MIN_SHORTER:
                break
            order[hole], hole = order[longest], longest
        last = order.pop()
        if hole < len(order):
            order[hole] = last
    return order


def similar_runs(reads: Sequence[Read]) -> list[tuple[int, int]]:
    """Return index ranges of reads with similar length that all start at 0 or all later; each range is one block."""
    cuts = [0]
    for i, read in enumerate(reads):
        first = reads[cuts[-1]]
        apart = (read.first > 0, read.every) != (first.first > 0, first.every)
        if apart or read.count > MAX_READ_RATIO * first.count:
            cuts.append(i)
    return list(pairwise([*cuts, len(reads)])) if reads else []


def _block(reads: Sequence[Read], start: int, at_T: Tensor) -> kv.Block:
    """Return the block of these reads, whose tokens follow each other in the pass from index `start`."""
    n, q, device = len(reads), max(read.count for read in reads), at_T.device
    first_slots = [read.slots[0] for read in reads]
    adjacent = first_slots == list(range(first_slots[0], first_slots[0] + n))
    slots = slice(first_slots[0], first_slots[0] + n) if adjacent else torch.tensor(first_slots, device=device)
    length, whole = max(read.stop for read in reads), all(read.first == 0 for read in reads)
    counts = np.array([read.count for read in reads])
    if (counts == q).all():
        return kv.Block(slots, at_T[start : start + n * q].view(n, q), length, whole=whole)
    begins, first, steps = np.cumsum(counts) - counts + start, np.array([read.first for read in reads]), np.arange(q)
    at_NQ, token_NQ, real_T = (
        torch.from_numpy(array).to(device)
        for array in (
            first[:, None] + steps,
            begins[:, None] + np.minimum(steps, counts[:, None] - 1),
            np.flatnonzero(steps < counts[:, None]),
        )
    )
    return kv.Block(slots, at_NQ, length, token_NQ, real_T, whole)


@torch.no_grad()
def prove(lm: LanguageModel) -> None:
    """Set the attention that reads slots; raise a ModelError if continued sequences differ from a plain pass."""
    ids = _texts(lm, CONTINUED)
    try:
        reason = _unlimited_steps(lm)
        with widened(lm.model):
            reason = reason or _failure(lm, ids) or _failure_of_states(lm)
        reason = reason or _failure(lm, ids)
    except Exception as error:  # any exception of the model's code means that it cannot generate
        reason = first_line(error)
    if reason:
        kind = type(lm.model).__name__
        raise ModelError(
            f'{lm.name}: the native sampler cannot generate with {kind}: {reason}: write sampler.engine = "vllm", '
            "if vLLM has it"
        )


def _texts(lm: LanguageModel, continued: int) -> list[Tensor]:
    return [
        (torch.arange(length + continued, device=lm.device) * (2 * i + 3) + 5 * i + 1) % lm.vocab_size
        for i, length in enumerate(TEST_PROMPTS)
    ]


def _plain(lm: LanguageModel, ids: Sequence[Tensor]) -> list[Tensor]:
    return [lm.backbone(input_ids=each[None], use_cache=False).last_hidden_state[0] for each in ids]


def _unlimited_steps(lm: LanguageModel) -> str | None:
    """Return an error text if Mamba-2 layers limit their time steps: transformers does so only in a whole pass.

    No test with the weights of the start can find this, because training may move a time step past a limit.
    """
    for module in lm.model.modules():
        least, most = getattr(module, "time_step_limit", (0.0, inf))
        if least > 0 or most < inf:
            return f"its time steps are limited to {least:g} … {most:g} in a whole pass, and not in single tokens"
    return None


def _failure_of_states(lm: LanguageModel) -> str | None:
    """Continue sequences long enough to detect a wrong recurrent state; return an error text, or None if correct.

    The allowed error depends on the effect of rounding, which recurrent layers may amplify a hundredfold. A second
    plain pass, with embeddings multiplied by 1 + a rounding error, measures this effect. The worst sequence is ignored,
    because rounding may change which experts a router selects.
    """
    if not is_recurrent(lm.model.config):
        return None
    ids = _texts(lm, max(CONTINUED, min(CONTINUED_STATES, lm.max_length - max(TEST_PROMPTS))))
    rounding = 2 * max(torch.finfo(lm.head.weight.dtype).eps, torch.finfo(torch.float32).eps)
    generator = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: object, out: Tensor) -> Tensor:
        return out * (1 + rounding * torch.randn(out.shape, generator=generator).to(out))

    lm.model.set_attn_implementation(REFERENCE_ATTENTION)
    expected = _plain(lm, ids)
    embeddings: nn.Module = lm.backbone.get_input_embeddings()  # type: ignore[operator]
    with embeddings.register_forward_hook(shake):
        shaken = _plain(lm, ids)
    lm.model.set_attn_implementation(kv.SLOTS_ATTENTION)
    allowed = ROUNDING_FACTOR * sorted(max(errors(*pair)) for pair in zip(shaken, expected, strict=True))[-2]
    decoder, together, worst = Decoder(lm, len(ids)), pad_sequence(ids, batch_first=True), [0.0] * len(ids)
    decoder.step(together, (), [Read((i,), 0, length) for i, length in enumerate(TEST_PROMPTS)])
    for step in range(len(ids[0]) - TEST_PROMPTS[0]):
        at = [length + step for length in TEST_PROMPTS]
        found_NH = decoder.step(together, at)
        off = errors(found_NH, torch.stack([h_LH[n] for h_LH, n in zip(expected, at, strict=True)]))
        worst = [max(pair) for pair in zip(worst, off, strict=True)]
        if not sorted(worst)[-2] <= allowed:
            return (
                f"after {step + 1} single tokens its recurrent layers differ by {sorted(worst)[-2]:.2g} from a whole "
                f"pass, and rounding explains at most {allowed:.2g}"
            )
    return None


def _failure(lm: LanguageModel, ids: Sequence[Tensor]) -> str | None:
    lm.model.set_attn_implementation(REFERENCE_ATTENTION)
    expected = _plain(lm, ids)
    lm.model.set_attn_implementation(kv.SLOTS_ATTENTION)
    if attention_of(lm.backbone) != kv.SLOTS_ATTENTION:
        return "its attention cannot be replaced"
    decoder, lengths = Decoder(lm, len(ids) + 1), list(TEST_PROMPTS)
    together = pad_sequence([*ids, ids[0]], batch_first=True)
    newcomer = Read((len(ids),), 0, TEST_PROMPTS[0])

    def error(found_NH: Tensor, lengths: Sequence[int]) -> float:
        off = errors(
            found_NH, torch.stack([h_LH[n - 1] for h_LH, n in zip([*expected, expected[0]], lengths, strict=False)])
        )
        # in half precision, rounding may change a router's choice in one sequence: ignore the worst sequence
        return max(off) if lm.head.weight.dtype.itemsize >= 4 else sorted(off)[-2]

    decoder.step(together[:1], (), [Read((0,), 0, TEST_PROMPTS[0])])
    if not any(layer.keys is not None or layer.states for layer in decoder.slots.layers):
        return f"its forward pass does not use the cache that it is given as `{decoder.cache_argument}`"
    alone = torch.cat([Decoder(lm, 1).step(each[None], (), [Read((0,), 0, len(each))]) for each in ids])
    allowed = limit(lm.head.weight.dtype, usual := errors(alone, torch.stack([h_LH[-1] for h_LH in expected])))
    if not median(usual) <= allowed:
        return f"its hidden states differ by {median(usual):.2%} from those of its own attention"
    whole = [Read((i,), 0, length) for i, length in enumerate(lengths)]
    if not (off := error(decoder.step(together, (), whole), lengths)) <= allowed:
        return f"prompts that are read together differ by {off:.2%} from each alone"
    for _ in range(CONTINUED - 1):
        lengths = [length + 1 for length in lengths]
        found_NH = decoder.step(together, [length - 1 for length in lengths], [newcomer])
        if not (off := error(found_NH, [*lengths, newcomer.stop])) <= allowed:
            return f"a token that continues a sequence differs by {off:.2%} from the same token in a whole pass"
    for layer in decoder.slots.layers:
        if layer.keys is not None:
            layer.keys.zero_()
    halves = [Read((i,), a, b) for i, n in enumerate(TEST_PROMPTS) for a, b in pairwise(sorted({0, n // 2, n}))]
    decoder.fill(together, whole if decoder.slots.recurrent else halves)
    lengths = [length + 1 for length in TEST_PROMPTS]
    if not (off := error(decoder.step(together, [n - 1 for n in lengths]), lengths)) <= allowed:
        return f"a token after a rebuild differs by {off:.2%} from the same token in a whole pass"
    if has_windows(lm.model.config) and not any(reach.window for reach in decoder.slots.reaches):
        return "it does not pass its sliding window to the attention"
    return None
