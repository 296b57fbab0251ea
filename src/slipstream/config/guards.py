"""Guards: what a run does by itself when its numbers go wrong. Each is a section of its own, and off without it."""

from __future__ import annotations

from pydantic import Field, model_validator

from slipstream.config.base import Section


class LengthSurge(Section):
    ratio: float = Field(1.2, gt=1)
    """How many times as long responses may be as 100 updates before (length/trend); the guard acts until half of that
    growth is gone."""
    factor: float = Field(0.5, gt=0, lt=1)
    """What the learning rate is multiplied by as long as it acts."""


class EssGuard(Section):
    target: float = Field(0.9, gt=0, le=1)
    """Effective sample size, a share of the tokens, below which the learning rate is multiplied by ess / target: of the
    correction's weights (correction/ess), or of ratios where there are none (drift/ess)."""


class EntropyFloor(Section):
    floor: float = Field(0.1, gt=0)
    """Entropy of the student in nats (student/entropy, mean of 5 updates) below which the guard acts, until it is a
    tenth above."""
    factor: float = Field(0.1, gt=0, lt=1)
    """What the learning rate is multiplied by as long as it acts."""


class KLBrake(Section):
    high: float = Field(0.05, gt=0)
    """Drift (drift/k3_kl, mean of 5 updates) above which tau is lowered by one, and again, as long as it lasts."""
    low: float = Field(0.02, gt=0)
    """Drift below which tau is raised again by one, after 50 updates."""

    @model_validator(mode="after")
    def _a_band(self) -> KLBrake:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}: between them nothing changes")
        return self


class GradientCosine(Section):
    every: int = Field(10, ge=1)
    """After so many updates, measure the cosine of the gradients of the fresher and the staler half of the first step's
    samples (gradient/cosine); it costs a copy of the gradient."""
    below: float | None = Field(None, gt=-1, lt=1)
    """Cosine (mean of the last 5) below which the guard acts, until it is 0.1 above; without it, it only measures."""
    factor: float = Field(0.5, gt=0, lt=1)
    """What the learning rate is multiplied by as long as it acts."""

    @model_validator(mode="after")
    def _acts(self) -> GradientCosine:
        if self.below is None and self.factor != type(self).model_fields["factor"].default:
            raise ValueError("factor does nothing without below: set that, or drop factor")
        return self


class GuardsConfig(Section):
    length_surge: LengthSurge | None = None
    """Lower the learning rate while responses get longer and longer."""
    ess: EssGuard | None = None
    """Lower it as far as few samples outweigh the others."""
    entropy: EntropyFloor | None = None
    """Lower it while the student has next to no entropy left."""
    kl: KLBrake | None = None
    """Keep less in flight while the learner is far from what drew its tokens."""
    gac: GradientCosine | None = None
    """Compare what fresh and stale samples teach."""
