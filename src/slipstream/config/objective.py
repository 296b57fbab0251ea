"""What an update minimises: a distillation loss, a policy loss, a pull towards the reference; and its corrections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import Epsilon, Section

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


class DistillationLoss(Section):
    weight: float = Field(1.0, ge=0)
    """How much distillation counts beside a policy loss; 0 leaves it out, and with it the teacher."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of student and teacher in the loss."""


class ReverseKLMC(DistillationLoss):
    """Reverse KL on M draws of the student at every position, importance-corrected: the default."""

    kind: Literal["reverse_kl_mc"] = "reverse_kl_mc"
    """Reverse KL on draws of the student."""
    m: int = Field(16, ge=1)
    """Draws at every position, the emitted token among them."""
    advantage: Literal["current", "behavior"] = "current"
    """Recompute log q − log p under the current student, or keep that of the policy that drew the token."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """PPO clip ε or [low, high]; none by default."""
    importance: bool = True
    """Weight draws by p_current / p_behaviour; off only to see what that costs."""
    ratio_cap: float | None = Field(None, gt=0)
    """Truncate importance weights at this value; capped draws keep a gradient."""

    @model_validator(mode="after")
    def _one_trust_region(self) -> ReverseKLMC:
        if self.clip is not None and self.ratio_cap is not None:
            raise ValueError("clip and ratio_cap both bound the ratio: keep one of them")
        if not self.importance and (self.clip is not None or self.ratio_cap is not None):
            raise ValueError("importance = false has no ratio for clip or ratio_cap to bound: drop them")
        if not self.importance and self.advantage == "behavior":
            raise ValueError('importance = false recomputes the advantage: write advantage = "current"')
        return self


class ForwardKL(DistillationLoss):
    """Forward KL on the teacher's top-k tokens, or on the whole vocabulary by way of the teacher's hidden states."""

    kind: Literal["forward_kl"] = "forward_kl"
    """Forward KL on what the teacher finds likely."""
    cache: Literal["teacher_topk", "hidden"] = "teacher_topk"
    """What the teacher sends: its k best tokens, or its last hidden state, which is exact."""
    k: int = Field(32, ge=1)
    """Size of the teacher's top-k."""
    tail: bool = False
    """Add the remaining mass of both models as one more bucket."""
    renormalise: bool = False
    """Renormalise both models on the top-k."""

    @model_validator(mode="after")
    def _one_completion(self) -> ForwardKL:
        if self.tail and self.renormalise:
            raise ValueError("tail and renormalise exclude each other: keep one of them")
        if self.cache == "hidden" and (self.tail or self.renormalise):
            raise ValueError("the hidden cache is the whole distribution: drop tail and renormalise")
        return self


class ReverseKL(DistillationLoss):
    """Exact reverse KL on the whole vocabulary, however stale the sample, by way of the teacher's hidden states."""

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact reverse KL, from hidden states."""
    cache: Literal["hidden"] = "hidden"
    """What the teacher sends: its last hidden state; the learner applies the teacher's head."""


class JSD(DistillationLoss):
    """Generalised Jensen-Shannon divergence, on the whole vocabulary or on the teacher's top-k and its tail."""

    kind: Literal["jsd"] = "jsd"
    """Between forward and reverse KL."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """What the teacher sends: its last hidden state, which is exact, or its k best tokens; the rest is one bucket."""
    k: int = Field(32, ge=1)
    """Size of the teacher's top-k."""
    beta: float = Field(0.5, ge=0, le=1)
    """0 is forward KL, 1 reverse KL."""


LossConfig = Annotated[ReverseKLMC | ForwardKL | ReverseKL | JSD, Field(discriminator="kind")]


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
