"""What a stale sample is worth, what holds the student near what drew it, and when to begin anew (f-OPD)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import DRAWS, Section, as_tuple


class FreshnessConfig(Section):
    """Weigh every sample by f = exp(−alpha·√D_roll − beta·√D_sup) / (lag + 1), hold the student near what drew, and
    begin anew when the buffer is stale."""

    weight: Literal["freshness", "lag", "equal"] = "freshness"
    """What a sample counts beside the others of a step: f less the threshold and never below 0, or 1 / (lag + 1), or 1.
    Weights are divided by their mean over the step."""
    alpha: float = Field(1.0, ge=0)
    """How much the drift of the student since it drew a sample takes off its freshness."""
    beta: float = Field(1.0, ge=0)
    """How much the drift of what its teacher says of it takes off."""
    lag: bool = True
    """Divide freshness by lag + 1."""
    threshold: float = Field(0.02, ge=0, lt=1)
    """ξ: samples that are no fresher have weight 0, and stay in the denominator."""
    anchor: float = Field(0.1, ge=0)
    """λ: what the KL to the policy that drew a sample counts in the loss, by the sample's weight."""
    drift: Literal["cache", "snapshots"] = "cache"
    """How the student's drift is known: estimated from the draws that were recorded, in the pass that learns; or exact,
    by replay under the weights that drew, which are kept (learner.snapshots). The anchor is always of the draws."""
    m: int | None = Field(None, ge=1, le=DRAWS)
    """Draws by which drift is estimated where the loss has none of its own; 8 without it."""
    over: Literal["tokens", "samples"] = "tokens"
    """The distillation loss is a weighted mean over tokens, as it is one without weights; or, as f-OPD has it, over
    samples of the mean over the tokens of each, in which those of short answers count more."""
    also: tuple[Literal["policy"], ...] = ()
    """"policy" weighs the policy loss, too."""
    refresh: Literal["adaptive", "fixed", "never"] = "adaptive"
    """When all that is not learned from yet is rolled out again: when the buffer is stale, every so often, or never."""
    every: int = Field(10, ge=1)
    """With refresh = "fixed", updates between two."""
    kappa_f: float = Field(0.05, ge=0, le=1)
    """With refresh = "adaptive": at this mean freshness of the buffer, or below …"""
    kappa_roll: float = Field(0.5, ge=0, le=1)
    """… or below this share of its tokens whose drift can be known …"""
    kappa_sup: float = Field(0.5, ge=0, le=1)
    """… or below this share whose teacher's answer can be compared with the one before."""
    cooldown: int = Field(200, ge=0)
    """With refresh = "adaptive": fewest optimizer steps between two."""
    buffer: Literal["modelled", "measured"] = "modelled"
    """How the freshness of the buffer is known: by the lags in it and what drift was found at each lag; or by a pass
    over all of it."""
    measure: int | None = Field(None, ge=1)
    """Updates between two such passes; 1 where the buffer is measured, else 20, to tell how good the model is."""

    @field_validator("also", mode="before")
    @classmethod
    def _one_or_several(cls, also: Any) -> Any:
        return as_tuple(also)

    @model_validator(mode="after")
    def _nothing_idle(self) -> FreshnessConfig:
        for name, needs, value in (
            ("every", "refresh", "fixed"),
            ("kappa_f", "refresh", "adaptive"),
            ("kappa_roll", "refresh", "adaptive"),
            ("kappa_sup", "refresh", "adaptive"),
            ("cooldown", "refresh", "adaptive"),
            ("buffer", "refresh", "adaptive"),
            ("measure", "refresh", "adaptive"),
            ("threshold", "weight", "freshness"),
        ):
            if getattr(self, needs) != value and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} is for {needs} = "{value}": write that, or drop it')
        if self.weight == "equal" and self.also:
            raise ValueError('also = "policy" weighs nothing where weight = "equal": drop it, or weigh by another')
        if self.weight == "equal" and not self.anchor and self.refresh == "never":
            raise ValueError(
                'weight = "equal", anchor = 0 and refresh = "never" leave nothing to do: drop [freshness], or one of '
                "them (learner.exact_drift only measures)"
            )
        return self

    @property
    def draws(self) -> int:
        """Where the loss has none of its own."""
        return (self.m or 8) if self.drift == "cache" or self.anchor else 1
