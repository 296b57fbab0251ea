"""Tape: tensors that record, for each slot, prompt, tokens, draws (ids sampled at one position), log-probs, versions.

Shapes: S slots, L positions, T response positions, M draws, K best ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engines.native.sampling.requests import Request, Row
from slipstream.protocols import Sampling
from slipstream.records import Finish, Floats, Ints, Rollout, derive_seed, one_turn, support_from_ids


class Tape:
    """Tensors with one row per slot; the other dimensions grow when a request needs more."""

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        """Create empty tensors; `dtype` is that of the log-probs."""
        self.known_S4 = torch.zeros(slots, 4, dtype=torch.int64, device=device)
        self.seed_S, self.offset_S, self.prompt_S, self.last_S = self.known_S4.unbind(1)
        """`seed`: seed of the draws. `offset`: number of drawn tokens in the prompt. `prompt`: prompt length.
        `last`: position of the newest token, which is not cached yet."""
        self.ids_SL = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.version_ST = torch.zeros(slots, 0, dtype=torch.int32, device=device)
        self.action_STM = torch.zeros(slots, 0, 0, dtype=torch.int32, device=device)
        self.logp_STM = torch.zeros(slots, 0, 0, dtype=dtype, device=device)
        self.replaced_ST = torch.zeros(slots, 0, dtype=torch.bool, device=device)
        self.best_STK = torch.zeros(slots, 0, 0, dtype=torch.int32, device=device)
        self.best_logp_STK = torch.zeros(slots, 0, 0, dtype=dtype, device=device)

    def seat(self, start: int, request: Request, members: Sequence[int]) -> None:
        """Write prompt, seeds and limits of these members (responses) of a request to slots from `start`."""
        prompt, sampling = request.prompt, request.sampling
        q, device = len(prompt.tokens), self.seed_S.device
        self._widen(q + sampling.max_tokens, sampling)
        at = slice(start, start + len(members))
        self.ids_SL[at, :q] = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)
        self.prompt_S[at], self.last_S[at] = q, q - 1
        seeds = [derive_seed(prompt.seed, prompt.first + index) for index in members]
        self.seed_S[at], self.offset_S[at] = torch.tensor(seeds, device=device), prompt.offset

    def write(self, slot: int, begun: Rollout) -> None:
        t, q, (_, m) = len(begun.tokens), int(self.prompt_S[slot]), begun.actions.shape
        self.ids_SL[slot, q : q + t] = torch.from_numpy(begun.tokens.astype(np.int64))
        self.last_S[slot] = q + t - 1
        self.version_ST[slot, :t] = torch.from_numpy(begun.versions)
        self.action_STM[slot, :t, :m] = torch.from_numpy(begun.actions)
        self.logp_STM[slot, :t, :m] = torch.from_numpy(begun.action_logp)
        if begun.replaced is not None:
            self.replaced_ST[slot, :t] = torch.from_numpy(begun.replaced)
        if begun.best_ids is not None and begun.best_logp is not None:
            k = begun.best_ids.shape[1]
            self.best_STK[slot, :t, :k] = torch.from_numpy(begun.best_ids)
            self.best_logp_STK[slot, :t, :k] = torch.from_numpy(begun.best_logp)

    def _widen(self, length: int, sampling: Sampling) -> None:
        tokens, draws, best = sampling.max_tokens, sampling.draws, sampling.best
        self.ids_SL = _grown(self.ids_SL, length)
        self.version_ST = _grown(self.version_ST, tokens)
        self.action_STM = _grown(self.action_STM, tokens, draws)
        self.logp_STM = _grown(self.logp_STM, tokens, draws)
        if sampling.interleave:
            self.replaced_ST = _grown(self.replaced_ST, tokens)
        if best:
            self.best_STK = _grown(self.best_STK, tokens, best)
            self.best_logp_STK = _grown(self.best_logp_STK, tokens, best)

    def move(self, source: Tensor, target: Tensor) -> None:
        for tensor in (self.known_S4, self.ids_SL, *self._of_responses()):
            if tensor[0].numel():
                tensor[target] = tensor[source]

    def _of_responses(self) -> tuple[Tensor, ...]:
        return self.version_ST, self.action_STM, self.logp_STM, self.best_STK, self.best_logp_STK, self.replaced_ST

    def read(self, finishes: Mapping[int, Finish], rows: Sequence[Row]) -> list[Rollout]:
        """Return the responses of rows as rollouts; `finishes` has slot and finish reason of each row, in order."""
        longest = max((row.tokens for row in rows), default=0)
        at = torch.tensor(list(finishes), dtype=torch.int64, device=self.ids_SL.device)
        columns = [tensor[at, :longest].cpu().numpy() for tensor in self._of_responses()]
        return [
            _rollout(row, finish, *(column[i, : row.tokens] for column in columns))
            for i, (row, finish) in enumerate(zip(rows, finishes.values(), strict=True))
        ]


def _rollout(
    row: Row,
    finish: Finish,
    version_T: Ints,
    action_TM: Ints,
    logp_TM: Floats,
    best_TK: Ints,
    best_logp_TK: Floats,
    replaced_T: NDArray[np.bool_],
) -> Rollout:
    prompt, draws, best = row.request.prompt, row.request.sampling.draws, row.request.sampling.best
    return one_turn(
        prompt,
        prompt.first + row.index,
        actions=action_TM[:, :draws].copy(),
        action_logp=logp_TM[:, :draws].copy(),
        best_ids=best_TK[:, :best].copy() if best else None,
        best_logp=best_logp_TK[:, :best].copy() if best else None,
        replaced=replaced_T.copy() if row.request.sampling.interleave else None,
        versions=version_T.copy(),
        finish=finish,
        kept=support_from_ids(row.kept) if row.kept else None,
    )


def _grown(tensor: Tensor, *sizes: int) -> Tensor:
    shape = [max(have, want) for have, want in zip(tensor.shape[1:], sizes, strict=True)]
    if list(tensor.shape[1:]) == shape:
        return tensor
    wider = tensor.new_zeros(len(tensor), *shape)
    wider[tuple(slice(size) for size in tensor.shape)] = tensor
    return wider
