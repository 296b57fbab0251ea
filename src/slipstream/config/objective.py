"""What an update minimises: a distillation loss, a policy loss, a pull towards the reference; and its corrections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
    "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "reinforce_plus_plus"
]
"""Those that need nothing but rewards."""
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
    old: Literal["behavior", "previous"] = "behavior"
    """What the ratio is taken to: the policy that drew the tokens, or the learner's weights before its last update."""


class ReferenceConfig(Section):
    """A pull towards the student as it was at the start: KL to it, in the loss or in the reward."""

    weight: float = Field(gt=0)
    """Coefficient of the KL."""
    into: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the rewards of [policy]."""
    host: bool = False
    """Keep its weights in host memory between uses."""


class CorrectionConfig(Section):
    """Importance weights and rejection for the gap between the policy that drew and the one that learns."""

    preset: PresetName = "disabled"
    """Which; `slipstream estimators` explains them. Disabled only measures."""
    is_threshold: Bound | None = None
    """Truncate weights there, or [low, high]; the preset's own without it."""
    is_normalize: bool = False
    """Divide weights by their mean over the batch."""
    rs: dict[str, Bound] | None = None
    """Rejection modes and bounds, for example {seq_mean_k1 = [0.99, 1.01]}; the preset's own without it."""
