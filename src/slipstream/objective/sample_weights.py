"""Freshness weights of the samples of an update, and the factor of each token in the loss.

  Σ_i w_i Σ_t (ℓ_it + λ D_roll,it) / sN    over tokens, N of which are trained
  Σ_i w_i (ℓ_i + λ D_roll,i) / s|M|        over samples: means over the aligned tokens of each, M episodes
  s = 1, mean of w, or √(mean of w²) over the samples of the optimizer step (freshness.normalise)
  w_i = relu(f_i − ξ),  f_i = exp(−α√D_roll,i − β√D_sup,i) / (lag_i + 1)

A sample is one branch of an episode and has its own weight. ℓ is the distillation loss. D_roll and D_sup are drifts of
student and teacher. Means ℓ_i and D_roll,i are over the aligned tokens (with known drift) of all branches of an
episode. Weights stay the same for all steps of the update.

Shapes: B samples, N trained tokens (of one sample, or of several, one after the other), M cached draws.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.config.freshness import FreshnessConfig
from slipstream.estimators.drift import aligned_mean, rollout_kl_from_cache, score, weight
from slipstream.objective.columns import padded
from slipstream.objective.constants import UpdateConstants
from slipstream.protocols import SampleFreshness
from slipstream.records import Scored

Key = tuple[int, int]
"""(Group number, index of the sample), or (group number, number of the episode)."""
Totals = tuple[float, float, float]
"""Sum of weights, sum of their squares, and number of samples."""


@dataclass(frozen=True, slots=True)
class SampleWeight:
    """Weight of a sample, and the resulting factor of each trained token in distillation and in the anchor."""

    weighed: SampleFreshness
    distill_N: Tensor
    anchor_N: Tensor


@dataclass(frozen=True, slots=True)
class Drifted:
    """Drift (a KL) of student or teacher at every trained token, and the mask of tokens with known drift."""

    kl_N: Tensor
    known_N: Tensor


def drifted(sample: Scored, logp_NM: Tensor) -> Drifted:
    """Return the student's drift, estimated from the current log-probs of the recorded draws."""
    kl_N = rollout_kl_from_cache(logp_NM, torch.from_numpy(sample.rollout.action_logp).double())
    return Drifted(kl_N, torch.ones_like(kl_N, dtype=torch.bool))


def supervision(sample: Scored) -> Drifted:
    """Return the teacher's drift. It is 0 for a sample that was not scored again."""
    if sample.supervision_kl is None:
        n = sample.rollout.trained_tokens
        return Drifted(torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.bool))
    kl_N = torch.from_numpy(sample.supervision_kl).double()
    return Drifted(kl_N, ~kl_N.isnan())


def means(drift: Sequence[Drifted]) -> tuple[Tensor, list[float]]:
    """Return each sample's mean drift over tokens with known drift, and the shares of such tokens."""
    mean_B = aligned_mean(padded([each.kl_N for each in drift]), padded([each.known_N for each in drift]))
    return mean_B, [float(each.known_N.sum()) / max(len(each.known_N), 1) for each in drift]


