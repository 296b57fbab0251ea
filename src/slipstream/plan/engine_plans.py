"""Plans of engines: all settings with which a runtime can build each engine, in any process."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.config.base import HALVES, Quantisation, Rounding
from slipstream.config.costs import Costs
from slipstream.config.learner import LoraConfig
from slipstream.config.running import RuntimeConfig
from slipstream.engines.http.client import Endpoint
from slipstream.engines.http.judge import Judge
from slipstream.engines.native.reward_process import RewardModel
from slipstream.engines.server.api import ServerSettings
from slipstream.engines.settings import LearnerSettings, SamplerSettings, ScorerSettings
from slipstream.engines.vllm.core import Settings
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.agent_processes import Agent
from slipstream.environments.host import EnvironmentSettings
from slipstream.protocols import OneEnd, Respelling
from slipstream.rewards.functions import RewardSettings


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A model that a native engine runs here."""

    name: str
    dtype: str
    device: str
    max_length: int | None = None
    """Longest sequence (prompt and response) in tokens; None if unknown."""
    devices: int = 1
    """Number of devices over which its layers are split."""
    lora: LoraConfig | None = None
    """Settings of the LoRA adapters that are trained; None: no adapters, and all weights are trained."""
    seed: int = 0
    """Seed of the adapters' initial values."""
    quantisation: Quantisation | None = None
    """Format of the weights of linear layers; None: `dtype`."""


@dataclass(frozen=True, kw_only=True)
class GatewayPlan:
    agent: Agent | None
    """Agent program that is started for every episode; None if the user starts agents elsewhere."""
    at_once: int
    host: str
    port: int
    name: str
    """Model name that the gateway's API shows to agents."""
    vocabulary: int
    token: str = field(default_factory=partial(secrets.token_urlsafe, 32), compare=False, repr=False)
    """Access token for programs that open and grade episodes when agents are started elsewhere."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlan:
    """An environment of the user (`wanted` is set), or a gateway for agents (`gateway` is set)."""

    wanted: EnvironmentSettings | None
    """Settings of the host processes that run the environment; None for a gateway."""
    gateway: GatewayPlan | None
    processes: int
    limits: Limits
    renderer: Mapping[str, Any]
    """Keyword arguments of `Renderer`: call format and template arguments."""


@dataclass(frozen=True, kw_only=True)
class SamplerPlan(SamplerSettings):
    runs: ModelPlan | Settings | ServerSettings
    """Model and engine: a `ModelPlan` for the native engine, `Settings` for vLLM, `ServerSettings` for a server."""
    stop: tuple[int | str, ...] = ()
    """Tokens at which responses stop besides the end tokens in the student's files, as ids or texts."""
    replicas: int = 1
    environments: Mapping[str, EnvironmentPlan] = field(default_factory=dict)
    """Environments by name, which is "" for a single one; empty: a response is one turn, and no episode."""
    teacher: ModelPlan | None = None
    """Teacher that the sampler asks at every token; None: the student draws alone."""
    ends_as: str = ""
    """Model whose end tokens end a response; empty: those of the sampler's own model."""
    respelling: Respelling | None = None
    """Spelling of a teacher's tokens, whose answers are spelled in those of the student; None: both have the same."""
    cache: str | None = None
    """Directory that stores the rollouts of supervised updates; None: they are not stored."""

    @property
    def devices(self) -> int:
        """Return the number of devices per replica."""
        return self.runs.devices

    @property
    def model(self) -> str:
        return self.runs.name if isinstance(self.runs, ModelPlan) else self.runs.model


@dataclass(frozen=True, kw_only=True)
class ScorerPlan(ScorerSettings):
    runs: ModelPlan | Settings | Endpoint
    """Model and engine: `ModelPlan` for the native engine, `Settings` for vLLM, `Endpoint` for a remote server."""
    context: str | None
    """Template of the teacher's prompt, or name of a user function that writes it; None: the student's prompt."""
    timeout: float
    """Time limit in seconds of the user function that writes the context."""
    replicas: int
    respelling: Respelling | None = None
    """Spelling of responses in the tokens of the teacher; None: it has the tokenizer of the student."""

    @property
    def here(self) -> str:
        """Return the name of the model that this run loads; empty for an endpoint."""
        match self.runs:
            case ModelPlan(name=name) | Settings(model=name):
                return name
            case Endpoint():
                return ""

    @property
    def devices(self) -> int:
        """Return the number of devices per replica; 0 for an endpoint."""
        return 0 if isinstance(self.runs, Endpoint) else self.runs.devices


@dataclass(frozen=True, kw_only=True)
class LearnerPlan(LearnerSettings):
    student: ModelPlan
    critic: ModelPlan | None = None
    """The critic's own model; None: it has none."""
    export_dtype: str
    width: int
    """Hidden size of the student; the learner estimates the cost of sequences from it."""
    step_tokens: int | None
    """Largest number of tokens of a rank's samples in one optimizer step; None: unknown."""
    stop: tuple[int | str, ...] = ()
    """Tokens at which the sampler stops besides the end tokens in the student's files; saved with the student."""
    teachers: Mapping[str, ModelPlan]
    """Constant teachers whose output layers the learner applies to cached hidden states; empty if the loss caches none.
    Those of following teachers are in the learner's snapshots."""
    one_ends: Mapping[str, OneEnd | None]
    """Mapping of each of these teachers' end tokens to the student's; None if they are the same."""
    respellings: Mapping[str, Respelling] = field(default_factory=dict)
    """Spelling for those of these teachers that have another tokenizer."""
    patience: float
    """Seconds for which the learner's ranks wait for one another."""


@dataclass(frozen=True, kw_only=True)
class GraderPlan:
    rewards: tuple[str, ...]
    processes: int = 1
    timeout: float = 30.0
    sandbox: str | None = None
    """Kind of sandbox in which rewards run code; None if rewards get no sandbox."""
    settings: RewardSettings = field(default_factory=dict)
    model_graders: tuple[RewardModel | Judge, ...] = ()
    """Graders of whole groups, besides the functions."""
    keeps_text: bool = False
    """True: also return the texts of responses, for teachers whose context shows earlier responses."""


@dataclass(frozen=True, kw_only=True)
class EnginesPlan:
    learner: LearnerPlan
    sampler: SamplerPlan
    teacher_samplers: Mapping[str, SamplerPlan]
    """Samplers with a teacher's weights, by teacher; empty unless teachers generate responses."""
    scorers: Mapping[str, ScorerPlan]
    grader: GraderPlan
    runtime: RuntimeConfig
    tokens_in_flight: int = 0
    """Largest number of response tokens of all samples in flight."""
    serial: bool = False
    """True if the schedule lets no two stages overlap."""
    costs: Costs | None = None
    """Costs by which modelled time passes; None: the time is real."""

    @property
    def rounding(self) -> Rounding:
        """Return the coarsest number format of all engines here."""
        learner = self.learner.settings
        models = [self.sampler.runs, *(scorer.runs for scorer in self.scorers.values())]
        here = {model.dtype for model in models if not isinstance(model, Endpoint)}
        formats = here | {learner.compute_dtype or learner.dtype}
        coarse = None if self.learner.settings.quantised else self.learner.quantisation
        return coarse or ("exact" if HALVES.isdisjoint(formats) else "half")
