"""Measurements of a step: sums of the losses' metrics, drift, noise of the gradient, and cosines of gradients.

Drift is the distance between the learner and the sampling policy when the learner used the tokens.

Shapes: N trained tokens, H hidden, T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import torch
from torch import Tensor

from slipstream.engines.native.ranks import Ranks
from slipstream.estimators.drift import gradient_noise, offpolicy_metrics
from slipstream.estimators.logprobs import merge_metrics
from slipstream.estimators.numerics import percentile_99
from slipstream.metric_names import extreme
from slipstream.objective.columns import padded
from slipstream.objective.constants import UpdateConstants
from slipstream.objective.distillation import SUPPORTED
from slipstream.objective.loss import MIXED, PAIRS, TAUGHT
from slipstream.objective.sample_weights import Key
from slipstream.protocols import Metrics
from slipstream.records import NOT_DRAWN, Scored

PER_STEP = ("policy/loss", "loss", "freshness/anchor")
"""Metrics that are divided like the loss; all other sums are divided by the number of tokens."""
OF_OWN = ("policy/", "reference/kl")
"""Prefixes of metrics that are means over the tokens that the student drew."""
ROUNDING = 1e-6
"""Share of the tokens below which there is none: shares are sums of rounded numbers."""
OF_SUPPORT = ("distill/student_mass", "distill/teacher_mass", "distill/overlap_ratio", "distill/overlap_any")
"""Metrics of a teacher's top-k that are means over the tokens that are compared."""
NOISE_METRICS = {
    "gradient/signal": "proxy1_signal_strength",
    "gradient/power": "proxy2_total_power",
    "gradient/noise": "proxy3_pure_noise",
}


class Measurements:
    """Measurements since the last step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.noise = ranks, Noise(ranks)
        self.notes: list[tuple[int, Metrics]] = []
        """Metrics from `prepare`: pairs of a number of samples and the metrics over these samples."""
        self.drop()

    def drop(self) -> None:
        """Forget everything since the last step, except the metrics from `prepare`."""
        self.sums: dict[str, Tensor] = {}
        """Sums of metrics, and histograms of ratios."""
        self.seen: list[Seen] = []
        self.cosines: Metrics = {}
        """Cosines of gradients."""
        self.noise.sums = {}

    def metrics(self, *, version: int, loss_scale: float, token_scale: float, gradient_scale: float) -> Metrics:
        """Return the metrics since the last step over all ranks, and drop the sums.

        Losses are multiplied by `loss_scale`, other sums by `token_scale`; gradients were by `gradient_scale`.
        """
        sums: dict[str, Tensor] = {}
        for part in self.ranks.gathered({name: value.cpu() for name, value in self.sums.items()}):
            merge_metrics(sums, part)
        counted = {name: sums.pop(name) for name in [each for each in sums if each.endswith("_p99")]}
        percentiles = {name: percentile_99(counts_X) for name, counts_X in counted.items() if counts_X.any()}
        means = {name: value.item() for name, value in sums.items()}
        for name in means:
            if not extreme(name):
                means[name] *= loss_scale if name in PER_STEP else token_scale
        own = 1 - means.pop(MIXED, 0.0)
        shares = {name: own for name in means if name.startswith(OF_OWN) and name not in PER_STEP}
        for name in [each for each in means if each.startswith("teacher/") and each.endswith("/loss")]:
            shares[name] = means[name.removesuffix("loss") + "share"]  # mean over this teacher's tokens
        for name, share in shares.items():
            if share < ROUNDING:
                del means[name]
            elif not extreme(name):
                means[name] /= share
        if taught := means.pop(TAUGHT, 0.0):
            means["teacher/forward_kl"] /= taught
        else:
            means.pop("teacher/forward_kl", None)
        if "distill/overlap_any" in means:
            means["distill/overlap_token_advantage"] /= means["distill/overlap_any"] or 1.0  # mean where any overlap
        if compared := means.pop(f"distill/{SUPPORTED}", 0.0):
            for name in OF_SUPPORT:
                means[name] /= compared
        if pairs := means.pop(PAIRS, 0.0):
            means["router/flips"] /= pairs
        seen = [each for part in self.ranks.gathered([each.on_cpu() for each in self.seen]) for each in part]
        means |= self.noise.metrics(gradient_scale) | self.cosines
        self.drop()
        return means | percentiles | averaged(self.notes) | drift_metrics(seen, version=version)


def averaged(noted: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Return the mean of each metric over all pairs that have it, weighted by their samples, or its extreme."""
    found: Metrics = {}
    for name in dict.fromkeys(name for _, part in noted for name in part):
        sizes, values = zip(*((size, part[name]) for size, part in noted if name in part), strict=True)
        if which := extreme(name):
            found[name] = max(values) if which == "max" else min(values)
        else:
            found[name] = sum(map(mul, sizes, values)) / sum(sizes)
    return found


