"""Plans of engines: all settings with which a runtime can build each engine, in any process."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from slipstream.config.base import HALVES, Quantisation, Rounding, at_first
from slipstream.config.costs import Costs
from slipstream.config.costs import load as load_costs
from slipstream.config.environment import GatewayConfig
from slipstream.config.losses import LossSpec
from slipstream.config.rewards import FormatConfig
from slipstream.config.schema import Config, LearnerConfig, LoraConfig, RuntimeConfig
from slipstream.config.speculation import SpeculationConfig
from slipstream.config.teacher import FollowConfig
from slipstream.engines.http.client import Endpoint, key_from_environment
from slipstream.engines.http.judge import Judge, JudgeEndpoint
from slipstream.engines.native.config import check_there, context_length, load_config, vocabulary_of, width_of
from slipstream.engines.native.reward_process import RewardModel
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.server.api import ServerSettings
from slipstream.engines.vllm.core import Settings
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.agent_processes import Agent
from slipstream.environments.hosts import HostSettings
from slipstream.errors import ConfigError
from slipstream.objective.method import Method, Supervised, supervised_of
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.vllm import sampler_settings, scorer_settings, server_settings
from slipstream.protocols import Follower, OneEnd
from slipstream.rewards.functions import RewardSettings


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A model that a native engine runs here."""

    name: str
    dtype: str
    device: str
    longest: int | None = None
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

    wanted: HostSettings | None
    """Settings of the host processes that run the environment; None for a gateway."""
    gateway: GatewayPlan | None
    processes: int
    limits: Limits
    renderer: Mapping[str, Any]
    """Keyword arguments of `Renderer`: call format and template arguments."""


@dataclass(frozen=True, kw_only=True)
class SamplerPlan:
    runs: ModelPlan | Settings | ServerSettings
    """Model and engine: a `ModelPlan` for the native engine, `Settings` for vLLM, `ServerSettings` for a server."""
    slots: int
    stop: tuple[int | str, ...] = ()
    """Tokens at which responses stop besides the end tokens in the student's files, as ids or texts."""
    draws: int = 1
    best: int = 0
    top_k: int = 0
    """top_k of rollouts that record their sampling support; 0: they record none, or top_k cuts nothing."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"
    speculation: SpeculationConfig | None = None
    threads: int = 1
    replicas: int = 1
    environment: EnvironmentPlan | None = None
    """Environment, if responses are episodes of several turns; None: a response is one turn."""
    teacher: ModelPlan | None = None
    """Teacher that replaces tokens while the student draws (`sampler.interleave`); None: the student draws alone."""
    router: bool = False
    """True if the sampler records the experts that its model's routers choose."""
    ends_as: str = ""
    """Model whose end tokens end a response; empty: those of the sampler's own model."""
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
class ScorerPlan:
    name: str
    runs: ModelPlan | Settings | Endpoint
    """Model and engine: `ModelPlan` for the native engine, `Settings` for vLLM, `Endpoint` for a remote server."""
    one_end: OneEnd | None = None
    """Mapping of the teacher's end tokens to the student's; None if they are the same."""
    spec: LossSpec
    """Scores that the loss needs from the teacher."""
    temperature: float
    supervised: LossSpec | None
    """Scores that the loss of the supervised updates needs; None: no teacher scores in them."""
    supervised_temperature: float
    token_budget: int
    packing: bool
    vocabulary: int
    """Size of the student's vocabulary."""
    context: str | None
    """Template of the teacher's prompt, or name of a user function that writes it; None: the student's prompt."""
    timeout: float
    """Time limit in seconds of the user function that writes the context."""
    keep: int
    """Number of earlier versions of the teacher's weights that are kept, to compute scores again; 0 keeps none."""
    threads: int
    replicas: int

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
class LearnerPlan:
    student: ModelPlan
    settings: LearnerConfig
    method: Method
    supervised: Supervised | None = None
    """Supervised updates before the first rollout; None: none."""
    updates: int
    width: int
    """Hidden size of the student; the learner estimates the cost of sequences from it."""
    step_tokens: int | None
    """Largest number of tokens of a rank's samples in one optimizer step; None: unknown."""
    export_dtype: str
    quantisation: Quantisation | None = None
    """Format to which samplers quantise the exported weights of linear layers; None: they do not."""
    stop: tuple[int | str, ...] = ()
    """Tokens at which the sampler stops besides the end tokens in the student's files; saved with the student."""
    teachers: Mapping[str, ModelPlan]
    """Constant teachers whose output layers the learner applies to cached hidden states; empty if the loss caches none.
    Those of following teachers are in the learner's snapshots."""
    one_ends: Mapping[str, OneEnd | None]
    """Mapping of each of these teachers' end tokens to the student's; None if they are the same."""
    snapshots: int
    """Number of published versions of the student whose weights are kept; 0 keeps none."""
    follow: Mapping[str, Follower]
    """Rules of teachers whose weights follow the student's weights, by teacher."""
    cosine_every: int
    """Number of updates between two comparisons of the gradients of fresh and stale samples; 0: no comparison."""
    cosine_limit: float | None
    """Largest cosine of the gradients of consecutive updates; None: no limit."""
    threads: int
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
    apart: tuple[RewardModel | Judge, ...] = ()
    """Graders of whole groups, besides the functions."""
    tells: bool = False
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