class FreshnessWeights:
    """Freshness weights of the samples of one update, which are stored until the next update begins."""

    def __init__(self, freshness: FreshnessConfig) -> None:
        self.freshness = freshness
        self.begin()

    def begin(self) -> None:
        """Delete all data of the previous update."""
        self.judged: dict[Key, SampleWeight] = {}
        self.drifted: dict[Key, Drifted] = {}
        """Student drift of each sample for which it is known."""
        self.supervised, self.replayed = Counter[Key](), Counter[Key]()
        """Numbers of trained tokens of every episode with known teacher drift, and with known student drift."""
        self.left, self.share = Counter[Key](), dict[Key, tuple[Key, int]]()
        """Number of trained tokens of every episode. `share`: episode and number of trained tokens of every sample."""

    def take(
        self, samples: Sequence[Scored], constants: Sequence[UpdateConstants], found: Sequence[Drifted] | None = None
    ) -> None:
        """Register the samples of whole episodes. `found` is the student's drift of each sample, or None if unknown."""
        for i, (sample, each) in enumerate(zip(samples, constants, strict=True)):
            episode, left_N = episode_of(sample), left_of(sample, each)
            if found is not None:
                self.drifted[key_of(sample)] = found[i]
            self.share[key_of(sample)] = episode, int(left_N.sum())
            self.left[episode] += int(left_N.sum())
            known_N = left_N if found is None else left_N & found[i].known_N
            self.supervised[episode] += int((left_N & supervision(sample).known_N).sum())
            self.replayed[episode] += int(known_N.sum())

    def of(
        self,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        *,
        version: int,
        draws: Callable[[], Sequence[Tensor]],
    ) -> list[SampleWeight]:
        """Return weights of samples. `draws` returns the learner's log-probs of the draws, [N, M] for each sample."""
        keys = [key_of(sample) for sample in samples]
        if new := [i for i, key in enumerate(keys) if key not in self.judged]:
            if missing := [i for i in new if keys[i] not in self.drifted]:
                logp = draws()
                self.drifted |= {keys[i]: drifted(samples[i], logp[i]) for i in missing}
            weights = self._judge([samples[i] for i in new], [constants[i] for i in new], version)
            self.judged |= {keys[i]: each for i, each in zip(new, weights, strict=True)}
        return [self.judged[key] for key in keys]

    def totals(self, keys: Iterable[Key]) -> Totals:
        """Return the sum of the weights of these judged samples, of their squares, and the number of samples.

        The branches of an episode count as one sample, shared by their tokens. Rejected samples do not count.
        """
        parts = [(self.judged[key].weighed.w, n / (self.left[e] or 1)) for key in keys for e, n in [self.share[key]]]
        return sum(w * n for w, n in parts), sum(w**2 * n for w, n in parts), sum(n for _, n in parts)

    def divisor(self, totals: Iterable[Totals]) -> float:
        """Return the number that divides the weights of an optimizer step, from the totals of all ranks."""
        weights, squares, samples = (float(sum(each)) for each in zip(*totals, strict=True))
        if not weights:
            return 1.0
        if self.freshness.weight == "common":  # every weight is 1, so the gradient is multiplied by the mean weight
            return samples / weights
        match self.freshness.normalise:
            case "off":
                return 1.0
            case "mean":
                return weights / samples
            case "variance":
                return math.sqrt(squares / samples)

    def weigh(self, samples: Sequence[Scored], drift: Sequence[Drifted], *, version: int) -> list[SampleFreshness]:
        freshness = self.freshness
        (roll_B, rolls), (sup_B, sups) = means(drift), means([supervision(sample) for sample in samples])
        lag_B = torch.tensor([version - oldest(sample, version) for sample in samples], dtype=roll_B.dtype)
        f_B = score(lag_B if freshness.lag else 0 * lag_B, roll_B, sup_B, alpha=freshness.alpha, beta=freshness.beta)
        match freshness.weight:
            case "freshness" | "common":
                w_B = weight(f_B, threshold=freshness.threshold)
            case "lag":
                w_B = score(lag_B, torch.zeros_like(roll_B), torch.zeros_like(sup_B))
            case "equal":
                w_B = torch.ones_like(f_B)
        columns = (x_B.tolist() for x_B in (lag_B, roll_B, sup_B, f_B, w_B))
        return [
            SampleFreshness(lag=int(lag), roll=roll, sup=sup, f=f, w=w, roll_coverage=of_roll, sup_coverage=of_sup)
            for lag, roll, sup, f, w, of_roll, of_sup in zip(*columns, rolls, sups, strict=True)
        ]

    def _judge(
        self, samples: Sequence[Scored], constants: Sequence[UpdateConstants], version: int
    ) -> list[SampleWeight]:
        drift, anchor = [self.drifted[key_of(sample)] for sample in samples], self.freshness.anchor
        weights, results = self.weigh(samples, drift, version=version), list[SampleWeight]()
        for sample, each, its_drift, weighed in zip(samples, constants, drift, weights, strict=True):
            episode, left_N = episode_of(sample), left_of(sample, each)
            w = 1.0 if self.freshness.weight == "common" else weighed.w
            distill_N = self._factor(w, left_N & supervision(sample).known_N, self.supervised[episode])
            anchor_N = self._factor(anchor * w, left_N & its_drift.known_N, self.replayed[episode])
            results.append(SampleWeight(weighed, distill_N, anchor_N))
        return results

    def _factor(self, w: float, known_N: Tensor, count: int) -> Tensor:
        """Return the factor of each token; `count` is the number of known tokens in the sample's episode."""
        return known_N.double() * (w / max(count, 1) if self.freshness.normalise_by == "samples" else w)


def key_of(sample: Scored) -> Key:
    return sample.rollout.prompt.number, sample.rollout.index


def episode_of(sample: Scored) -> Key:
    return sample.rollout.prompt.number, sample.rollout.episode


def left_of(sample: Scored, constants: UpdateConstants) -> Tensor:
    """Return the mask of the trained tokens that are not rejected, [N]."""
    return constants.mask_T[torch.from_numpy(sample.rollout.loss_mask)]


def oldest(sample: Scored, version: int) -> int:
    """Return the smallest version among trained tokens; `version` if there are no trained tokens."""
    rollout = sample.rollout
    return int(rollout.versions[rollout.loss_mask].min(initial=version))
