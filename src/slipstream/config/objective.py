"""Settings of other losses than distillation (policy loss, reference KL), and of corrections for stale tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import Section

PolicyName = Literal[
    "vanilla",
    "reinforce",
    "gpg",
    "cispo",
    "dispo",
    "gspo",
    "gspo_token",
    "tbpo",
    "espo",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "dro",
    "r2vpo",
    "quatro",
    "m2po",
    "decoupled_ppo",
    "a3po",
    "topr",
    "aspo",
    "minpro",
    "ctpo",
    "vespo",
    "oapl",
    "st_ppo",
]
AdvantageName = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "opob",
    "opob_exact",
    "gpg",
    "gdpo",
    "oapl",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
]
"""Names of the advantage estimators that need no critic."""
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
    loss: PolicyName = "vanilla"
    """Policy loss on task rewards (RL), added to the distillation loss, or used alone with loss.weight = 0. `slipstream
    estimators` explains the names."""
    weight: float = Field(1.0, gt=0)
    """Weight of the policy loss in the total loss."""
    options: dict[str, float] = Field({})
    """Hyperparameters of the loss, for example { clip_high = 0.28 }. Empty uses the defaults of the loss."""
    aggregation: Aggregation | None = None
    """Reduction of token losses to one number. None uses the reduction of the loss."""
    advantage: AdvantageName = "grpo"
    """Advantage estimator, which turns rewards into advantages. `slipstream estimators` explains the names."""
    advantage_options: dict[str, float | bool] = Field({})
    """Options of the advantage estimator, for example { norm = false }. Empty uses its defaults."""
    reward_weights: dict[str, float] = Field({})
    """Weights of several rewards, for example { math = 1.0, exact = 0.2 }. A reward without an entry has weight 1."""
    refill: float | None = Field(None, gt=1, le=1000)
    """Replace groups whose rewards are all alike, which have no advantage, by groups of further prompts (DAPO's dynamic
    sampling). At most this many times the groups of an update are rolled out for each update; groups beyond that are
    learned from. None replaces none."""
    drop_alike: bool = False
    """Leave groups whose rewards are all alike out of the loss and its denominators (zero-variance filtering). No other
    groups replace them, so batches get smaller; `refill` replaces them."""
    old: Literal["behavior", "previous", "average"] = "behavior"
    """Old policy, the denominator of the importance ratio. behavior: the policy that sampled the tokens. previous: the
    learner before its last update. average: a moving average of the learner's weights, which can replace stored
    versions in a decoupled correction."""
    old_decay: float = Field(0.75, gt=0, lt=1)
    """Share of itself that the average keeps in every update, with old = "average". The average is 1 / (1 - old_decay)
    updates old: choose this near the lag of the tokens."""
    variance_target: float | None = Field(None, gt=0)
    """Bound on the variance of the importance ratio, for loss = "r2vpo". The coefficient of the penalty starts at
    options.variance_coef. It rises after updates whose `policy/ratio_variance` is above the bound, and falls after
    others. None keeps the coefficient constant."""
    variance_step: float = Field(1.0, gt=0)
    """Step size of that coefficient. An update adds the step size times (variance − bound), and changes the coefficient
    by at most the step size times the bound."""

    @model_validator(mode="after")
    def _check_old(self) -> PolicyConfig:
        if self.old != "average" and self.changed("old_decay"):
            raise ValueError('old_decay is for old = "average": write that, or drop old_decay')
        return self

    @model_validator(mode="after")
    def _check_variance(self) -> PolicyConfig:
        if self.variance_target is not None and self.loss != "r2vpo":
            raise ValueError('variance_target is for loss = "r2vpo": write that, or drop variance_target')
        if self.variance_target is None and self.changed("variance_step"):
            raise ValueError("variance_step is for variance_target: write that, too, or drop variance_step")
        return self

    @property
    def filters(self) -> list[str]:
        """Return the names of the settings that drop groups whose rewards are alike."""
        return ["refill"] * (self.refill is not None) + ["drop_alike"] * self.drop_alike

    @field_validator("advantage", mode="before")
    @classmethod
    def _refuse_critic(cls, name: object) -> object:
        if name == "gae":
            raise ValueError('"gae" needs a critic, and there is none here: write "reinforce_plus_plus", or "remax"')
        return name


class ReferenceConfig(Section):
    weight: float = Field(gt=0)
    """Coefficient β of the KL to the reference policy, the student at the start of the run; start value if adaptive."""
    into: Literal["loss", "reward"] = "loss"
    """Use of the KL. loss: a term of the loss. reward: subtracted from the rewards of [policy]."""
    estimate: EstimateName | None = None
    """Estimator of the KL from the emitted token. None: k3 in the loss (k2 with importance = false), k1 in the
    reward."""
    importance: bool = True
    """Weight the KL in the loss by p_current / p_behaviour, so that the gradient is right for stale tokens and every
    estimate. false uses the gradient of the estimate, which is right on-policy only."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """Controller of β. fixed: β is constant. adaptive: β follows the KL to keep it near `target`."""
    target: float | None = Field(None, gt=0)
    """Target of the KL with control = "adaptive", in nats, as a mean over trained tokens."""
    horizon: float | None = Field(None, gt=0)
    """Number of samples over which β changes by at most a fifth, with control = "adaptive"."""
    host: bool = False
    """Keep the weights of the reference in host memory between uses. Set this to save GPU memory."""

    @model_validator(mode="after")
    def _check_estimate(self) -> ReferenceConfig:
        name = self.estimate or ""
        if self.into == "reward" and not self.importance:
            raise ValueError('importance = false is for into = "loss", the reward has no such ratio: drop it')
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
    def _check_control(self) -> ReferenceConfig:
        given = [name for name in ("target", "horizon") if getattr(self, name) is not None]
        if self.control == "fixed" and given:
            raise ValueError(f'{" and ".join(given)} is only for control = "adaptive": write that, or drop it')
        if self.control == "adaptive" and len(given) < 2:
            raise ValueError(
                'control = "adaptive" needs target and horizon, for example target = 0.05, horizon = 10000'
            )
        return self


class CorrectionConfig(Section):
    preset: PresetName = "disabled"
    """Preset of importance weights and rejection for the gap between sampling and learning policy. `slipstream
    estimators` explains the names. "disabled" only measures the gap."""
    is_level: LevelName | None = None
    """Unit over which token ratios are multiplied to one importance weight. None uses the preset's level, if any."""
    is_threshold: Bound | None = None
    """Upper bound of importance weights, or a band [low, high] outside of which they are 0. None uses the preset's."""
    is_normalize: bool = False
    """Divide importance weights by their mean over the batch."""
    ctpo_clip: float | None = Field(None, gt=0)
    """Bound c for is_level = "cumulative": the log of the product over t tokens is clipped to ±c√t. None uses 0.05."""
    rs: dict[str, Bound] | None = None
    """Rejection modes with bounds, for example { seq_mean_k1 = [0.99, 1.01] }. None uses the preset's modes."""
    verl_compat: bool = False
    """Invert the bounds of k1 rejection, as verl does: keep ratios in [1/U, 1/L] instead of [L, U]."""
