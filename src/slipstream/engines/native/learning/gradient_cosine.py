"""Cosines of gradients: of fresh and of stale samples of a batch, and of consecutive updates.

Samples are sorted by mean version and split into halves. The gradient of the fresher half is computed first and copied;
the gradient of the other half is the total minus this copy. The cosine covers all weights on all ranks. The gradient of
the previous update is stored beside the moments of each weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.engines.native.ranks import Ranks
from slipstream.engines.weights import local
from slipstream.protocols import Metrics
from slipstream.records import Scored

Key = tuple[int, int]
"""Number of the group, and index of the sample in the group."""
BEFORE = "gradient"
"""Name of the previous update's gradient in the optimizer's state of a weight."""


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


@torch.no_grad()
def project(optimizer: torch.optim.Optimizer, ranks: Ranks, *, limit: float) -> Metrics:
    """Reduce the gradient's part along that of the previous update until their cosine is `limit`; return the cosine.

    g − p (a − limit·b/√(1 − limit²))/‖p‖ if cos(g, p) > limit, with g = a·p/‖p‖ + a part of length b orthogonal to p
    (GAC, 2603.01501). p is the previous gradient before its own projection. Return {} if one of the gradients is zero,
    or the new one is not finite.
    """
    found = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    pairs = [
        (local(each.grad), local(optimizer.state[each][BEFORE])) for each in found if BEFORE in optimizer.state[each]
    ]
    sums = torch.zeros(3, dtype=torch.float64)
    for one, before in pairs:
        wide, past = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (one, before))
        sums += torch.stack([(wide * past).sum(), wide.square().sum(), past.square().sum()]).double().cpu()
    dot, now, old = sum(ranks.gathered(sums), start=torch.zeros_like(sums)).tolist()
    if not now or not old or not math.isfinite(now):
        return {}
    across = math.sqrt(max(now - dot**2 / old, 0.0) / (1 - limit**2))
    excess = max(dot / math.sqrt(old) - limit * across, 0.0) / math.sqrt(old)
    for one, before in pairs:
        raw = one.clone()
        one.sub_(before, alpha=excess)
        before.copy_(raw)
    return {"gradient/cosine_previous": dot / math.sqrt(now * old)}


@torch.no_grad()
def store_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Store the gradient of each weight that has none from an earlier update; call it after the optimizer's step."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and BEFORE not in optimizer.state[each]:
                optimizer.state[each][BEFORE] = each.grad.clone()