def engines_of(config: Config, method: Method, one_ends: Mapping[str, OneEnd | None] | None = None) -> EnginesPlan:
    """Return the specification of every engine; `one_ends` has the mapping of each teacher with ends = "map"."""
    mapped = {name for name, teacher in config.teachers.items() if teacher.ends == "map"}
    one_ends = {name: one_end for name, one_end in (one_ends or {}).items() if name in mapped}
    return EnginesPlan(
        learner=learner_of(config, method, one_ends),
        sampler=sampler_of(config),
        teacher_samplers=teacher_samplers_of(config),
        scorers={name: scorer_of(config, name, one_ends.get(name)) for name in config.teachers},
        grader=GraderPlan(
            rewards=config.task.reward,
            processes=config.runtime.graders,
            timeout=config.task.timeout,
            sandbox=config.task.sandbox,
            settings=reward_settings(config),
            apart=graders_apart(config),
            tells=any(teacher.shows for teacher in config.teachers.values()),
        ),
        runtime=config.runtime,
        tokens_in_flight=schedule_of(config.schedule, config.groups_per_update).credits
        * config.sampler.group
        * config.sampler.max_tokens,
        serial=config.schedule.serial,
        costs=load_costs(config.runtime.costs) if config.runtime.clock == "modelled" else None,
    )


def reward_settings(config: Config) -> RewardSettings:
    task, found = config.task, dict[str, Mapping[str, Any]]()
    if "format" in task.reward:
        found["format"] = (task.format or FormatConfig()).model_dump()
    if task.overlong is not None:
        found["overlong"] = task.overlong.model_dump() | {"max_tokens": config.sampler.max_tokens}
    if task.model is not None:
        found["model"] = {}
    if task.judge is not None:
        found["judge"] = {"prompt": task.judge.prompt}
    return found


def graders_apart(config: Config) -> tuple[RewardModel | Judge, ...]:
    """Return the reward model and the judge of the config, if any."""
    task, found = config.task, list[RewardModel | Judge]()
    if (model := task.model) is not None:
        found.append(
            RewardModel(
                path=model.path,
                max_length=model.max_length or context_length(load_config(model.path)),
                batch=model.batch,
                dtype=model.dtype,
                device=config.runtime.device,
                timeout=task.timeout,
            )
        )
    if (judge := task.judge) is not None:
        endpoint = JudgeEndpoint(
            teacher="",
            url=judge.base_url,
            model=judge.model,
            key=key_from_environment("task.judge.api_key_env", judge.api_key_env),
            concurrency=judge.concurrency,
            timeout=judge.timeout,
        )
        found.append(Judge(endpoint=endpoint, **judge.model_dump(include={"prompt", "pattern", "key", "max_tokens"})))
    return tuple(found)


def check_reward_model(config: Config) -> None:
    """Raise ConfigError if task.model is no model whose only label is a reward."""
    if (model := config.task.model) is None:
        return
    check_there(model.path)
    found = load_config(model.path)
    names = found.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"task.model.path: {model.path} holds {', '.join(names) or 'another model'}: a reward model is one for "
            "sequence classification"
        )
    if found.num_labels != 1:
        raise ConfigError(f"task.model.path: {model.path} has {found.num_labels} labels: a reward model has one")
    context = context_length(found)
    if model.max_length is not None and model.max_length > context:
        raise ConfigError(
            f"task.model.max_length = {model.max_length} exceeds the context of {context} of {model.path}"
        )


