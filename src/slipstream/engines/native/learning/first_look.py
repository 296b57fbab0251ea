"""What a batch looks like before its first gradient: its tokens under every policy that the method asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.base import Metrics
from slipstream.engines.native.learning.passes import Passes
from slipstream.engines.native.learning.snapshots import PREVIOUS, REFERENCE, Snapshots
from slipstream.engines.native.ranks import Ranks
from slipstream.objective.frozen import Evidence, behavior_of
from slipstream.objective.method import Method
from slipstream.records import Scored


def drawn_by(version: int, sample: Scored) -> Tensor:
    """Its trained tokens of this version, [T]."""
    return torch.from_numpy((sample.rollout.versions == version) & sample.rollout.loss_mask)


class FirstLook:
    """`version` is always that of the learner as it is. All ranks make the same passes, whoever needs them."""

    def __init__(self, method: Method, passes: Passes, snapshots: Snapshots, ranks: Ranks) -> None:
        self.method, self.passes, self.snapshots, self.ranks = method, passes, snapshots, ranks

    def evidence(self, samples: Sequence[Scored], version: int) -> list[Evidence]:
        """The log-probs of the trained tokens under every policy that the method asks for; 0 where one is masked."""
        method, drawn = self.method, self._drawn(samples)
        asked = method.current_first or (method.decoupled and version in drawn)
        current = self.passes.log_probs(samples) if asked else None
        reference = self.passes.log_probs(samples, self.snapshots, REFERENCE) if method.reference is not None else None
        old, missing = None, [0] * len(samples)
        if method.previous:
            old = self.passes.log_probs(samples, self.snapshots, PREVIOUS)
        elif method.decoupled:
            old, missing = self._at_own_version(samples, {version: current} if current is not None else {}, drawn)
        kl = None
        if method.rejects("seq_max_kl"):
            found, known = self._kl_to_own_version(samples, version, drawn, kind="forward")
            kl = [kl_T.masked_fill(~known_T, torch.inf) for kl_T, known_T in zip(found, known, strict=True)]
        return [
            Evidence(
                group=sample.rollout.prompt.number,
                episode=sample.rollout.episode,
                reward=sample.rollout.rewards.get(method.reward, 0.0),
                mask_T=torch.tensor(sample.rollout.loss_mask),
                turn_T=torch.from_numpy(np.where(sample.rollout.loss_mask, sample.rollout.turn, -1)),
                behavior_T=behavior_of(sample).double(),
                old_T=old[i] if old is not None else None,
                current_T=current[i] if current is not None else None,
                reference_T=reference[i] if reference is not None else None,
                kl_T=kl[i] if kl is not None else None,
                missing=missing[i],
            )
            for i, sample in enumerate(samples)
        ]

    def _drawn(self, samples: Sequence[Scored]) -> list[int]:
        """The versions that drew any of these trained tokens, or of those that other ranks have."""
        mine = {int(version) for sample in samples for version in sample.rollout.versions[sample.rollout.loss_mask]}
        return sorted(set().union(*self.ranks.gathered(mine)))

    def _at_own_version(
        self, samples: Sequence[Scored], known: dict[int, list[Tensor]], drawn: Sequence[int]
    ) -> tuple[list[Tensor], list[int]]:
        """Each token under the weights that drew it; where those are gone, what the sampler said of it."""
        old = [behavior_of(sample).double() for sample in samples]
        left = [torch.tensor(sample.rollout.loss_mask) for sample in samples]
        for version in drawn:
            if version not in known and version not in self.snapshots:
                continue
            here = [drawn_by(version, sample) for sample in samples]
            chosen = [i for i, here_T in enumerate(here) if here_T.any()]
            found = (
                [known[version][i] for i in chosen]
                if version in known
                else self.passes.log_probs([samples[i] for i in chosen], self.snapshots, version)
            )
            for i, logp_T in zip(chosen, found, strict=True):
                old[i], left[i] = torch.where(here[i], logp_T, old[i]), left[i] & ~here[i]
        return old, [int(left_T.sum()) for left_T in left]

    def _kl_to_own_version(
        self, samples: Sequence[Scored], version: int, drawn: Sequence[int], *, kind: Literal["forward", "reverse"]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """KL between the learner as it is and as it was when it drew each token, and of which tokens that is known.

        `reverse` is KL(as it is ‖ as it was), exact over the vocabulary; what the engines disagree on is not in it.
        """
        kl = [torch.zeros(len(sample.rollout.tokens), dtype=torch.float64) for sample in samples]
        # of the same policy it is 0
        known = [drawn_by(version, sample) | ~torch.tensor(sample.rollout.loss_mask) for sample in samples]
        for drew in drawn:
            if drew == version or drew not in self.snapshots:
                continue
            here = [drawn_by(drew, sample) for sample in samples]
            chosen = [i for i, here_T in enumerate(here) if here_T.any()]
            found = self.passes.rollout_kl([samples[i] for i in chosen], self.snapshots, drew, kind=kind)
            for i, kl_T in zip(chosen, found, strict=True):
                kl[i], known[i] = torch.where(here[i], kl_T.double(), kl[i]), known[i] | here[i]
        return kl, known

    def rollout_drift(self, samples: Sequence[Scored], version: int) -> Metrics:
        """Mean KL to the policy that drew each token, over the trained tokens whose version is still there."""
        found, known = self._kl_to_own_version(samples, version, self._drawn(samples), kind="reverse")
        masks = [torch.tensor(sample.rollout.loss_mask) for sample in samples]
        mine = (
            sum(float(kl_T[mask_T].sum()) for kl_T, mask_T in zip(found, masks, strict=True)),
            sum(int((known_T & mask_T).sum()) for known_T, mask_T in zip(known, masks, strict=True)),
            sum(int(mask_T.sum()) for mask_T in masks),
        )
        sums = [sum(part) for part in zip(*self.ranks.gathered(mine), strict=True)]
        return {"drift/rollout_kl": sums[0] / max(sums[1], 1), "drift/rollout_kl_coverage": sums[1] / max(sums[2], 1)}
