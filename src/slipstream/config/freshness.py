"""Settings of f-OPD for stale samples: weights of samples, a KL to the sampling policy, refresh of the buffer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from slipstream.config.base import DRAWS, Section, as_tuple


class FreshnessConfig(Section):
    weight: Literal["freshness", "lag", "equal", "common"] = "freshness"
    """Weight of a sample. freshness: max(0, f − threshold) with f = exp(−alpha·√D_roll − beta·√D_sup) / (lag + 1). lag:
    1 / (lag + 1). equal: 1. common: for every sample the mean of these freshness weights over the optimizer step, a
    control that changes only the size of a step."""
    normalise: Literal["off", "mean", "variance"] = "mean"
    """Number by which the weights of an optimizer step are divided. off: 1, as in f-OPD. mean: their mean w̄, so that
    the gradient keeps its size. variance: √(mean of w²), so that the noise of the gradient keeps its size."""
    alpha: float = Field(1.0, ge=0)
    """Coefficient α of √D_roll, where D_roll is the KL between the current student and the student that sampled."""
    beta: float = Field(1.0, ge=0)
    """Coefficient β of √D_sup. D_sup is the KL between the teacher's current scores and its scores used so far."""
    lag: bool = True
    """Divide freshness by lag + 1; lag is the age of the sample in updates. false ignores the age."""
    threshold: float = Field(0.02, ge=0, lt=1)
    """Threshold ξ: samples with a freshness of at most ξ have weight 0, and are still counted in the denominator."""
    anchor: float = Field(0.1, ge=0)
    """Coefficient λ of the anchor in the loss: the KL to the policy that sampled, times the sample's weight. 0 is
    off."""
    drift: Literal["cache", "snapshots"] = "cache"
    """Measurement of the student's drift. cache: estimate from the recorded draws, in the learning pass, or with
    learner.minibatches in a pass of its own before the first step. snapshots: exact, with the stored weights that
    sampled the sample (learner.snapshots). The anchor always uses the draws."""
    m: int | None = Field(None, ge=1, le=DRAWS)
    """Number of draws (tokens sampled at one position) that estimate drift if the loss has no draws. None uses 8."""
    normalise_by: Literal["tokens", "samples"] = "tokens"
    """Unit of the weighted mean in the distillation loss. tokens: all tokens, as without [freshness]. samples: samples,
    each with the mean over its tokens, as in f-OPD; tokens of short answers then count more."""
    apply_to: Annotated[tuple[Literal["policy"], ...], BeforeValidator(as_tuple)] = ()
    """Other losses that use the same weights: "policy" for the policy loss. Empty weighs distillation only."""
    refresh: Literal["adaptive", "fixed", "never"] = "adaptive"
    """Rule for a refresh: unused samples of older weights are rolled out again. adaptive: when the buffer is stale.
    fixed: at regular intervals. never: not at all."""
    refresh_every: int = Field(10, ge=1)
    """Number of updates between two refreshes with refresh = "fixed"."""
    kappa_f: float = Field(0.05, ge=0, le=1)
    """Mean freshness of the buffer at or below which refresh = "adaptive" acts."""
    kappa_roll: float = Field(0.5, ge=0, le=1)
    """refresh = "adaptive" acts if student drift is known for less than this share of the buffer's tokens."""
    kappa_sup: float = Field(0.5, ge=0, le=1)
    """refresh = "adaptive" acts if teacher drift is known for less than this share of the buffer's tokens."""
    cooldown: int = Field(200, ge=0)
    """Smallest number of optimizer steps between two refreshes with refresh = "adaptive"."""
    estimate: Literal["modelled", "measured"] = "modelled"
    """Method that estimates the buffer's mean freshness. modelled: from the lags in the buffer and the drift observed
    at each lag. measured: by a pass over the whole buffer."""
    measure: int | None = Field(None, ge=1)
    """Number of updates between two measuring passes over the buffer. None is 1 with estimate = "measured", else 20."""

    @model_validator(mode="after")
    def _check_unused(self) -> FreshnessConfig:
        for needs, value, names in (
            ("refresh", "fixed", ("refresh_every",)),
            ("refresh", "adaptive", ("kappa_f", "kappa_roll", "kappa_sup", "cooldown", "estimate", "measure")),
        ):
            if getattr(self, needs) != value:
                for name in self.changed(*names):
                    raise ValueError(f'{name} is for {needs} = "{value}": write that, or drop it')
        if self.weight in ("lag", "equal") and self.changed("threshold"):
            raise ValueError('threshold is for weight = "freshness" or "common": write one of these, or drop it')
        if self.weight == "common" and self.normalise != "off":
            raise ValueError('weight = "common" is divided by itself: write normalise = "off", or another weight')
        if self.weight == "equal" and self.normalise != "mean":
            raise ValueError('normalise does nothing with weight = "equal": drop it, or write another weight')
        if self.weight in ("equal", "common") and self.apply_to:
            raise ValueError(
                f'apply_to = "policy" does nothing with weight = "{self.weight}": drop it, or change the weight'
            )
        if self.weight == "equal" and not self.anchor and self.refresh == "never" and self.normalise_by == "tokens":
            raise ValueError(
                'weight = "equal", anchor = 0 and refresh = "never" leave nothing to do: drop [freshness], or one of '
                "them (learner.exact_drift only measures)"
            )
        return self

    @property
    def draws(self) -> int:
        """Return the number of draws at each position that drift and anchor need if the loss has no draws."""
        return (self.m or 8) if self.drift == "cache" or self.anchor else 1