def student_of(config: Config, dtype: str) -> ModelPlan:
    device, longest = config.runtime.device, config.sampler.longest
    lora, seed = config.learner.lora, config.seed
    return ModelPlan(name=config.student, dtype=dtype, device=device, longest=longest, lora=lora, seed=seed)


def sampler_of(config: Config) -> SamplerPlan:
    sampler, drawn = config.sampler, rollout_sampling(config)
    return SamplerPlan(
        runs=SAMPLERS[sampler.engine](config),
        slots=sampler.slots,
        stop=sampler.stop,
        draws=drawn.draws,
        best=drawn.best,
        top_k=drawn.top_k if drawn.keep_mask else 0,
        on_publish=sampler.on_publish,
        speculation=sampler.speculation,
        threads=config.runtime.threads,
        replicas=at_first(sampler.replicas),
        environment=environment_of(config),
        teacher=beside_sampler(config),
        router=config.learner.records_router,
    )


def beside_sampler(config: Config) -> ModelPlan | None:
    """Return the teacher that the sampler asks at every token (`sampler.interleave`); None: it asks none."""
    if not config.sampler.interleave:
        return None
    (name,) = config.teachers
    return replace(teacher_of(config, name), longest=config.sampler.longest)


def teacher_samplers_of(config: Config) -> dict[str, SamplerPlan]:
    """Return a sampler for each teacher that generates responses; it has as many replicas as the teacher's scorers."""
    if "teacher" not in config.offpolicy_sources:
        return {}
    own = sampler_of(config)
    return {
        name: replace(
            own,
            runs=teacher_of(config, name),
            replicas=at_first(teacher.replicas),
            teacher=None,
            router=False,
            ends_as=config.student,
            cache=str(Path(config.sft.cache).absolute()) if config.sft is not None and config.sft.cache else None,
        )
        for name, teacher in config.teachers.items()
    }


def environment_of(config: Config) -> EnvironmentPlan | None:
    environment = config.environment
    if environment is None:
        return None
    use, gateway, sandbox = environment.use, environment.gateway, environment.sandbox
    return EnvironmentPlan(
        wanted=None if use is None else HostSettings(use, sandbox, environment.observation),
        gateway=None if gateway is None else gateway_of(config, gateway, walled=sandbox == "bubblewrap"),
        processes=environment.processes,
        limits=Limits(**{each.name: getattr(environment, each.name) for each in fields(Limits)}),
        renderer={"format": environment.format, "template_args": config.data.template_args},
    )


def gateway_of(config: Config, gateway: GatewayConfig, *, walled: bool) -> GatewayPlan:
    host, _, port = (gateway.listen or "127.0.0.1:0").rpartition(":")
    return GatewayPlan(
        agent=None if gateway.command is None else agent_of(gateway, walled),
        at_once=gateway.at_once,
        host=host.strip("[]"),
        port=int(port),
        name=config.student,
        vocabulary=vocabulary_of(config.student),
    )


def agent_of(gateway: GatewayConfig, walled: bool) -> Agent:
    def words(name: str, given: str | None) -> list[str]:
        try:
            return shlex.split(given or "")
        except ValueError as error:
            raise ConfigError(f"environment.gateway.{name} = {given!r}: {error}") from None

    verify = tuple(  # absolute paths, since the program starts in another directory
        str(Path(word).absolute()) if "/" in word and Path(word).exists() else word
        for word in words("verify", gateway.verify)
    )
    return Agent(
        command=tuple(words("command", gateway.command)),
        verify=verify if gateway.verify is not None else None,
        workspace=gateway.workspace,
        walled=walled,
    )


def scorer_of(config: Config, name: str, one_end: OneEnd | None = None) -> ScorerPlan:
    teacher, sft = config.teachers[name], config.sft
    return ScorerPlan(
        name=name,
        runs=endpoint_of(config, name) or SCORERS[teacher.engine](config, name),
        one_end=one_end,
        spec=config.loss.spec,
        temperature=config.loss.temperature,
        supervised=None if sft is None or sft.loss.spec.cache == "none" else sft.loss.spec,
        supervised_temperature=1.0 if sft is None else sft.loss.temperature,
        token_budget=teacher.token_budget,
        packing=teacher.packing,
        vocabulary=vocabulary_of(config.student),
        context=teacher.context,
        timeout=config.task.timeout,
        keep=0 if teacher.follow is None or teacher.relabel == "never" else versions_in_flight(config, teacher.follow),
        threads=config.runtime.threads,
        replicas=at_first(teacher.replicas),
    )


