"""Sampling supports (ids that truncated sampling can draw) of several samples, in the form that estimators use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.estimators.logprobs.sampling_support import Support
from slipstream.records import Rollout


def support_of(rollouts: Sequence[Rollout], device: torch.device) -> Support | None:
    """Return the supports of all trained tokens in sample order; None if no support was recorded."""
    kept = [rollout.kept for rollout in rollouts if rollout.kept is not None]
    if not kept:
        return None
    assert len(kept) == len(rollouts), "some samples have a sampling support, and others do not"
    ids_S, sizes_N = (np.concatenate([getattr(each, name) for each in kept]) for name in ("ids", "sizes"))
    return Support(ids_S, sizes_N, device)
