"""Cosine between the gradients of fresh and of stale samples of a batch.

Samples are sorted by mean version and split into halves. The gradient of the fresher half is computed first and copied;
the gradient of the other half is the total minus this copy. The cosine covers all weights on all ranks.
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
"""Number of the group, and index of the sample in the group."""


def halves(samples: Mapping[Key, Scored], ranks: Ranks) -> tuple[list[Key], list[Key]] | None:
    """Return this rank's keys in the fresher and in the staler half of all samples; None if all have the same age."""
    trained = {key: sample.rollout for key, sample in samples.items() if sample.rollout.trained_tokens}
    own = [(float(rollout.versions[rollout.loss_mask].mean()), key) for key, rollout in trained.items()]
    everyone = sorted(each for of_rank in ranks.gathered(own) for each in of_rank)
    if not everyone or everyone[0][0] == everyone[-1][0]:
        return None
    fresh = {key for _, key in everyone[len(everyone) // 2 :]}
    return [key for key in samples if key in fresh], [key for key in samples if key not in fresh]


@torch.no_grad()
def cosine(fresh: Sequence[Tensor | None], both: Sequence[Tensor | None], ranks: Ranks) -> Metrics:
    """Return the cosine of `fresh` and `both` − `fresh` over the shards of all ranks; empty if a gradient is zero."""
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
