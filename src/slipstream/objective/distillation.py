"""Distillation loss of a batch: ids and log-probs for a formula, and the loss of each position.

Shapes: N trained tokens, C rows of a chunk, M cached draws, K support, V vocabulary, D teacher's hidden size.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config.losses import Cache, DistillationLoss
from slipstream.estimators.divergence import clamped, overlap_ratio, overlap_token_advantage, raised, support_mass
from slipstream.estimators.logprobs.sampling_support import all_read_as_one
from slipstream.estimators.logprobs.tiles import Head
from slipstream.estimators.numerics import joined
from slipstream.estimators.options import formula
from slipstream.objective.columns import present
from slipstream.objective.constants import UpdateConstants
from slipstream.objective.method import DRAWS_OF_OPERANDS
from slipstream.protocols import OneEnd
from slipstream.records import ABSENT, Scored

Metrics = dict[str, Tensor]
SUPPORTED = "supported"
"""Metric that is 1: its mean is the share of tokens that are compared with a teacher that leaves some out."""
LossOfRows = Callable[..., tuple[Tensor, Metrics]]
"""Function from (student's log-probs, slice of rows, student's best_ids) to (loss per row, metrics per row)."""
SCORE_COLUMNS: dict[Cache, dict[str, Callable[[Scored], NDArray[Any] | None]]] = {
    "none": {
        "ids": lambda sample: sample.rollout.tokens[sample.rollout.loss_mask][:, None],
    },
    "sampled": {
        "ids": lambda sample: sample.rollout.actions,
        "behavior": lambda sample: sample.rollout.action_logp,
        "teacher": lambda sample: sample.compared_logp,
    },
    "student_topk": {
        "ids": lambda sample: sample.rollout.best_ids,
        "behavior": lambda sample: sample.rollout.best_logp,
        "teacher": lambda sample: sample.teacher_best_logp,
    },
    "teacher_topk": {
        "ids": lambda sample: sample.teacher_ids,
        "teacher": lambda sample: sample.teacher_topk_logp,
    },
}
"""Functions that read ids and log-probs from a scored sample, for each kind of teacher scores (cache) except hidden."""


class TeacherHead(NamedTuple):
    """Output head of one version of a teacher, and its mapping of end tokens, if any."""

    head: Head
    one_end: OneEnd | None = None
    layout_X: Tensor | None = None
    """The teacher's token for each token of the student, −1 for none, and behind them its other tokens. None: both have
    one vocabulary."""


TeacherHeads = Mapping[tuple[str, int], TeacherHead]
"""Heads that turn hidden states of teachers into logits, by name and version of the teacher."""


class Distillation:
    def __init__(self, loss: DistillationLoss, heads: TeacherHeads | None = None) -> None:
        self.spec, self.temperature, self.heads = loss.spec, loss.temperature, {} if heads is None else heads
        self.formula = formula(self.spec.formula)
        self.dense = self.spec.cache == "hidden"
        """True if the formula needs distributions over the whole vocabulary."""
        self.on_draws = self.spec.cache == "sampled"
        """True if the loss is computed at the draws (tokens sampled at each position)."""
        self.on_kept = self.on_draws and "behavior" in self.spec.takes
        """True if the formula uses the sampling policy. Log-probs are then conditioned on the sampling support."""
        self.best = self.spec.k if self.spec.cache == "teacher_topk" else 0
        """Number of the student's most likely ids that metrics compare with the teacher's top-k; 0 for none."""

    def __call__(
        self, samples: Sequence[Scored], constants: Sequence[UpdateConstants], tokens_N: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | None, LossOfRows]:
        """Return the ids of the loss, emitted token first (None: whole vocabulary), and a function for the loss."""
        if self.dense:
            return None, self._on_vocabulary(samples, tokens_N.device, dtype)
        device, takes = tokens_N.device, self.spec.takes

        def column(name: str, kind: torch.dtype) -> Tensor:
            read = SCORE_COLUMNS[self.spec.cache][name]
            return joined([present(read(sample)) for sample in samples], device, kind)

        ids_NM = column("ids", torch.int64)
        known: dict[str, Tensor] = {name: column(name, dtype) for name in ("teacher", "behavior") if name in takes}
        for name in (name for name in takes if name in DRAWS_OF_OPERANDS):
            value_NM = torch.cat([each.columns[DRAWS_OF_OPERANDS[name]] for each in constants])
            known[name] = value_NM.to(device, dtype if value_NM.is_floating_point() else value_NM.dtype)
        # given tokens are emitted tokens, and draws begin with those; top-k ids may not contain the emitted token
        first = 0 if self.spec.cache in ("none", "sampled") else 1

        def on_ids(logp_CM: Tensor, rows: slice, best_ids: Tensor | None = None) -> tuple[Tensor, Metrics]:
            operands = {name: value_NM[rows] for name, value_NM in known.items()}
            logp_CK = logp_CM[:, first:]
            if self.spec.own_vocabulary:
                logp_CK = logp_CK.masked_fill(ids_NM[rows] == ABSENT, -torch.inf)
            loss_C, metrics = self._loss(operands | {"student": logp_CK})
            if first:
                logq_CK = operands["teacher"]
                metrics |= support_mass(logp_CK, logq_CK)
                if self.spec.own_vocabulary:
                    metrics[SUPPORTED] = torch.ones_like(loss_C)
                if best_ids is not None:
                    ratio_C = overlap_ratio(best_ids, ids_NM[rows])
                    advantage_C, shared_C = overlap_token_advantage(best_ids, ids_NM[rows], logp_CK, logq_CK)
                    metrics |= {"overlap_ratio": ratio_C.to(logp_CK), "overlap_any": shared_C.to(logp_CK)}
                    metrics["overlap_token_advantage"] = advantage_C
            return loss_C, metrics

        return torch.cat([tokens_N[:, None], ids_NM.clamp(min=0)], 1) if first else ids_NM, on_ids

    def _on_vocabulary(self, samples: Sequence[Scored], device: torch.device, dtype: torch.dtype) -> LossOfRows:
        """Return a function that applies the teachers' heads to a chunk and computes the loss, without an N×V tensor.

        The rows of a chunk are grouped by teacher, because teachers may differ in width and vocabulary.
        """
        hidden, places = defaultdict[tuple[str, int], list[Any]](list), defaultdict[tuple[str, int], list[Any]](list)
        start = 0
        for sample in samples:
            teacher, own_ND = (sample.teacher, sample.teacher_version), present(sample.teacher_hidden)
            hidden[teacher].append(own_ND)
            places[teacher].append(np.arange(start, start := start + len(own_ND)))
        hidden_ND = {teacher: _on_device(np.concatenate(parts), device) for teacher, parts in hidden.items()}
        place_N = {teacher: np.concatenate(parts) for teacher, parts in places.items()}
        later_N2 = self._later(samples, device, dtype)

        def on_vocabulary(logp_CV: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
            own, order = list[Tensor](), list[NDArray[Any]]()
            with torch.no_grad():
                for teacher, its_N in place_N.items():
                    within = slice(*np.searchsorted(its_N, [rows.start, rows.stop]))
                    if len(its_N[within]):
                        own.append(self._logq(self.heads[teacher], hidden_ND[teacher][within], dtype, logp_CV.shape[1]))
                        order.append(its_N[within])
                logq_CV = own[0]
                if len(own) > 1:
                    logq_CV = torch.cat(widened(own))[torch.from_numpy(np.argsort(np.concatenate(order))).to(device)]
            if later_N2 is not None:
                logp_CV, logq_CV = logp_CV + later_N2[rows, :1], logq_CV + later_N2[rows, 1:]
            return self._loss({"student": logp_CV, "teacher": logq_CV})

        return on_vocabulary

    def _later(self, samples: Sequence[Scored], device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the log-probs of the later tokens of spans; None if the loss compares no spans of several tokens."""
        if not self.spec.merges:
            return None
        none = [np.zeros((sample.rollout.trained_tokens, 2), np.float32) for sample in samples]
        known = [sample.later_logp for sample in samples]
        return joined([zeros if own is None else own for own, zeros in zip(known, none, strict=True)], device, dtype)

    def _logq(self, teacher: TeacherHead, hidden_CD: Tensor, dtype: torch.dtype, vocabulary: int) -> Tensor:
        logits_CV = teacher.head(hidden_CD).to(dtype) / self.temperature
        if teacher.layout_X is not None:
            layout_X = teacher.layout_X.to(logits_CV.device)
            logq_CX = logits_CV.log_softmax(-1)[:, layout_X.clamp(min=0)]
            return logq_CX.masked_fill(layout_X < 0, -torch.inf)
        if teacher.one_end is not None:
            logits_CV = all_read_as_one(logits_CV.log_softmax(-1), **teacher.one_end._asdict())
        return logits_CV[:, :vocabulary].log_softmax(-1)

    def _loss(self, operands: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        for name in operands.keys() & {"student", "teacher"}:
            least, absent = self.spec.log_prob_min_clamp, self.spec.own_vocabulary and name == "teacher"
            operands[name] = raised(operands[name], log_prob_min_clamp=least, absent=absent)
        result = self.formula(*(operands[name] for name in self.spec.takes), **self.spec.options)
        loss_C, metrics = result if isinstance(result, tuple) else (result, {})
        if loss_C.ndim == 2:  # an estimate for each draw
            loss_C = loss_C.mean(-1)
        return clamped(loss_C, loss_max_clamp=self.spec.loss_max_clamp), metrics


def widened(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return log-probs over vocabularies of several teachers with equal widths; no teacher writes the new tokens."""
    width = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part in parts]


def _on_device(hidden_ND: NDArray[Any], device: torch.device) -> Tensor:
    """Return hidden states as a tensor; numpy has no bfloat16, so records hold its bits as uint16."""
    hidden = torch.from_numpy(hidden_ND).to(device)
    return hidden.view(torch.bfloat16) if hidden.dtype == torch.uint16 else hidden
