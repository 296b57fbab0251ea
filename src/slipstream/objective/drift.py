"""Drift metrics: the distance between the learner and the sampling policy when the learner used the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.drift import offpolicy_metrics
from slipstream.objective.frozen import Frozen, padded
from slipstream.protocols import Metrics
from slipstream.records import NOT_DRAWN, Scored


@dataclass(frozen=True, slots=True)
class Seen:
    """Data of one sample at the time of its loss: tensors over its T tokens."""

    logp_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    version_T: Tensor

    @classmethod
    def of(cls, sample: Scored, frozen: Frozen, logp_T: Tensor) -> Seen:
        return cls(logp_T, frozen.behavior_T, frozen.mask_T, torch.tensor(sample.rollout.versions))

    def on_cpu(self) -> Seen:
        return Seen(self.logp_T.cpu(), self.behavior_T, self.mask_T, self.version_T)


def drift_metrics(samples: Sequence[Seen], *, version: int) -> Metrics:
    """Return metrics of `estimators.drift` that compare current and sampling policy, over all tokens and by lag.

    Tokens that the student did not draw are left out.
    """
    samples = [sample for sample in samples if not (sample.version_T[sample.mask_T] == NOT_DRAWN).any()]
    if not samples:
        return {}
    lag_BT = (version - padded([sample.version_T for sample in samples])).clamp(min=0)
    found = offpolicy_metrics(
        padded([sample.logp_T for sample in samples]),
        padded([sample.behavior_T for sample in samples]),
        padded([sample.mask_T for sample in samples]),
        lag=lag_BT,
    )
    return {f"drift/{name}": value for name, value in found.items()}


def sharpness(samples: Sequence[Seen]) -> Metrics:
    """Return the regression slope of the sampler's log-probs on the learner's: 1, or 1/T if a temperature T differs."""
    ours_N = torch.cat([sample.logp_T[sample.mask_T].double() for sample in samples])
    theirs_N = torch.cat([sample.behavior_T[sample.mask_T].double() for sample in samples])
    ours, theirs = ours_N - ours_N.mean(), theirs_N - theirs_N.mean()
    return {"drift/sharpness": float((ours * theirs).sum() / (ours * ours).sum()) if ours.any() else 1.0}


def against_teachers(samples: Sequence[Scored], logp: Sequence[Tensor]) -> Metrics:
    """Return metrics that compare each teacher's log-probs of the trained tokens with the student's."""
    pairs: dict[str, list[Pair]] = {}
    prefixes = set[int]()
    for sample, logp_T in zip(samples, logp, strict=True):
        if sample.teacher_logp is not None and sample.rollout.trained_tokens:
            p_N = logp_T[torch.tensor(sample.rollout.loss_mask)].double()
            first = first_new_row(sample, prefixes)
            pairs.setdefault(sample.teacher, []).append((torch.tensor(sample.teacher_logp).double(), p_N, first))
    found = {teacher: comparison(each) for teacher, each in pairs.items()}
    return {f"teacher/{teacher}/{name}": value for teacher, metrics in found.items() for name, value in metrics.items()}


Pair = tuple[Tensor, Tensor, int]
"""(Teacher's log-probs, student's log-probs, index of the first row that no earlier response has) of a response."""


def first_new_row(sample: Scored, prefixes: set[int]) -> int:
    """Return the index of the first trained token that no earlier response has at this prefix; token count if none."""
    prefix = hash((sample.teacher, sample.rollout.prompt.tokens.tobytes()))
    new_T = []
    for token in sample.rollout.tokens.tolist():
        prefix = hash((prefix, token))
        new_T.append(prefix not in prefixes)
        prefixes.add(prefix)
    new_N = np.array(new_T)[sample.rollout.loss_mask]
    return int(new_N.argmax()) if new_N.any() else len(new_N)


def comparison(pairs: Sequence[Pair]) -> Metrics:
    """Return statistics of a teacher's and the student's log-probs over several responses.

    Tokens that are hard to predict are hard for both models. Therefore probabilities correlate best at shift 0.
    """
    news = [(q_N[first:], p_N[first:]) for q_N, p_N, first in pairs]

    def correlation(shift: int) -> float:
        """Return the correlation of probabilities: the teacher's at row n + shift with the student's at row n."""
        q_N = torch.cat([q_N[max(shift, 0) : len(q_N) + min(shift, 0)] for q_N, _ in news])
        p_N = torch.cat([p_N[max(-shift, 0) : len(p_N) - max(shift, 0)] for _, p_N in news])
        both = torch.stack([q_N, p_N]).exp()
        return float(torch.corrcoef(both)[0, 1].nan_to_num()) if both.shape[1] > 1 else 0.0

    whole = [torch.cat(side) for side in zip(*news, strict=True)]
    return {
        "difference_max": max(float((q - p).abs().max()) for q, p, _ in pairs),
        "aligned": correlation(0),
        "shifted": max(correlation(1), correlation(-1)),
        "tokens": float(len(whole[0])),
        "neighbours": float(sum(max(len(q_N) - 1, 0) for q_N, _ in news)),
        "spread": float(whole[0].max() - whole[0].min()),
        "student_spread": float(whole[1].max() - whole[1].min()),
    }
