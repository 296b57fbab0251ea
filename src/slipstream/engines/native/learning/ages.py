"""Do fresh and stale samples of a batch teach the same? The cosine of their gradients.

Samples are put in order by their mean lag and cut in two. The gradient of the fresher half is made first and copied;
what the other half adds to it is its own. Whole gradients are compared, over all weights and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.engines.native.ranks import Ranks
from slipstream.protocols import Metrics
from slipstream.records import Scored

Key = tuple[int, int]
"""Number of the group, index in it."""


def halves(samples: Mapping[Key, Scored], ranks: Ranks) -> tuple[list[Key], list[Key]] | None:
    """Which of these belong to the fresher half of the samples of all ranks, and which do not; none of one age."""
    own = [(mean_version(sample), key) for key, sample in samples.items() if sample.rollout.trained_tokens]
    everyone = sorted(each for of_rank in ranks.gathered(own) for each in of_rank)
    if not everyone or everyone[0][0] == everyone[-1][0]:
        return None
    fresh = {key for _, key in everyone[len(everyone) // 2 :]}
    return [key for key in samples if key in fresh], [key for key in samples if key not in fresh]


def mean_version(sample: Scored) -> float:
    return float(sample.rollout.versions[sample.rollout.loss_mask].mean())


@torch.no_grad()
def cosine(fresh: Sequence[Tensor | None], both: Sequence[Tensor | None], ranks: Ranks) -> Metrics:
    """Of the one half's gradient with what the other has added to it, of every weight the part that lies here."""
    zero = torch.zeros(3, dtype=torch.float64)
    sums = zero.clone()
    for one, whole in zip(fresh, both, strict=True):
        if whole is None:
            continue
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
        one = torch.zeros_like(whole) if one is None else one.to(whole.dtype)
        other = whole - one
        sums += torch.stack([(one * other).sum(), one.square().sum(), other.square().sum()]).double().cpu()
    dot, of_one, of_other = sum(ranks.gathered(sums), start=zero).tolist()
    return {"gradient/cosine": dot / math.sqrt(of_one * of_other)} if of_one and of_other else {}
