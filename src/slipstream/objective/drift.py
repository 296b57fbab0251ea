"""How far the learner was from what drew its tokens, at the moment it learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.drift import offpolicy_metrics
from slipstream.objective.frozen import Frozen, padded
from slipstream.protocols import Metrics
from slipstream.records import Scored


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample as the loss saw it: tensors over its T tokens."""

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
    """Those of `estimators.drift`, of the current policy against the one that drew, by lag too."""
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
    """The slope of what drew against the learner, in log-probs: 1, or 1/T where a temperature T is between them."""
    ours_N = torch.cat([sample.logp_T[sample.mask_T].double() for sample in samples])
    theirs_N = torch.cat([sample.behavior_T[sample.mask_T].double() for sample in samples])
    ours, theirs = ours_N - ours_N.mean(), theirs_N - theirs_N.mean()
    return {"drift/sharpness": float((ours * theirs).sum() / (ours * ours).sum()) if ours.any() else 1.0}


def against_teachers(samples: Sequence[Scored], logp: Sequence[Tensor]) -> Metrics:
    """Student and each teacher on the trained tokens: where they differ most, and whether its rows are in place."""
    pairs: dict[str, list[Pair]] = {}
    said = set[int]()
    for sample, logp_T in zip(samples, logp, strict=True):
        if sample.teacher_logp is not None and sample.rollout.trained_tokens:
            p_N = logp_T[torch.tensor(sample.rollout.loss_mask)].double()
            first = first_news(sample, said)
            pairs.setdefault(sample.teacher, []).append((torch.tensor(sample.teacher_logp).double(), p_N, first))
    found = {teacher: compared(its) for teacher, its in pairs.items()}
    return {f"teacher/{teacher}/{name}": value for teacher, its in found.items() for name, value in its.items()}


Pair = tuple[Tensor, Tensor, int]
"""A teacher's and the student's log-probs of one response, and the first row that no other response has had."""


def first_news(sample: Scored, said: set[int]) -> int:
    """The first trained token that nobody has said after the same words: the same answer twice is no more evidence."""
    so_far = hash((sample.teacher, sample.rollout.prompt.tokens.tobytes()))
    new_T = []
    for token in sample.rollout.tokens.tolist():
        so_far = hash((so_far, token))
        new_T.append(so_far not in said)
        said.add(so_far)
    new_N = np.array(new_T)[sample.rollout.loss_mask]
    return int(new_N.argmax()) if new_N.any() else len(new_N)


def compared(pairs: Sequence[Pair]) -> Metrics:
    """Of a teacher's log-probs with the student's, of so many responses.

    What is hard to guess for one is hard for the other, so their log-probs correlate best unshifted.
    """
    news = [(q_N[first:], p_N[first:]) for q_N, p_N, first in pairs]

    def correlation(shift: int) -> float:
        """Of the teacher's row n + shift with the student's n."""
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
