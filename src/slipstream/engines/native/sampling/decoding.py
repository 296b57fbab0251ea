"""A model that continues sequences in slots, and the proof that it does so as it reads.

Whatever remembers its past in a way that the slots do not know of would go on as if it had none. So before a model is
used, a few sequences are prefilled together, continued token by token, and rebuilt; every hidden state must be that of
a plain pass over the whole sequence, with the attention that leaves nothing out.

Shapes: N rows, Q prompt positions, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream.engines.native.attention import errors, limit
from slipstream.engines.native.model import REFERENCE, LanguageModel, has_windows, widened
from slipstream.engines.native.sampling import kv
from slipstream.errors import ModelError, first_line

PROMPTS = (9, 9, 4, 1)
"""Lengths of the sequences that a model is tried with, and how many tokens continue them."""
CONTINUED = 4


class Decoder:
    def __init__(self, lm: LanguageModel, slots: int) -> None:
        """For a model that was proven."""
        self.lm, self.slots = lm, kv.Slots(slots, lm.model.config)
        self.accepted = inspect.signature(type(lm.backbone).forward).parameters

    def prefill(self, start: int, ids_NQ: Tensor, lengths: Sequence[int]) -> Tensor:
        """Prefixes of these lengths into the slots from `start` on; the hidden state of each one's last token, [N, H].

        One pass; for a model with recurrent states, one for each run of rows of one length.
        """
        cuts = [0, len(lengths)]
        if self.slots.recurrent:
            cuts[1:1] = [i for i in range(1, len(lengths)) if lengths[i] != lengths[i - 1]]
        return torch.cat([self._prefix(start + a, ids_NQ[a:b], lengths[a:b]) for a, b in pairwise(cuts)])

    def _prefix(self, start: int, ids_NQ: Tensor, lengths: Sequence[int]) -> Tensor:
        n, q = len(lengths), max(lengths)
        ids_NQ = ids_NQ[:, :q]
        at_NQ = torch.arange(q, device=ids_NQ.device).expand(n, q)
        hidden_NQH = self._pass(kv.Step(self.slots, start, at_NQ, q, prefill=True), ids_NQ)
        return hidden_NQH[torch.arange(n), torch.tensor(lengths) - 1]

    def decode(self, ids_N1: Tensor, at_N1: Tensor, length: int) -> Tensor:
        """One more token for the first N slots, at these positions, all below `length`: its hidden state, [N, H]."""
        return self._pass(kv.Step(self.slots, 0, at_N1, length, prefill=False), ids_N1)[:, 0]

    def _pass(self, step: kv.Step, ids_NQ: Tensor) -> Tensor:
        # models that are recurrent throughout have no positions, and another name for what they remember
        memory = "past_key_values" if "past_key_values" in self.accepted else "cache_params"
        options: dict[str, object] = {memory: step}
        if "position_ids" in self.accepted:
            options["position_ids"] = step.positions_NQ
        with step.taken():
            out = self.lm.backbone(input_ids=ids_NQ, use_cache=True, **options)
        hidden_NQH: Tensor = out.last_hidden_state
        return hidden_NQH


@torch.no_grad()
def prove(lm: LanguageModel) -> None:
    """Give the model the attention of slots; a ModelError if it does not generate with it what it reads."""
    ids = [
        (torch.arange(length + CONTINUED, device=lm.device) * (2 * i + 3) + 5 * i + 1) % lm.vocab_size
        for i, length in enumerate(PROMPTS)
    ]
    try:
        with widened(lm.model):
            reason = _failure(lm, ids)
        reason = reason or _failure(lm, ids)
    except Exception as error:  # whatever a model raises here is why it cannot
        reason = first_line(error)
    if reason:
        kind = type(lm.model).__name__
        raise ModelError(
            f'{lm.name}: the native sampler cannot generate with {kind}: {reason}: write sampler.engine = "vllm", '
            "if vLLM has it"
        )


def _failure(lm: LanguageModel, ids: Sequence[Tensor]) -> str | None:
    lm.model.set_attn_implementation(REFERENCE)
    expected = [lm.backbone(input_ids=each[None], use_cache=False).last_hidden_state[0] for each in ids]
    lm.model.set_attn_implementation(kv.NAME)
    if getattr(lm.backbone.config, "_attn_implementation", None) != kv.NAME:
        return "its attention cannot be replaced"
    decoder, lengths = Decoder(lm, len(ids)), [len(each) for each in ids]
    together = pad_sequence(list(ids), batch_first=True)

    def error(found_NH: Tensor, lengths: Sequence[int]) -> float:
        off = errors(found_NH, torch.stack([h_LH[n - 1] for h_LH, n in zip(expected, lengths, strict=True)]))
        # in half precision, a router that turns may move one of them far
        return max(off) if lm.head.weight.dtype.itemsize >= 4 else sorted(off)[-2]

    def continued(lengths: Sequence[int]) -> Tensor:
        at_N1 = torch.tensor(lengths, device=lm.device)[:, None] - 1
        return decoder.decode(together.gather(1, at_N1), at_N1, max(lengths))

    alone = torch.cat([decoder.prefill(0, each[None], [len(each)]) for each in ids])
    allowed = limit(lm.head.weight.dtype, usual := errors(alone, torch.stack([h_LH[-1] for h_LH in expected])))
    if not median(usual) <= allowed:
        return f"its hidden states differ by {median(usual):.2%} from those of its own attention"
    lengths = list(PROMPTS)
    if not (off := error(decoder.prefill(0, together, lengths), lengths)) <= allowed:
        return f"prompts that are read together differ by {off:.2%} from each alone"
    for _ in range(CONTINUED - 1):
        lengths = [length + 1 for length in lengths]
        if not (off := error(continued(lengths), lengths)) <= allowed:
            return f"a token that continues a sequence differs by {off:.2%} from the same token in a whole pass"
    decoder.prefill(0, together, lengths)
    lengths = [length + 1 for length in lengths]
    if not (off := error(continued(lengths), lengths)) <= allowed:
        return f"a token after a rebuild differs by {off:.2%} from the same token in a whole pass"
    if has_windows(lm.model.config) and not any(reach.window for reach in decoder.slots.reaches):
        return "its attention is not told of the sliding window"
    return None
