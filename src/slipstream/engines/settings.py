"""Settings of native engines, which plans extend by models, replicas and places. Nothing here needs torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.config.base import Quantisation
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import LossSpec
from slipstream.config.sampler import SpeculationConfig
from slipstream.objective.method import Method, Supervised
from slipstream.protocols import Follower, OneEnd


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    slots: int
    draws: int = 1
    best: int = 0
    top_k: int = 0
    """top_k of rollouts that record their sampling support; 0: they record none, or top_k cuts nothing."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"
    """reuse: running sequences keep keys and values of older weights. Recorded log-probs are then exact for the drawn
    tokens, but no single version of the weights reproduces them."""
    speculation: SpeculationConfig | None = None
    """Proposals of tokens that occurred before, which are verified together; no token changes. None: no proposals."""
    router: bool = False
    """True if the sampler records the experts that its model's routers choose, for requests with `Sampling.router`."""
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    name: str = "teacher"
    spec: LossSpec
    """Scores that the loss needs from the teacher."""
    temperature: float = 1.0
    supervised: LossSpec | None = None
    """Scores that the loss of the supervised updates needs; None: no teacher scores in them."""
    supervised_temperature: float = 1.0
    one_end: OneEnd | None = None
    """Mapping of the teacher's end tokens to the student's, in every distribution that is read; None: none differ."""
    token_budget: int = 16384
    packing: bool = True
    vocabulary: int
    """Size of the student's vocabulary; larger ids of the teacher never occur in its top-k. A teacher with another
    tokenizer has no such bound."""
    keep: int = 0
    """Number of published versions of the teacher's weights that are kept, to compute scores again; 0 keeps none."""
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    settings: LearnerConfig
    method: Method
    supervised: Supervised | None = None
    """Supervised updates before the first rollout; None: none."""
    updates: int
    export_dtype: str | None = None
    """Number format of published weights; None: that of the trained ones."""
    quantisation: Quantisation | None = None
    """Format to which samplers quantise the exported weights of linear layers; None: they do not."""
    snapshots: int = 0
    """Number of published versions of the student whose weights are kept; 0 keeps none."""
    follow: Mapping[str, Follower] = field(default_factory=dict)
    """Rules of teachers whose weights follow the student's weights, by teacher."""
    cosine_every: int = 0
    """Number of updates between two comparisons of the gradients of fresh and stale samples; 0: no comparison."""
    cosine_limit: float | None = None
    """Largest cosine of the gradients of consecutive updates; None: no limit."""
    threads: int = 1

    @property
    def exported(self) -> str:
        return self.export_dtype or self.settings.dtype
