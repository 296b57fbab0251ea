"""Drift metrics: the distance between the learner and the sampling policy when the learner used the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Return the largest difference between each teacher's log-probs of the trained tokens and the student's."""
    gaps: dict[str, float] = {}
    for sample, logp_T in zip(samples, logp, strict=True):
        if sample.teacher_logp is not None and sample.rollout.trained_tokens:
            p_N = logp_T[torch.tensor(sample.rollout.loss_mask)].double()
            gap = float((torch.tensor(sample.teacher_logp).double() - p_N).abs().max())
            gaps[sample.teacher] = max(gap, gaps.get(sample.teacher, 0.0))
    return {f"teacher/{teacher}/difference_max": gap for teacher, gap in gaps.items()}
