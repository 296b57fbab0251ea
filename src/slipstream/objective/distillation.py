"""Distillation loss of a batch: ids and log-probs for a formula, and the loss of each position.

Shapes: N trained tokens, C rows of a chunk, M cached draws, K support, V vocabulary, D teacher's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config.losses import Cache, DistillationLoss
from slipstream.estimators.divergence import clamped, overlap_ratio, overlap_token_advantage, raised, support_mass
from slipstream.estimators.logprobs.head import Head
from slipstream.estimators.numerics import joined
from slipstream.estimators.options import formula
from slipstream.objective.frozen import Frozen
from slipstream.records import Scored

Metrics = dict[str, Tensor]
LossOfRows = Callable[..., tuple[Tensor, Metrics]]
"""Function from (student's log-probs at the ids, slice of rows, best_ids of the student) to (loss per row, metrics per
row)."""
Array = NDArray[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Functions that read ids and log-probs for one kind of teacher scores (cache) from a scored sample."""

    ids: Callable[[Scored], Array]
    behavior: Callable[[Scored], Array]
    teacher: Callable[[Scored], Array]


COLUMNS: dict[Cache, Columns] = {
    "sampled": Columns(
        ids=lambda s: s.rollout.actions,
        behavior=lambda s: s.rollout.action_logp,
        teacher=lambda s: s.teacher_action_logp,
    ),
    "student_topk": Columns(
        ids=lambda s: s.rollout.best_ids,
        behavior=lambda s: s.rollout.best_logp,
        teacher=lambda s: s.teacher_best_logp,
    ),
    "teacher_topk": Columns(
        ids=lambda s: s.teacher_ids,
        behavior=lambda s: None,
        teacher=lambda s: s.teacher_topk_logp,
    ),
}
"""Columns for each kind of teacher scores (cache); hidden states have no columns."""


class Distillation:
    def __init__(self, loss: DistillationLoss, teacher_head: Head | None = None) -> None:
        self.asks, self.temperature, self.teacher_head = loss.asks, loss.temperature, teacher_head
        self.formula = formula(self.asks.formula)
        self.dense = self.asks.cache == "hidden"
        """True if the formula needs distributions over the whole vocabulary."""
        self.on_draws = self.asks.cache == "sampled"
        """True if the loss is computed at the draws (tokens sampled at each position)."""
        self.on_kept = self.on_draws and "behavior" in self.asks.takes
        """True if the formula compares with the sampling policy. Log-probs are then conditioned on the sampling
        support."""
        self.best = self.asks.k if self.asks.cache == "teacher_topk" else 0
        """Number of the student's most likely ids that metrics compare with the teacher's top-k; 0 for none."""

    def __call__(
        self, samples: Sequence[Scored], frozen: Sequence[Frozen], tokens_N: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | None, LossOfRows]:
        """Return the ids of the loss, emitted token first (None: whole vocabulary), and a function for the loss."""
        if self.dense:
            return None, self._on_vocabulary(samples, tokens_N.device, dtype)
        columns, takes = COLUMNS[self.asks.cache], self.asks.takes

        def column(of: Callable[[Scored], Array], kind: torch.dtype) -> Tensor:
            return joined([_present(of(sample)) for sample in samples], tokens_N.device, kind)

        ids_NM, known = column(columns.ids, torch.int64), {"teacher": column(columns.teacher, dtype)}
        if "behavior" in takes:
            known["behavior"] = column(columns.behavior, dtype)
        if "proximal" in takes:
            known["proximal"] = _of_draws([each.proximal_NM for each in frozen], tokens_N.device).to(dtype)
        if "keep" in takes:
            known["keep"] = _of_draws([each.keep_NM for each in frozen], tokens_N.device)
        # draws begin with the emitted token; top-k ids may not contain it
        first = 0 if self.asks.cache == "sampled" else 1

        def on_ids(logp_CM: Tensor, rows: slice, best_ids: Tensor | None = None) -> tuple[Tensor, Metrics]:
            operands = {name: value_NM[rows] for name, value_NM in known.items()}
            loss_C, metrics = self._loss(operands | {"student": logp_CM[:, first:]})
            if first:
                logp_CK, logq_CK = logp_CM[:, first:], operands["teacher"]
                metrics |= support_mass(logp_CK, logq_CK)
                if best_ids is not None:
                    metrics |= overlap(best_ids, ids_NM[rows], logp_CK, logq_CK)
            return loss_C, metrics

        return torch.cat([tokens_N[:, None], ids_NM], 1) if first else ids_NM, on_ids

    def _on_vocabulary(self, samples: Sequence[Scored], device: torch.device, dtype: torch.dtype) -> LossOfRows:
        """Return a function that applies the teacher's head to a chunk and computes the loss, without an N×V tensor."""
        head = self.teacher_head
        assert head is not None, "the hidden cache needs the teacher's head"
        hidden_ND = _hidden([_present(sample.teacher_hidden) for sample in samples]).to(device)

        def on_vocabulary(logp_CV: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
            with torch.no_grad():
                logits_CV = head(hidden_ND[rows]).to(dtype)[:, : logp_CV.shape[1]]
                logq_CV = (logits_CV / self.temperature).log_softmax(-1)
            return self._loss({"student": logp_CV, "teacher": logq_CV})

        return on_vocabulary

    def _loss(self, operands: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        asks = self.asks
        for name in ("student", "teacher"):
            operands[name] = raised(operands[name], log_prob_min_clamp=asks.log_prob_min_clamp)
        found = self.formula(*(operands[name] for name in asks.takes), **asks.options)
        loss_C, metrics = found if isinstance(found, tuple) else (found, {})
        if loss_C.ndim == 2:  # an estimate for each draw
            loss_C = loss_C.mean(-1)
        return clamped(loss_C, loss_max_clamp=asks.loss_max_clamp), metrics


def overlap(best_ids: Tensor, ids_CK: Tensor, logp_CK: Tensor, logq_CK: Tensor) -> Metrics:
    """Return metrics: the overlap of the student's and the teacher's top-k, and the advantage of the shared ids."""
    advantage_C, shared_C = overlap_token_advantage(best_ids, ids_CK, logp_CK, logq_CK)
    ratio_C = overlap_ratio(best_ids, ids_CK).to(logp_CK.dtype)
    return {
        "overlap_ratio": ratio_C,
        "overlap_token_advantage": advantage_C,
        "overlap_any": shared_C.to(logp_CK.dtype),
    }


def _of_draws(parts: Sequence[Tensor | None], device: torch.device) -> Tensor:
    present = [part for part in parts if part is not None]
    assert len(present) == len(parts), "a pass that the loss needs was not made"
    return torch.cat(present).to(device)


def _present(cache: Array) -> NDArray[Any]:
    assert cache is not None, "the scorer filled another cache than the loss reads"
    return cache


def _hidden(arrays: Sequence[NDArray[Any]]) -> Tensor:
    tensor = torch.from_numpy(np.concatenate(arrays))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
