"""What an update minimises beside distillation: a policy loss, a pull towards the reference; and its corrections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import Section

PolicyName = Literal[
    "vanilla",
    "reinforce",
    "gpg",
    "cispo",
    "gspo",
    "gspo_token",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "dro",
    "m2po",
    "decoupled_ppo",
    "topr",
    "aspo",
    "minpro",
    "ctpo",
]
AdvantageName = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "opob",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
]
"""Those that need no critic."""
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
PresetName = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
]
LevelName = Literal["token", "sequence", "geometric", "prefix_min", "cumulative", "turn"]
EstimateName = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
Bound = float | tuple[float, float]


class PolicyConfig(Section):
    """A policy loss on task rewards (RL), added to the distillation loss, or alone with loss.weight = 0."""

    loss: PolicyName = "vanilla"
    """Which; `slipstream estimators` explains them."""
    weight: float = Field(1.0, gt=0)
    """How much it counts."""
    options: dict[str, float] = Field({})
    """Hyper-parameters of the loss, for example clip_high = 0.28."""
    aggregation: Aggregation | None = None
    """From tokens to one number; the loss's own without it."""
    advantage: AdvantageName = "grpo"
    """How rewards become advantages."""
    advantage_options: dict[str, float | bool] = Field({})
    """Options of the advantage, for example norm = false."""
    reward_weights: dict[str, float] = Field({})
    """What each of several rewards counts, for example {math = 1.0, exact = 0.2}; 1 where it is not here."""
    old: Literal["behavior", "previous"] = "behavior"
    """What the ratio is taken to: the policy that drew the tokens, or the learner's weights before its last update."""

    @field_validator("advantage", mode="before")
    @classmethod
    def _no_critic(cls, name: object) -> object:
        if name == "gae":
            raise ValueError('"gae" needs a critic, and there is none here: write "reinforce_plus_plus", or "remax"')
        return name


class ReferenceConfig(Section):
    """A pull towards the student as it was at the start: KL to it, in the loss or in the reward."""

    weight: float = Field(gt=0)
    """Coefficient of the KL. Where it is steered, that of the first update."""
    into: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the rewards of [policy]."""
    estimate: EstimateName | None = None
    """How the KL is estimated from the emitted token; k3 in the loss (k2 with importance = false), k1 in the reward."""
    importance: bool = True
    """In the loss, weigh by p_current / p_behaviour: the gradient is that of the KL however stale a token is, whatever
    the estimate. Off for the estimate's own gradient, which is right on-policy only."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """What becomes of β: it stays, or is steered so that the KL stays near a target."""
    target: float | None = Field(None, gt=0)
    """With control = "adaptive", the KL to stay near, the mean over trained tokens."""
    horizon: float | None = Field(None, gt=0)
    """With control = "adaptive", samples over which β changes by a fifth at most."""
    host: bool = False
    """Keep its weights in host memory between uses."""

    @model_validator(mode="after")
    def _an_estimate_with_an_effect(self) -> ReferenceConfig:
        name = self.estimate or ""
        if self.into == "reward" and not self.importance:
            raise ValueError('importance = false is for into = "loss", the reward holds no such ratio: drop it')
        if name.endswith("+") and (self.into == "reward" or self.importance):
            what = "has no gradient" if self.into == "reward" else "with importance has the gradient of the KL anyway"
            raise ValueError(
                f'estimate = "{name}" is {name[:-1]} with another gradient, and the {self.into} {what}: '
                f'write "{name[:-1]}"'
            )
        if name == "k1" and self.into == "loss" and not self.importance:
            raise ValueError('estimate = "k1" has a gradient without the reference in it: write "k1+", or "k2"')
        return self

    @model_validator(mode="after")
    def _steered_or_not(self) -> ReferenceConfig:
        given = [name for name in ("target", "horizon") if getattr(self, name) is not None]
        if self.control == "fixed" and given:
            raise ValueError(f'{" and ".join(given)} steer control = "adaptive": write that, or drop them')
        if self.control == "adaptive" and len(given) < 2:
            raise ValueError(
                'control = "adaptive" needs target and horizon, for example target = 0.05, horizon = 10000'
            )
        return self


class CorrectionConfig(Section):
    """Importance weights and rejection for the gap between the policy that drew and the one that learns."""

    preset: PresetName = "disabled"
    """Which; `slipstream estimators` explains them. Disabled only measures."""
    is_level: LevelName | None = None
    """Over what ratios are multiplied to one weight; the preset's own level without it, which may be none."""
    is_threshold: Bound | None = None
    """Truncate weights there, or [low, high]; the preset's own without it."""
    is_normalize: bool = False
    """Divide weights by their mean over the batch."""
    ctpo_clip: float | None = Field(None, gt=0)
    """c of ±c√t, to which is_level = "cumulative" clips the log of its product; 0.05 without it."""
    rs: dict[str, Bound] | None = None
    """Rejection modes and bounds, for example {seq_mean_k1 = [0.99, 1.01]}; the preset's own without it."""
    verl_compat: bool = False
    """Turn the bounds of k1 rejection round, as verl does: keep ratios in [1/U, 1/L], and not in [L, U]."""
