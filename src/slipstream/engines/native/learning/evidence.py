"""Passes over a batch before its first gradient: log-probs of its tokens under each policy that the method needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.learning.passes import Kind, Passes
from slipstream.engines.native.learning.snapshots import OLD, REFERENCE
from slipstream.objective.frozen import Draws, Evidence, behavior_of, present
from slipstream.objective.method import Method
from slipstream.objective.sample_weights import episode_of
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


class FirstPasses:
    """Passes before an update's first gradient, made by all ranks together; `version` is the learner's current one."""

    def __init__(self, method: Method, passes: Passes) -> None:
        self.method, self.passes, self.ranks = method, passes, passes.ranks

    def evidence(self, samples: Sequence[Scored], version: int, distances: Distances) -> list[Evidence]:
        """Return for each sample its rewards, masks, and log-probs [T] under each policy that the method needs."""
        method, masks = self.method, [torch.tensor(sample.rollout.loss_mask) for sample in samples]
        columns: dict[str, Sequence[Any]] = {}
        if method.weighs_energy:
            columns["current_T"], columns["squares_T"] = self.passes.log_probs_and_squares(samples)
        elif method.current_first or (method.by_version and version in self._versions(samples)):
            columns["current_T"] = self.passes.log_probs(samples)
        if method.by_entropy:
            columns["entropy_T"] = self.passes.relative_entropies(samples)
        if method.by_lag:
            columns["lag_T"] = [
                torch.from_numpy(version - sample.rollout.versions).masked_fill(~mask_T, 0)
                for sample, mask_T in zip(samples, masks, strict=True)
            ]
        if method.exact_norms:
            episodes: dict[Any, list[Scored]] = {}
            for sample in samples:
                episodes.setdefault(episode_of(sample), []).append(sample)
            norms = dict(zip(episodes, self.passes.gradient_norms(list(episodes.values())), strict=True))
            columns["norm"] = [norms[episode_of(sample)] for sample in samples]
        if method.reference is not None:
            columns["reference_T"] = self.passes.log_probs(samples, REFERENCE)
        if method.keeps_old:
            columns["old_T"] = self.passes.log_probs(samples, OLD)
        elif method.by_version:
            columns["old_T"], columns["missing"] = self._at_own_version(samples, version, columns.get("current_T"))
        if method.draws_first:
            columns["draws"] = self._draws(samples)
        if method.extrapolates:
            temperature = method.loss.temperature
            columns["reference_NM"] = self.passes.log_probs_of_draws(samples, REFERENCE, temperature=temperature)
        if method.rejects("seq_max_kl"):
            both = zip(distances.kl["forward"], distances.known, strict=True)
            columns["kl_T"] = [kl_T.masked_fill(~known_T, torch.inf) for kl_T, known_T in both]
        return [
            Evidence(
                group=sample.rollout.prompt.number,
                episode=sample.rollout.episode,
                rewards=sample.rollout.rewards,
                drawn=not sample.rollout.prompt.source,
                mask_T=mask_T,
                turn_T=torch.from_numpy(np.where(sample.rollout.loss_mask, sample.rollout.turn, -1)),
                behavior_T=behavior_of(sample).double(),
                **{name: values[i] for name, values in columns.items()},
            )
            for i, (sample, mask_T) in enumerate(zip(samples, masks, strict=True))
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

    def _stored(self, samples: Sequence[Scored], version: int) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """Yield each stored version that drew tokens, except `version`, and masks [T] of its tokens by sample index."""
        for drew in self._versions(samples):
            if drew != version and drew in self.passes.snapshots:
                masks = {i: drawn_by(drew, sample) for i, sample in enumerate(samples)}
                yield drew, {i: mask_T for i, mask_T in masks.items() if mask_T.any()}

    def _at_own_version(
        self, samples: Sequence[Scored], version: int, current: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[int]]:
        """Return per sample the log-probs [T] under the weights that drew each token, and how many tokens lack them.

        Tokens whose weights are no longer stored get the sampler's log-prob. `current`: log-probs under `version`.
        """
        old = [behavior_of(sample).double() for sample in samples]
        left = [torch.tensor(sample.rollout.loss_mask) for sample in samples]

        def enter(masks: Mapping[int, Tensor], found: Iterable[Tensor]) -> None:
            for (i, mask_T), logp_T in zip(masks.items(), found, strict=True):
                old[i], left[i] = torch.where(mask_T, logp_T, old[i]), left[i] & ~mask_T

        if current is not None:
            enter({i: drawn_by(version, sample) for i, sample in enumerate(samples)}, current)
        for drew, masks in self._stored(samples, version):
            enter(masks, self.passes.log_probs([samples[i] for i in masks], drew))
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
        for drew, masks in self._stored(samples, version):
            found = self.passes.rollout_kl([samples[i] for i in masks], drew, kinds=kinds)
            for (i, mask_T), kl_TK in zip(masks.items(), found, strict=True):
                kl[i], known[i] = torch.where(mask_T[:, None], kl_TK.double(), kl[i]), known[i] | mask_T
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
