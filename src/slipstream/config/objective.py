"""Settings of other losses than distillation (policy loss, reference KL), and of corrections for stale tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from slipstream.config.base import DRAWS, Section
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS, CorrectionPreset, Threshold, Unit
from slipstream.estimators.tables.policy import CENTRED, POLICY_LOSSES, Centre, Estimate, Mode

if TYPE_CHECKING:
    PolicyName = str
    AdvantageName = str
    PresetName = str
else:  # the keys of the tables, which a type checker cannot read
    PolicyName, AdvantageName, PresetName = (Literal[tuple(table)] for table in (POLICY_LOSSES, ADVANTAGES, PRESETS))


class PolicyConfig(Section):
    loss: PolicyName = "vanilla"
    """Policy loss on task rewards (RL), added to the distillation loss, or used alone with loss.weight = 0. `slipstream
    estimators` explains the names."""
    weight: float = Field(1.0, ge=0)
    """Weight of the policy loss in the total loss; 0 computes it without learning from it."""
    options: dict[str, float] = Field({})
    """Hyperparameters of the loss, for example { clip_high = 0.28 }. Empty uses the defaults of the loss."""
    aggregation: Mode | None = None
    """Reduction of token losses to one number, also of the KL to the reference in the loss. None uses that of the
    loss."""
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
    centre: Centre | None = None
    """Score centering, for loss = "reinforce" or "gpg": subtract what the sampling policy would teach with one
    advantage for all tokens. draws: from other draws at the same position, without bias. top_k: from the most likely
    tokens, with an approximation of the others. support: from all tokens that sampler.top_k keeps, exactly. None
    subtracts nothing."""
    centre_size: int | None = Field(None, ge=2, le=DRAWS)
    """Number of draws, or of most likely tokens, from which `centre` is computed. None uses 8 draws or 32 tokens, or
    those that the distillation loss has."""
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

    @model_validator(mode="after")
    def _check_centre(self) -> PolicyConfig:
        if self.centre is None and self.centre_size is not None:
            raise ValueError("centre_size is for centre: write that, too, or drop centre_size")
        if self.centre == "support" and self.centre_size is not None:
            raise ValueError('centre = "support" has as many tokens as sampler.top_k: drop centre_size')
        if self.centre is not None and POLICY_LOSSES[self.loss].formula != CENTRED:
            raise ValueError(
                f'centre = "{self.centre}" needs a loss without clip and ratio, and loss = "{self.loss}" has one: '
                'write loss = "reinforce", or drop centre'
            )
        return self

    @property
    def keeps_old(self) -> bool:
        """Return whether the old policy is the learner before its last update, or an average of earlier weights."""
        return self.old != "behavior"

    @property
    def filters(self) -> list[str]:
        """Return the names of the settings that drop groups whose rewards are alike."""
        return ["refill"] * (self.refill is not None) + ["drop_alike"] * self.drop_alike

    @property
    def values_options(self) -> dict[str, float | bool]:
        """Return the options of gae that decide its returns, with their defaults."""
        defaults: dict[str, float | bool] = {"gamma": 1.0, "lam": 0.95, "by_turn": False, "rho": 0.0, "c": 0.0}
        return {name: self.advantage_options.get(name, default) for name, default in defaults.items()}


class CriticConfig(Section):
    """Value head on the last hidden state of the student or of another model, for policy.advantage = "gae"."""

    model: str | None = None
    """HF directory or hub name, or builtin:NAME: the critic's own model, with the student's tokenizer. The learner
    trains it, and no gradient of the values reaches the student. None: the value head is on the student."""
    lr: float = Field(1e-4, gt=0, le=1)
    """Learning rate of the value head, which has an AdamW of its own. A wider model needs a smaller one."""
    backbone_lr: float = Field(1e-5, gt=0, le=1)
    """Learning rate of the critic's own model, which has an AdamW of its own, too."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Number format of the weights and gradients of the critic's own model. None uses learner.dtype."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of the critic's own model instead of all its weights."""
    weight: float = Field(0.1, ge=0)
    """Weight of the value loss in the total loss, by which it also trains the student. 0 trains the head alone."""
    clip: float = Field(0.2, gt=0)
    """Largest change of a value in an update that lowers its loss (PPO's value clip). Write 1e9 for no bound."""
    warmup: int = Field(0, ge=0)
    """Number of first updates that train the critic alone, before the student moves."""
    bootstrap: bool = False
    """Add the value of the last state to the return of episodes that a limit has cut, such as sampler.max_tokens: for
    limits that are no part of the task (1712.00378). false: nothing comes after an episode but its rewards."""

    @model_validator(mode="after")
    def _check_model(self) -> CriticConfig:
        if self.model is None and (own := self.changed("backbone_lr", "dtype", "lora")):
            raise ValueError(f"{own[0]} is for the critic's own model: write model = DIRECTORY, too, or drop {own[0]}")
        if self.model is not None and self.changed("weight"):
            raise ValueError("weight is for a value head on the student, and with model it does nothing: drop weight")
        return self

    def settings_of_model(self, learner: LearnerConfig) -> LearnerConfig:
        """Return the settings that train the critic's own model: the learner's, except those about the student."""
        own = {"lr": self.backbone_lr, "dtype": self.dtype or learner.dtype, "lora": self.lora}
        student = {"router": "free", "router_aux": None, "dropout": False, "quantised": False, "perturbation": None}
        return learner.model_copy(update=own | student)


class ReferenceConfig(Section):
    weight: float = Field(gt=0)
    """Coefficient β of the KL to the reference policy, the student at the start of the run; start value if adaptive."""
    into: Literal["loss", "reward"] = "loss"
    """Use of the KL. loss: a term of the loss. reward: subtracted from the rewards of [policy]."""
    estimate: Estimate | None = None
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
    is_level: Unit | None = None
    """Unit over which token ratios are multiplied to one importance weight. None uses the preset's level, if any."""
    is_threshold: Threshold | None = None
    """Upper bound of importance weights, or a band [low, high] outside of which they are 0. None uses the preset's."""
    is_normalize: bool = False
    """Divide importance weights by their mean over the batch."""
    ctpo_clip: float | None = Field(None, gt=0)
    """Bound c for is_level = "cumulative": the log of the product over t tokens is clipped to ±c√t. None uses 0.05."""
    rs: dict[str, Threshold] | None = None
    """Rejection modes with bounds, for example { seq_mean_k1 = [0.99, 1.01] }. None uses the preset's modes."""
    verl_compat: bool = False
    """Invert the bounds of k1 rejection, as verl does: keep ratios in [1/U, 1/L] instead of [L, U]."""

    @property
    def parts(self) -> CorrectionPreset:
        """Return the preset with the changes of this section; ValueError if they do not fit together."""
        names = ("is_level", "is_threshold", "ctpo_clip", "rs")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        preset = PRESETS[self.preset]
        return replace(preset, is_normalize=self.is_normalize, verl_compat=self.verl_compat, **changes)

    @model_validator(mode="after")
    def _check_parts(self) -> CorrectionConfig:
        assert self.parts
        return self