def teacher_of(config: Config, name: str) -> ModelPlan:
    teacher, device = config.teachers[name], config.runtime.device
    if teacher.follow is not None:  # has the same architecture and adapters as the student
        return replace(student_of(config, teacher.dtype), longest=teacher.longest, devices=teacher.devices)
    return ModelPlan(
        name=config.model_of(teacher),
        dtype=teacher.dtype,
        device=device,
        longest=teacher.longest,
        devices=teacher.devices,
    )


def endpoint_of(config: Config, name: str) -> Endpoint | None:
    """Return a teacher's endpoint, with its share of `concurrency` for one replica; None if the teacher runs here."""
    teacher = config.teachers[name]
    if teacher.base_url is None:
        return None
    return Endpoint(
        teacher=name,
        url=teacher.base_url,
        model=teacher.model,
        key=key_from_environment(f"teachers.{name}.api_key_env", teacher.api_key_env),
        concurrency=-(-teacher.concurrency // at_first(teacher.replicas)),
        timeout=teacher.timeout,
    )


def learner_of(config: Config, method: Method, one_ends: Mapping[str, OneEnd | None]) -> LearnerPlan:
    constant = [name for name, teacher in config.teachers.items() if teacher.follow is None]
    longest, step_tokens = config.sampler.longest, None
    if longest is not None and config.environment is None:  # an episode may have any number of samples
        steps = config.learner.minibatches * config.learner.ranks
        step_tokens = -(-config.learner.batch_size // steps) * longest
    sending = constant if sends_hidden(config) else []
    return LearnerPlan(
        student=student_of(config, config.learner.dtype),
        settings=config.learner,
        method=method,
        supervised=supervised_of(config),
        updates=config.updates,
        width=width_of(config.student),
        step_tokens=step_tokens,
        export_dtype=config.sampler.dtype,
        quantisation=config.sampler.quantisation,
        stop=config.sampler.stop,
        teachers={name: replace(teacher_of(config, name), devices=1) for name in sending},
        one_ends={name: one_ends.get(name) for name in sending},
        snapshots=snapshots_of(config, method),
        follow=followers_of(config),
        cosine_every=config.guards.gac.every if config.guards.gac is not None else 0,
        cosine_limit=config.guards.gac.limit if config.guards.gac is not None else None,
        threads=config.learner.threads or config.runtime.threads,
        patience=config.runtime.patience,
    )


def sends_hidden(config: Config) -> bool:
    """Return whether teachers send hidden states, to which the learner applies their heads."""
    losses = [config.loss] if config.sft is None else [config.loss, config.sft.loss]
    return any(loss.spec.cache == "hidden" for loss in losses)


def followers_of(config: Config) -> dict[str, Follower]:
    hidden, found = sends_hidden(config), dict[str, Follower]()
    for name, teacher in config.teachers.items():
        if (follow := teacher.follow) is not None:
            read = hidden or (config.freshness is not None and teacher.relabel != "never")
            keep = versions_in_flight(config, follow) - 1 if read else 0
            found[name] = Follower(follow.decay, follow.period, teacher.dtype, keep=keep)
    return found


def versions_in_flight(config: Config, follow: FollowConfig) -> int:
    """Return the number of versions of a following teacher that may have scored groups in flight."""
    schedule = schedule_of(config.schedule, config.groups_per_update)
    return max(schedule.reach, schedule.max_lag or 0) // follow.period + 2


def snapshots_of(config: Config, method: Method) -> int:
    """Return `learner.snapshots`; if unset, the number of versions in flight, or 0 if nothing reads snapshots."""
    needed = config.learner.exact_drift or method.reads_snapshots
    if config.learner.snapshots is not None or not needed:
        return config.learner.snapshots or 0
    schedule = schedule_of(config.schedule, config.groups_per_update)
    return max(schedule.reach, schedule.max_lag or 0) // schedule.publish_every + 1


SAMPLERS: dict[str, Callable[[Config], ModelPlan | Settings | ServerSettings]] = {
    "native": lambda config: replace(
        student_of(config, config.sampler.dtype), quantisation=config.sampler.quantisation
    ),
    "vllm": sampler_settings,
    "server": server_settings,
}
SCORERS: dict[str, Callable[[Config, str], ModelPlan | Settings]] = {"native": teacher_of, "vllm": scorer_settings}
"""Functions that plan local engines, by the engine's name in `config.engines.ENGINES`: samplers and scorers."""
