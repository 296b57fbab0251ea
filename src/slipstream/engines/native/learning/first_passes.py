"""Passes over a batch before its first gradient: log-probs of its tokens under each policy that the method needs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engines.native.learning.critic import Critic
from slipstream.engines.native.learning.passes import Kind, Passes
from slipstream.objective.columns import behavior_of
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
    """Passes before the first gradient of some samples, made by all ranks; `version` is the learner's current one."""

    def __init__(
        self,
        method: Method,
        passes: Passes,
        version: int,
        samples: Sequence[Scored],
        critic: Critic | None = None,
        *,
        drift: bool,
    ) -> None:
        """Compute the distances that the method needs, and with `drift` those to the policies that drew the samples."""
        self.method, self.passes, self.ranks, self.version = method, passes, passes.ranks, version
        self.critic, self.centre = critic, method.policy and method.policy.centre
        self.current: list[Tensor] | None = None
        """Log-probs of the samples under the current weights; None before they are needed."""
        self.distances = self._distances(samples, drift=drift)

    def log_probs(self, samples: Sequence[Scored], version: str | None = None) -> list[Tensor]:
        """Return log-probs [T] of emitted tokens, under current or stored weights."""
        if version is not None:
            return self.passes.log_probs(samples, version)
        self.current = self.passes.log_probs(samples)
        return self.current

    def log_probs_and_squares(self, samples: Sequence[Scored]) -> tuple[list[Tensor], list[Tensor]]:
        """Return log-probs [T] of emitted tokens, and Σ_v π_v² [T] over the vocabulary."""
        self.current, squares = self.passes.log_probs_and_squares(samples)
        return self.current, squares

    def log_probs_of_draws(self, samples: Sequence[Scored], version: str | None = None) -> list[Tensor]:
        """Return log-probs [N, M] of all draws, at the temperature of the distillation loss."""
        return self.passes.log_probs_of_draws(samples, version, temperature=self.method.loss.temperature)

    def kl_from_rollout(self, samples: Sequence[Scored]) -> list[Tensor]:
        """Return KL(sampling policy ‖ current learner) [T]; infinite if the sampling weights are not stored."""
        both = zip(self.distances.kl["forward"], self.distances.known, strict=True)
        return [kl_T.masked_fill(~known_T, torch.inf) for kl_T, known_T in both]

    def gradient_norms(self, samples: Sequence[Scored]) -> list[Tensor]:
        """Return the squared norm of the gradient of each episode's log-prob, by the trained weights."""
        episodes = dict[tuple[int, int], list[Scored]]()
        for sample in samples:
            episodes.setdefault(episode_of(sample), []).append(sample)
        norms = dict(zip(episodes, self.passes.gradient_norms(list(episodes.values())), strict=True))
        return [torch.tensor(norms[episode_of(sample)], dtype=torch.float64) for sample in samples]

    def _versions(self, samples: Sequence[Scored]) -> list[int]:
        """Return the versions of the weights that drew trained tokens of the samples on all ranks, sorted."""
        mine = {int(version) for sample in samples for version in sample.rollout.versions[sample.rollout.loss_mask]}
        return sorted(set().union(*self.ranks.gathered(mine)))

    def _stored(self, samples: Sequence[Scored]) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """Yield each other stored version that drew tokens, and masks [T] of its tokens by sample index."""
        for drew in self._versions(samples):
            if drew != self.version and drew in self.passes.snapshots:
                masks = {i: drawn_by(drew, sample) for i, sample in enumerate(samples)}
                yield drew, {i: mask_T for i, mask_T in masks.items() if mask_T.any()}

    def at_own_version(self, samples: Sequence[Scored]) -> tuple[list[Tensor], list[Tensor]]:
        """Return log-probs [T] under the weights that drew each token, and masks of tokens whose weights are gone.

        These tokens get the sampler's log-prob.
        """
        old = [behavior_of(sample).double() for sample in samples]
        left = [torch.tensor(sample.rollout.loss_mask) for sample in samples]

        def enter(masks: Mapping[int, Tensor], found: Iterable[Tensor]) -> None:
            for (i, mask_T), logp_T in zip(masks.items(), found, strict=True):
                old[i], left[i] = torch.where(mask_T, logp_T, old[i]), left[i] & ~mask_T

        if self.current is None and self.version in self._versions(samples):
            self.current = self.passes.log_probs(samples)
        if self.current is not None:
            enter({i: drawn_by(self.version, sample) for i, sample in enumerate(samples)}, self.current)
        for drew, masks in self._stored(samples):
            enter(masks, self.passes.log_probs([samples[i] for i in masks], drew))
        return old, left

    def _distances(self, samples: Sequence[Scored], *, drift: bool) -> Distances:
        """Return KLs to the policies that drew the tokens: "reverse" if `drift`, "forward" if seq_max_kl is used."""
        kinds: list[Kind] = ["reverse"] * drift
        kinds += ["forward"] * self.method.correction.rejects("seq_max_kl")
        if not kinds:
            return Distances({}, [])
        kl = [torch.zeros(len(sample.rollout.tokens), len(kinds), dtype=torch.float64) for sample in samples]
        # the KL of the current version to itself is 0
        known = [drawn_by(self.version, sample) | ~torch.tensor(sample.rollout.loss_mask) for sample in samples]
        for drew, masks in self._stored(samples):
            kl_of_samples = self.passes.rollout_kl([samples[i] for i in masks], drew, kinds=kinds)
            for (i, mask_T), kl_TK in zip(masks.items(), kl_of_samples, strict=True):
                kl[i], known[i] = torch.where(mask_T[:, None], kl_TK.double(), kl[i]), known[i] | mask_T
        columns = {kind: [kl_TK[:, column] for kl_TK in kl] for column, kind in enumerate(kinds)}
        return Distances(columns, known)

    def rollout_drift(self, samples: Sequence[Scored]) -> Metrics:
        """Return the mean KL to the policy that drew each token, and the share of trained tokens with a known KL."""
        distances, masks = self.distances, [torch.tensor(sample.rollout.loss_mask) for sample in samples]
        mine = (
            sum(float(kl_T[mask_T].sum()) for kl_T, mask_T in zip(distances.kl["reverse"], masks, strict=True)),
            sum(int((known_T & mask_T).sum()) for known_T, mask_T in zip(distances.known, masks, strict=True)),
            sum(int(mask_T.sum()) for mask_T in masks),
        )
        sums = [sum(part) for part in zip(*self.ranks.gathered(mine), strict=True)]
        return {"drift/rollout_kl": sums[0] / max(sums[1], 1), "drift/rollout_kl_coverage": sums[1] / max(sums[2], 1)}
