"""Guards: automatic reactions to metrics that get worse. Each guard is a section and is off without that section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class LengthSurge(Section):
    ratio: float = Field(1.2, gt=1)
    """Growth of the response length over 100 updates (metric length/trend, a ratio) at which the guard starts to act.
    The guard stops when half of that growth is gone."""
    factor: float = Field(0.5, gt=0, lt=1)
    """Multiplier of the learning rate while the guard acts."""


class EssGuard(Section):
    target: float = Field(0.9, gt=0, le=1)
    """Effective sample size, as a share of the tokens, below which the learning rate is multiplied by ess / target. The
    metric is correction/ess if [correction] gives importance weights, else drift/ess. With decoupled weights, which
    leave staleness to the loss, it is the smaller one."""
    scale: Literal["linear", "sqrt"] = "linear"
    """Factor of the learning rate: ess / target, or its square root, which VCPO uses with AdamW."""


class EntropyFloor(Section):
    floor: float = Field(0.1, gt=0)
    """Entropy of the student in nats (student/entropy, mean of 5 updates) below which the guard acts. The guard stops
    when entropy is 10 % above this value."""
    factor: float = Field(0.1, gt=0, lt=1)
    """Multiplier of the learning rate while the guard acts."""


class KLBrake(Section):
    high: float = Field(0.05, gt=0)
    """Drift in nats (drift/k3_kl, mean of 5 updates) above which schedule.tau is lowered by one. The guard lowers tau
    again while drift stays above this value."""
    low: float = Field(0.02, gt=0)
    """Drift in nats below which tau is raised again by one, after 50 updates."""

    @model_validator(mode="after")
    def _check_bounds(self) -> KLBrake:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}: write low < high")
        return self


class GradientCosine(Section):
    every: int = Field(10, ge=1)
    """Number of updates between two measurements of gradient/cosine: the cosine between the gradients of the fresher
    and the staler half of the samples of an update's first step. Each measurement needs memory for a copy of the
    gradient."""
    below: float | None = Field(None, gt=-1, lt=1)
    """Cosine, averaged over 5 measurements, below which the guard acts, until it is 0.1 higher. None only measures."""
    factor: float = Field(0.5, gt=0, lt=1)
    """Multiplier of the learning rate while the guard acts. Needs `below`."""
    limit: float | None = Field(None, ge=0, lt=1)
    """Largest cosine of the gradients of consecutive updates, in the first step of each. Above it, the part along the
    previous gradient is reduced until the cosine is this value; 0 removes the part (GAC). Needs memory for a copy of
    the gradient, which checkpoints contain. None changes no gradient."""

    @model_validator(mode="after")
    def _check_factor(self) -> GradientCosine:
        if self.below is None and self.changed("factor"):
            raise ValueError("factor does nothing without below: set below, or drop factor")
        return self


class GuardsConfig(Section):
    length_surge: LengthSurge | None = None
    """Lower the learning rate while responses become longer."""
    ess: EssGuard | None = None
    """Lower the learning rate while a few tokens have most of the importance weight (low effective sample size)."""
    entropy: EntropyFloor | None = None
    """Lower the learning rate while the student has almost no entropy left."""
    kl: KLBrake | None = None
    """Lower schedule.tau (bound on work in flight) while the learner is far from the sampling policy (drift)."""
    gac: GradientCosine | None = None
    """Compare the gradients of fresh and stale samples. Lower the learning rate while the cosine is below `below`. Or
    limit the part of a gradient that repeats that of the previous update, by `limit`."""
