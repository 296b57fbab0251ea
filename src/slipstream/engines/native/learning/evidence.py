"""Passes over a batch before its first gradient: log-probs of its tokens under each policy that the method needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.learning.passes import Kind, Passes
from slipstream.engines.native.learning.snapshots import PREVIOUS, REFERENCE, Snapshots
from slipstream.engines.native.ranks import Ranks
from slipstream.objective.frozen import Draws, Evidence, behavior_of, present
from slipstream.objective.method import Method
from slipstream.protocols import Metrics
from slipstream.records import Scored


def drawn_by(version: int, sample: Scored) -> Tensor:
    """Return a mask [T]: True at trained tokens that were drawn with this version of the weights."""
    return torch.from_numpy((sample.rollout.versions == version) & sample.rollout.loss_mask)


@dataclass(frozen=True)
class Distances:
    """KLs between the current policy and the policy that drew each token: a tensor [T] for every kind and sample."""

    kl: Mapping[Kind, Sequence[Tensor]]
    known: Sequence[Tensor]
    """Masks [T], one per sample: False at trained tokens whose KL is unknown: their weights are no longer stored."""


class FirstLook:
    """Passes before an update's first gradient; `version` is the learner's current one. All ranks must call them."""

    def __init__(self, method: Method, passes: Passes, snapshots: Snapshots, ranks: Ranks) -> None:
        self.method, self.passes, self.snapshots, self.ranks = method, passes, snapshots, ranks

    def evidence(self, samples: Sequence[Scored], version: int, distances: Distances) -> list[Evidence]:
        """Return for each sample its rewards, masks, and log-probs [T] under each policy that the method needs."""
        method, drawn = self.method, self._versions(samples)
        asked = method.current_first or (method.decoupled and version in drawn)
        current, squares = None, None
        if method.weighs_energy:
            current, squares = self.passes.log_probs_and_squares(samples)
        elif asked:
            current = self.passes.log_probs(samples)
        reference = self.passes.log_probs(samples, self.snapshots, REFERENCE) if method.reference is not None else None
        old, missing = None, [0] * len(samples)
        if method.previous:
            old = self.passes.log_probs(samples, self.snapshots, PREVIOUS)
        elif method.decoupled:
            old, missing = self._at_own_version(samples, {version: current} if current is not None else {}, drawn)
        draws = self._draws(samples) if method.draws_first else None
        kl = None
        if method.rejects("seq_max_kl"):
            both = zip(distances.kl["forward"], distances.known, strict=True)
            kl = [kl_T.masked_fill(~known_T, torch.inf) for kl_T, known_T in both]
        return [
            Evidence(
                group=sample.rollout.prompt.number,
                episode=sample.rollout.episode,
                rewards=sample.rollout.rewards,
                mask_T=torch.tensor(sample.rollout.loss_mask),
                turn_T=torch.from_numpy(np.where(sample.rollout.loss_mask, sample.rollout.turn, -1)),
                behavior_T=behavior_of(sample).double(),
                old_T=old[i] if old is not None else None,
                current_T=current[i] if current is not None else None,
                squares_T=squares[i] if squares is not None else None,
                reference_T=reference[i] if reference is not None else None,
                kl_T=kl[i] if kl is not None else None,
                draws=draws[i] if draws is not None else None,
                missing=missing[i],
            )
            for i, sample in enumerate(samples)
        ]

    def _draws(self, samples: Sequence[Scored]) -> list[Draws]:
        current = self.passes.log_probs_of_draws(samples, temperature=self.method.loss.temperature)
        return [
            Draws(
                current_NM=current_NM,
                behavior_NM=torch.from_numpy(sample.rollout.action_logp).double(),
                teacher_NM=torch.from_numpy(present(sample.teacher_action_logp)).double(),
            )
            for sample, current_NM in zip(samples, current, strict=True)
        ]

    def _versions(self, samples: Sequence[Scored]) -> list[int]:
        """Return the versions of the weights that drew trained tokens of the samples on all ranks, sorted."""
        mine = {int(version) for sample in samples for version in sample.rollout.versions[sample.rollout.loss_mask]}
        return sorted(set().union(*self.ranks.gathered(mine)))

    def _at_own_version(
        self, samples: Sequence[Scored], known: dict[int, list[Tensor]], drawn: Sequence[int]
    ) -> tuple[list[Tensor], list[int]]:
        """Return per sample the log-probs [T] under the weights that drew each token, and how many tokens lack them.

        Tokens whose weights are no longer stored get the sampler's log-prob. `known`: computed log-probs by version.
        """
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

    def distances(self, samples: Sequence[Scored], version: int, *, drift: bool) -> Distances:
        """Return KLs to the policies that drew the tokens: "reverse" if `drift`, "forward" if seq_max_kl is used."""
        kinds: list[Kind] = ["reverse"] * drift
        kinds += ["forward"] * self.method.rejects("seq_max_kl")
        if not kinds:
            return Distances({}, [])
        kl = [torch.zeros(len(sample.rollout.tokens), len(kinds), dtype=torch.float64) for sample in samples]
        # the KL of the current version to itself is 0
        known = [drawn_by(version, sample) | ~torch.tensor(sample.rollout.loss_mask) for sample in samples]
        for drew in self._versions(samples):
            if drew == version or drew not in self.snapshots:
                continue
            here = [drawn_by(drew, sample) for sample in samples]
            chosen = [i for i, here_T in enumerate(here) if here_T.any()]
            found = self.passes.rollout_kl([samples[i] for i in chosen], self.snapshots, drew, kinds=kinds)
            for i, kl_TK in zip(chosen, found, strict=True):
                kl[i], known[i] = torch.where(here[i][:, None], kl_TK.double(), kl[i]), known[i] | here[i]
        columns = {kind: [kl_TK[:, column] for kl_TK in kl] for column, kind in enumerate(kinds)}
        return Distances(columns, known)

    def rollout_drift(self, samples: Sequence[Scored], distances: Distances) -> Metrics:
        """Return the mean KL to the policy that drew each token, and the share of trained tokens with a known KL."""
        masks = [torch.tensor(sample.rollout.loss_mask) for sample in samples]
        mine = (
            sum(float(kl_T[mask_T].sum()) for kl_T, mask_T in zip(distances.kl["reverse"], masks, strict=True)),
            sum(int((known_T & mask_T).sum()) for known_T, mask_T in zip(distances.known, masks, strict=True)),
            sum(int(mask_T.sum()) for mask_T in masks),
        )
        sums = [sum(part) for part in zip(*self.ranks.gathered(mine), strict=True)]
        return {"drift/rollout_kl": sums[0] / max(sums[1], 1), "drift/rollout_kl_coverage": sums[1] / max(sums[2], 1)}
