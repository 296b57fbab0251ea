"""What an update minimises beside distillation: a policy loss, a pull towards the reference; and its corrections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
