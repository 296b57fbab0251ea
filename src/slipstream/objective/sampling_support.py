"""What could have been drawn, of several samples, as estimators take it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.estimators.logprobs.sampling_support import Support
from slipstream.records import Rollout


def support_of(rollouts: Sequence[Rollout], device: torch.device) -> Support | None:
    """Of their trained tokens, one sample after the other; None where nothing was left out, or nobody tells."""
    kept = [rollout.kept for rollout in rollouts if rollout.kept is not None]
    if not kept:
        return None
    assert len(kept) == len(rollouts), "some samples tell what else could be drawn, and others do not"
    ids_S, sizes_N = (np.concatenate([getattr(each, name) for each in kept]) for name in ("ids", "sizes"))
    return Support(ids_S, sizes_N, device)
