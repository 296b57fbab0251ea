"""Tape: tensors that record, for each slot, prompt, tokens, draws (ids sampled at one position), log-probs, versions.

Shapes: S slots, L positions, T response positions, M draws, K best ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.protocols import Sampling
from slipstream.records import Finish, Floats, Ints, Kept, Prompt, Rollout, derive_seed, one_turn


class Tape:
    """Tensors with one row per slot; the other dimensions grow when a request needs more."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.known_S5 = torch.zeros(slots, 5, dtype=torch.int64, device=device)
        self.seed_S, self.offset_S, self.prompt_S, self.last_S, self.limit_S = self.known_S5.unbind(1)
        """`seed`: seed of the draws. `offset`: number of tokens that earlier calls drew. `prompt`: prompt length.
        `last`: position of the newest token, which is not cached yet. `limit`: largest allowed position."""
        self.ids_SL = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.version_ST = torch.zeros(slots, 0, dtype=torch.int32, device=device)
        self.action_STM = torch.zeros(slots, 0, 0, dtype=torch.int32, device=device)
        self.logp_STM = torch.zeros(slots, 0, 0, device=device)
        self.best_STK = torch.zeros(slots, 0, 0, dtype=torch.int32, device=device)
        self.best_logp_STK = torch.zeros(slots, 0, 0, device=device)

    def seat(self, start: int, prompt: Prompt, members: Sequence[int], sampling: Sampling, dtype: torch.dtype) -> None:
        """Write prompt, seeds and limits of new rows to slots from `start`; log-probs are stored as `dtype`."""
        q, device = len(prompt.tokens), self.seed_S.device
        self._widen(q + sampling.max_tokens, sampling, dtype)
        at = slice(start, start + len(members))
        self.ids_SL[at, :q] = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)
        self.prompt_S[at], self.last_S[at], self.limit_S[at] = q, q - 1, q - 1 + sampling.max_tokens
        seeds = [derive_seed(prompt.seed, prompt.first + index) for index in members]
        self.seed_S[at], self.offset_S[at] = torch.tensor(seeds, device=device), prompt.offset

    def write(self, slot: int, begun: Rollout) -> None:
        """Write the tokens and records of an unfinished response to this slot, where it continues."""
        t, q, (_, m) = len(begun.tokens), int(self.prompt_S[slot]), begun.actions.shape
        self.ids_SL[slot, q : q + t] = torch.from_numpy(begun.tokens.astype(np.int64))
        self.last_S[slot] = q + t - 1
        self.version_ST[slot, :t] = torch.from_numpy(begun.versions)
        self.action_STM[slot, :t, :m] = torch.from_numpy(begun.actions)
        self.logp_STM[slot, :t, :m] = torch.from_numpy(begun.action_logp)
        if begun.best_ids is not None and begun.best_logp is not None:
            k = begun.best_ids.shape[1]
            self.best_STK[slot, :t, :k] = torch.from_numpy(begun.best_ids)
            self.best_logp_STK[slot, :t, :k] = torch.from_numpy(begun.best_logp)

    def _widen(self, length: int, sampling: Sampling, dtype: torch.dtype) -> None:
        tokens, draws, best = sampling.max_tokens, sampling.draws, sampling.best
        self.ids_SL = _grown(self.ids_SL, length)
        self.version_ST = _grown(self.version_ST, tokens)
        self.action_STM = _grown(self.action_STM, tokens, draws)
        self.logp_STM = _grown(self.logp_STM.to(dtype), tokens, draws)
        if best:
            self.best_STK = _grown(self.best_STK, tokens, best)
            self.best_logp_STK = _grown(self.best_logp_STK.to(dtype), tokens, best)

    def move(self, source: Tensor, target: Tensor) -> None:
        for tensor in (self.known_S5, self.ids_SL, *self._of_responses()):
            if tensor[0].numel():
                tensor[target] = tensor[source]

    def _of_responses(self) -> tuple[Tensor, ...]:
        return self.version_ST, self.action_STM, self.logp_STM, self.best_STK, self.best_logp_STK

    def read(self, slots: Sequence[int], longest: int) -> Columns:
        """Copy the first `longest` response tokens of these slots, with their records, to numpy arrays."""
        at = torch.tensor(slots, dtype=torch.int64, device=self.ids_SL.device)
        return Columns(*(tensor[at, :longest].cpu().numpy() for tensor in self._of_responses()))


class Columns(NamedTuple):
    """Result of `Tape.read`: arrays with one row for each of N slots."""

    version_NT: Ints
    action_NTM: Ints
    logp_NTM: Floats
    best_NTK: Ints
    best_logp_NTK: Floats

    def response(
        self, at: int, prompt: Prompt, place: int, sampling: Sampling, *, tokens: int, finish: Finish, kept: Kept | None
    ) -> Rollout:
        """Return array row `at` as the rollout of member `place` of its group."""
        draws, best = sampling.draws, sampling.best
        return one_turn(
            prompt,
            prompt.first + place,
            actions=self.action_NTM[at, :tokens, :draws].copy(),
            action_logp=self.logp_NTM[at, :tokens, :draws].copy(),
            best_ids=self.best_NTK[at, :tokens, :best].copy() if best else None,
            best_logp=self.best_logp_NTK[at, :tokens, :best].copy() if best else None,
            versions=self.version_NT[at, :tokens].copy(),
            finish=finish,
            kept=kept,
        )


def _grown(tensor: Tensor, *sizes: int) -> Tensor:
    shape = [max(have, want) for have, want in zip(tensor.shape[1:], sizes, strict=True)]
    if list(tensor.shape[1:]) == shape:
        return tensor
    wider = tensor.new_zeros(len(tensor), *shape)
    wider[tuple(slice(size) for size in tensor.shape)] = tensor
    return wider
