"""Tape: tensors that record, for each slot, prompt, tokens, draws (ids sampled at one position), log-probs, versions.

Shapes: S slots, L positions, T response positions, M draws, K best ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.draws import draw, draw_with_teacher, fused, process, uniforms
from slipstream.engines.native.sampling.requests import Request, Row
from slipstream.protocols import Sampling
from slipstream.records import Finish, Rollout, derive_seed, one_turn, support_from_ids


class Tape:
    """Tensors with one row per slot; the other dimensions grow when a request needs more."""

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        """Create empty tensors; `dtype` is that of the log-probs."""

        def empty(kind: torch.dtype, *sizes: int) -> Tensor:
            return torch.zeros(slots, *sizes, dtype=kind, device=device)

        self.dtype, self.known_S4 = dtype, empty(torch.int64, 4)
        self.seed_S, self.offset_S, self.prompt_S, self.last_S = self.known_S4.unbind(1)
        """`seed`: seed of the draws. `offset`: number of drawn tokens in the prompt. `prompt`: prompt length.
        `last`: position of the newest token, which is not cached yet."""
        self.ids_SL = empty(torch.int64, 0)
        self.columns = {
            "versions": empty(torch.int32, 0),
            "actions": empty(torch.int32, 0, 0),
            "action_logp": empty(dtype, 0, 0),
            "best_ids": empty(torch.int32, 0, 0),
            "best_logp": empty(dtype, 0, 0),
            "replaced": empty(torch.bool, 0),
        }
        """Columns [S, T], [S, T, M] or [S, T, K] of the responses, by their names in a `Rollout`."""

    def seat(self, start: int, request: Request, members: Sequence[int]) -> None:
        """Write prompt, seeds and limits of these members (responses) of a request to slots from `start`."""
        prompt, sampling = request.prompt, request.sampling
        q, device = len(prompt.tokens), self.seed_S.device
        self.ids_SL = _grown(self.ids_SL, q + sampling.max_tokens)
        for name, widths in columns_of(sampling).items():
            self.columns[name] = _grown(self.columns[name], sampling.max_tokens, *widths)
        at = slice(start, start + len(members))
        self.ids_SL[at, :q] = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)
        self.prompt_S[at], self.last_S[at] = q, q - 1
        seeds = [derive_seed(prompt.seed, index) for index in members]
        self.seed_S[at], self.offset_S[at] = torch.tensor(seeds, device=device), prompt.offset

    def write(self, slot: int, begun: Rollout) -> None:
        """Write a response that an earlier call began."""
        t, q = len(begun.tokens), int(self.prompt_S[slot])
        self.ids_SL[slot, q : q + t] = torch.from_numpy(begun.tokens.astype(np.int64))
        self.last_S[slot] = q + t - 1
        for name, tensor in self.columns.items():
            if (values := getattr(begun, name)) is not None:
                at: Any = (slot, *map(slice, values.shape))
                tensor[at] = torch.from_numpy(values)

    def record(self, name: str, slot_N: Tensor, time_N: Tensor, values: Tensor) -> None:
        """Write values of a column, [N] or [N, M], at these slots and response positions."""
        column = self.columns[name]
        if values.ndim == 1:
            column[slot_N, time_N] = values.to(column)
        else:
            column[slot_N, time_N, : values.shape[1]] = values.to(column)

    def draw(
        self, sampling: Sampling, slot_N: Tensor, time_N: Tensor, logits_NV: Tensor, teacher_NV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw and record at these slots and response positions; return the emitted ids and all log-probs.

        `teacher_NV`: logits of the teacher that the sampler asks; needed if requests mix or replace the student's.
        """
        numbers = sampling.draws * (2 if sampling.teacher_replaces else 1)
        uniform_NM = uniforms(self.seed_S[slot_N], self.offset_S[slot_N] + time_N, numbers)
        if sampling.fusion:
            assert teacher_NV is not None
            logits_NV = fused(logits_NV, teacher_NV, sampling.fusion)
        logp_NV = process(logits_NV, sampling)
        if sampling.teacher_replaces:
            assert teacher_NV is not None
            told_NV = process(teacher_NV, sampling)
            ids_NM, logp_NM, replaced_NM = draw_with_teacher(logp_NV, told_NV, sampling.teacher_replaces, uniform_NM)
            self.record("replaced", slot_N, time_N, replaced_NM[:, 0])
        else:
            ids_NM, logp_NM = draw(logp_NV, uniform_NM)
        self.record("actions", slot_N, time_N, ids_NM)
        self.record("action_logp", slot_N, time_N, logp_NM)
        if sampling.best:
            best = logp_NV.topk(sampling.best, -1)
            self.record("best_ids", slot_N, time_N, best.indices)
            self.record("best_logp", slot_N, time_N, best.values)
        return ids_NM[:, 0], logp_NV

    def move(self, source: Tensor, target: Tensor) -> None:
        for tensor in (self.known_S4, self.ids_SL, *self.columns.values()):
            if tensor[0].numel():
                tensor[target] = tensor[source]

    def read(self, finishes: Mapping[int, Finish], rows: Sequence[Row]) -> list[Rollout]:
        """Return the responses of rows as rollouts; `finishes` has slot and finish reason of each row, in order."""
        longest = max((row.tokens for row in rows), default=0)
        at = torch.tensor(list(finishes), dtype=torch.int64, device=self.ids_SL.device)
        columns = {name: tensor[at, :longest].cpu().numpy() for name, tensor in self.columns.items()}
        rollouts = []
        for i, (row, finish) in enumerate(zip(rows, finishes.values(), strict=True)):
            prompt, kept = row.request.prompt, support_from_ids(row.kept) if row.kept else None
            own: dict[str, Any] = {}
            for name, widths in columns_of(row.request.sampling).items():
                at_of_row: Any = (i, slice(row.tokens), *map(slice, widths))
                own[name] = columns[name][at_of_row].copy()
            rollouts.append(one_turn(prompt, row.index, finish=finish, kept=kept, **own))
        return rollouts


def columns_of(sampling: Sampling) -> dict[str, tuple[int, ...]]:
    """Return the columns that requests with these options have, and the width of each beyond its positions."""
    columns: dict[str, tuple[int, ...]] = {"versions": ()}
    columns |= dict.fromkeys(("actions", "action_logp"), (sampling.draws,))
    columns |= dict.fromkeys(("best_ids", "best_logp"), (sampling.best,)) if sampling.best else {}
    return columns | ({"replaced": ()} if sampling.teacher_replaces else {})


def _grown(tensor: Tensor, *sizes: int) -> Tensor:
    shape = [max(have, want) for have, want in zip(tensor.shape[1:], sizes, strict=True)]
    if list(tensor.shape[1:]) == shape:
        return tensor
    wider = tensor.new_zeros(len(tensor), *shape)
    wider[tuple(slice(size) for size in tensor.shape)] = tensor
    return wider