class Noise:
    """Estimate of how much of a step's gradient is noise, from the contributions of its groups.

    The estimate uses the gradient of a virtual bias added to every last hidden state: the sum over tokens of the loss
    gradient with respect to these states. The backward pass of the head computes this gradient anyway. A group's
    contribution therefore costs only a sum, for any loss, packing and number of ranks. Samples of one group are
    dependent, so the sample size of the estimate is the number of groups.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums: dict[int, Tensor] = {}
        """Sum [H] of the gradients of each group since the last step, by group number."""

    def watch(self, hidden_NH: Tensor, samples: Sequence[Scored]) -> None:
        """Register a hook that adds the gradients of these hidden states to `sums` during the backward pass."""
        counts = [sample.rollout.trained_tokens for sample in samples]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)

        def add(gradient_NH: Tensor) -> None:
            for sample, part_NH in zip(samples, torch.split(gradient_NH.detach(), counts), strict=True):
                number, sum_H = sample.rollout.prompt.number, part_NH.sum(0, dtype=wide)
                self.sums[number] = self.sums[number] + sum_H if number in self.sums else sum_H

        hidden_NH.register_hook(add)  # type: ignore[no-untyped-call]

    def metrics(self, scale: float) -> Metrics:
        """Return a step's noise metrics over all ranks; gradients are multiplied by `scale`. Empty below two groups."""
        mine = [sum_H.double().cpu() * scale for sum_H in self.sums.values()]
        zero = torch.zeros((), dtype=torch.float64)
        everyone = self.ranks.gathered(([sum_H.square().sum() for sum_H in mine], sum(mine, start=zero)))
        squares = [square for of_rank, _ in everyone for square in of_rank]
        if (n := len(squares)) < 2:
            return {}
        whole = sum((sum_H for _, sum_H in everyone), start=zero)
        # n times a group's contribution estimates the whole gradient, and the mean of these estimates is the gradient
        found = gradient_noise(n**2 * torch.stack(squares), whole.square().sum())
        return {name: found[verls] for name, verls in NOISE_METRICS.items()}


# --- fresh and stale samples ------------------------------------------------------------------------------------------
#
# Samples are sorted by mean version and split into halves. The gradient of the fresher half is computed first and
# copied; the gradient of the other half is the total minus this copy. The cosine covers all weights on all ranks.


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
    parts = list[Tensor]()
    for one, whole in zip(fresh, both, strict=True):
        if whole is None:
            continue
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
        one = torch.zeros_like(whole) if one is None else one.to(whole.dtype)
        other = whole - one
        parts.append(torch.stack([(one * other).sum(), one.square().sum(), other.square().sum()]).double())
    sums = torch.stack(parts).sum(0).cpu() if parts else zero
    dot, of_one, of_other = sum(ranks.gathered(sums), start=zero).tolist()
    return {"gradient/cosine": dot / math.sqrt(of_one * of_other)} if of_one and of_other else {}


@dataclass(frozen=True, slots=True)
class Seen:
    """Data of one sample at the time of its loss: tensors over its T tokens."""

    logp_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    version_T: Tensor

    @classmethod
    def of(cls, sample: Scored, constants: UpdateConstants, logp_T: Tensor) -> Seen:
        return cls(logp_T, constants.behavior_T, constants.mask_T, torch.tensor(sample.rollout.versions))

    def on_cpu(self) -> Seen:
        return Seen(self.logp_T.cpu(), self.behavior_T, self.mask_T, self.version_T)


def drift_metrics(samples: Sequence[Seen], *, version: int) -> Metrics:
    """Return metrics of `estimators.drift` that compare current and sampling policy, over all tokens and by lag.

    Tokens that the student did not draw are left out.
    """
    samples = [sample for sample in samples if not (sample.version_T[sample.mask_T] == NOT_DRAWN).any()]
    if not samples:
        return {}
    lag_BT = (version - padded([sample.version_T for sample in samples])).clamp(min=0)
    metrics = offpolicy_metrics(
        padded([sample.logp_T for sample in samples]),
        padded([sample.behavior_T for sample in samples]),
        padded([sample.mask_T for sample in samples]),
        lag=lag_BT,
    )
    return {f"drift/{name}": value for name, value in metrics.items()}


def sharpness(samples: Sequence[Seen]) -> Metrics:
    """Return the regression slope of the sampler's log-probs on the learner's: 1, or 1/T if a temperature T differs."""
    ours_N = torch.cat([sample.logp_T[sample.mask_T].double() for sample in samples])
    theirs_N = torch.cat([sample.behavior_T[sample.mask_T].double() for sample in samples])
    ours, theirs = ours_N - ours_N.mean(), theirs_N - theirs_N.mean()
    return {"drift/sharpness": float((ours * theirs).sum() / (ours * ours).sum()) if ours.any() else 1.0}


def against_teachers(samples: Sequence[Scored], logp: Sequence[Tensor]) -> Metrics:
    """Return the largest difference between each teacher's log-probs of the trained tokens and the student's."""
    gaps: dict[str, float] = {}
    for sample, logp_T in zip(samples, logp, strict=True):
        if sample.teacher_logp is not None and sample.rollout.trained_tokens:
            p_N = logp_T[torch.tensor(sample.rollout.loss_mask)].double()
            gap = float((torch.tensor(sample.teacher_logp).double() - p_N).abs().max())
            gaps[sample.teacher] = max(gap, gaps.get(sample.teacher, 0.0))
    return {f"teacher/{teacher}/difference_max": gap for teacher, gap in gaps.items()}
