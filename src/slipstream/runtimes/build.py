"""Build single engines from the plan; every runtime combines them in its own way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import slipstream
from slipstream.data.spelling import Spelling, shared_layout
from slipstream.data.teacher_context import TemplateContext, context_of
from slipstream.data.tokenizers import Tokenizer, load_tokenizer, stop_ids
from slipstream.engines.http.client import Endpoint
from slipstream.engines.http.scorer import HttpScorer
from slipstream.engines.native.config import generation_of
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel, called_layers, load_model, pick_device, with_adapters
from slipstream.engines.native.ranks import LOOPBACK, Meeting, Ranks, SharedObjects, connect, join, open_store
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.quantisation import compute_rounded, quantise
from slipstream.engines.record_files import RolloutCache
from slipstream.engines.respelling import RespellingSampler, RespellingScorer
from slipstream.engines.server.api import Served, ServerSettings
from slipstream.engines.server.sampler import CompletionsSampler, ServerSampler
from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.engines.vllm.scorer import VllmScorer
from slipstream.engines.weights import identity_of
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Episodes
from slipstream.environments.gateway.agent_processes import Programs
from slipstream.environments.gateway.agents import Agents, Players
from slipstream.environments.gateway.external_agents import ExternalAgents
from slipstream.environments.pool import EnvironmentPool
from slipstream.environments.several import SeveralEnvironments
from slipstream.estimators.logprobs.tiles import Head
from slipstream.objective.distillation import TeacherHead
from slipstream.plan.engine_plans import (
    EnvironmentPlan,
    GraderPlan,
    LearnerPlan,
    ModelPlan,
    SamplerPlan,
    ScorerPlan,
)
from slipstream.protocols import Draw, GradingSampler, Sampling, TeacherSampler
from slipstream.records import Group, Handle, Prompt
from slipstream.rewards.grading import PoolGrader

if TYPE_CHECKING:
    from slipstream.environments.gateway.server import Server


@dataclass(frozen=True)
class NativeKinds:
    """Functions that make native engines: their classes, or variants of these."""

    sampler: Callable[..., NativeSampler] = NativeSampler
    scorer: Callable[..., NativeScorer] = NativeScorer
    learner: Callable[..., NativeLearner] = NativeLearner
    built: Callable[[], object] = lambda: None
    """Function to call after an engine is built, and before the next one is loaded."""


NATIVE_KINDS = NativeKinds()
Policy = NativeSampler | VllmSampler | ServerSampler | CompletionsSampler
EpisodeSampler = Episodes | Agents | SeveralEnvironments
AnySampler = Policy | EpisodeSampler
EngineScorer = NativeScorer | HttpScorer | VllmScorer
AnyScorer = EngineScorer | RespellingScorer


def build_model(plan: ModelPlan) -> LanguageModel:
    trained = plan.lora is not None  # train an adapter on its unmerged base
    lm = load_model(
        plan.name,
        dtype=plan.dtype,
        device=plan.device,
        devices=plan.devices,
        max_length=plan.max_length,
        base=trained,
    )
    if plan.quantisation is not None:
        quantise(lm.model, called_layers(lm), plan.quantisation)
    return lm if plan.lora is None else with_adapters(lm, plan.lora, seed=plan.seed)


def build_sampler(
    plan: SamplerPlan, tokenizer: Tokenizer, kind: Callable[..., NativeSampler] = NativeSampler
) -> AnySampler:
    if not plan.environments:
        return build_policy(plan, tokenizer, kind)
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(closing(open_environment(each))) for name, each in plan.environments.items()
        }
        policy = build_policy(plan, tokenizer, kind)
        stack.callback(policy.close)
        ends = stop_ids(tokenizer, generation_of(plan.model), plan.stop)
        by_name = {
            name: build_episodes(each, opened[name], policy, tokenizer, ends)
            for name, each in plan.environments.items()
        }
        stack.pop_all()
    return by_name[""] if "" in by_name else SeveralEnvironments(policy, by_name)


def open_environment(plan: EnvironmentPlan) -> EnvironmentPool | Server:
    """Start the processes of an environment, or bind the port of a gateway, so that both fail before models load."""
    if (gateway := plan.gateway) is None:
        assert plan.wanted is not None
        return EnvironmentPool(plan.wanted, plan.processes)
    from slipstream.environments.gateway.server import Server  # needs an optional dependency

    agent = gateway.agent
    external = ExternalAgents(gateway.token, plan.limits.step_seconds / 2) if agent is None else None
    return Server(gateway.name, gateway.host, gateway.port, external, walled=agent is not None and agent.walled)


def build_episodes(
    plan: EnvironmentPlan,
    opened: EnvironmentPool | Server,
    policy: Policy,
    tokenizer: Tokenizer,
    ends: Collection[int],
) -> Episodes | Agents:
    """Build the sampler of episodes in one environment, whose turns `policy` generates."""
    limits, gateway = plan.limits, plan.gateway
    if isinstance(opened, EnvironmentPool):
        renderer = Renderer(tokenizer, stop_ids=ends, tools=opened.schemas(), **plan.renderer)
        return Episodes(policy, renderer, opened, limits)
    assert gateway is not None
    players: Players | None = opened.guests
    if gateway.agent is not None:
        times = {"seconds": limits.seconds, "step_seconds": limits.step_seconds}
        players = Programs(gateway.agent, socket=opened.walled_at, **times)
    assert players is not None
    renderer = Renderer(tokenizer, stop_ids=ends, **plan.renderer)
    sizes = {"vocabulary": gateway.vocabulary, "at_once": gateway.at_once}
    return Agents(policy, renderer, players, opened, limits, **sizes)


def build_policy(plan: SamplerPlan, tokenizer: Tokenizer, kind: Callable[..., NativeSampler] = NativeSampler) -> Policy:
    """Build the sampler of the student, which generates one turn per call."""
    match plan.runs:
        case Settings() as settings:
            ends = stop_ids(tokenizer, generation_of(settings.model), plan.stop)
            return VllmSampler(settings, plan, stop_ids=ends)
        case ServerSettings() as server:
            ends = stop_ids(tokenizer, generation_of(server.model), plan.stop)
            if isinstance(server, Served):
                return CompletionsSampler(server, stop_ids=ends)
            return ServerSampler(server, stop_ids=ends)
        case ModelPlan() as student:
            lm = build_model(student)
            generation = generation_of(plan.ends_as) if plan.ends_as else lm.model.generation_config
            ends = stop_ids(tokenizer, generation, plan.stop)
            ends |= set() if plan.respelling is None else {plan.respelling.end}
            teacher = None if plan.teacher is None else build_model(plan.teacher)
            return kind(lm, plan, stop_ids=ends, teacher=teacher)


class OwnTeacherSampler(TeacherSampler):
    """Sampler with a teacher's weights, and the model that it closes; it may store what it draws."""

    def __init__(
        self, plan: SamplerPlan, tokenizer: Tokenizer, kind: Callable[..., NativeSampler] = NativeSampler
    ) -> None:
        """Build the sampler; `tokenizer` is the student's."""
        respelling = plan.respelling
        own = tokenizer if respelling is None else load_tokenizer(respelling.tokenizer)
        policy = build_policy(plan, own, kind)
        self.cache: RolloutCache | None = None
        super().__init__(policy)
        if plan.cache is not None:
            assert isinstance(policy, NativeSampler)
            lm = policy.lm
            settings = lm.model.config.to_json_string(use_diff=False)
            known = (identity_of(lm.model), settings, lm.device.type, sorted(policy.stop_ids), slipstream.__version__)
            self.cache = RolloutCache(super().generate, Path(plan.cache), repr(known))
        self.draw: Draw = super().generate if self.cache is None else self.cache.generate
        if respelling is not None:
            spellings = Spelling(tokenizer), Spelling(own)
            self.draw = RespellingSampler(self.draw, plan.model, *spellings, respelling).generate
        self.close = policy.close

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        return await self.draw(prompt, sampling, begun)


class SelfGrading(GradingSampler):
    """Sampler that grades responses in the process that holds the tokens."""

    def __init__(self, sampler: SamplerPlan, grader: GraderPlan, tokenizer: Tokenizer) -> None:
        with ExitStack() as stack:
            grading = build_grader(grader, tokenizer)
            stack.callback(grading.close)
            sampling = build_sampler(sampler, tokenizer)
            stack.callback(sampling.close)
            super().__init__(sampling, grading)
            self.policy: Any = sampling.policy if isinstance(sampling, EpisodeSampler) else sampling
            self.close = stack.pop_all().close

    async def offload(self) -> None:
        await self.policy.offload()

    async def reload(self) -> None:
        await self.policy.reload()


def build_grader(plan: GraderPlan, tokenizer: Tokenizer) -> PoolGrader:
    return PoolGrader(
        plan.rewards,
        decoder(tokenizer),
        processes=plan.processes,
        timeout=plan.timeout,
        keeps_text=plan.keeps_text,
        sandbox=plan.sandbox,
        settings=plan.settings,
        model_graders=[each.open() for each in plan.model_graders],
    )


def decoder(tokenizer: Tokenizer) -> Callable[[object], str]:
    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def build_scorer(plan: ScorerPlan, tokenizer: Tokenizer, kind: Callable[..., NativeScorer] = NativeScorer) -> AnyScorer:
    """Build a teacher's scorer; `tokenizer` is the student's."""
    if (respelling := plan.respelling) is None:
        return build_engine_scorer(plan, tokenizer, kind)
    own = load_tokenizer(respelling.tokenizer)
    spellings = Spelling(tokenizer), Spelling(own)
    context = None if plan.context is None else TemplateContext(plan.context, own)
    renderers = {name: Renderer(own, **each) for name, each in respelling.renderers.items()}
    settings: dict[str, Any] = {"context": context, "renderers": renderers, "supervised": plan.supervised}
    engine = build_engine_scorer(plan, own, kind)
    return RespellingScorer(engine, plan.name, *spellings, respelling, loss=plan.spec, **settings)


def build_engine_scorer(plan: ScorerPlan, tokenizer: Tokenizer, kind: Callable[..., NativeScorer]) -> EngineScorer:
    max_length = plan.runs.max_length if isinstance(plan.runs, ModelPlan) else None
    context = context_of(plan.context, tokenizer, max_length=max_length, timeout=plan.timeout)
    match plan.runs:
        case ModelPlan() as model:
            return kind(build_model(model), plan, context)
        case Settings() as settings:
            return VllmScorer(settings, plan, context)
        case Endpoint() as endpoint:
            return HttpScorer(endpoint, plan, context)


def build_student(plan: LearnerPlan, device: str | None = None) -> LanguageModel:
    student = build_model(plan.student if device is None else replace(plan.student, device=device))
    if plan.settings.quantised and plan.quantisation is not None:
        compute_rounded(student.model, called_layers(student), plan.quantisation, plan.export_dtype)
    return student


def build_rank(plan: LearnerPlan, tokenizer: Tokenizer, index: int, meeting: Meeting) -> NativeLearner:
    """Build one of several learner ranks. One rank of each machine loads the models, and the others map its memory."""
    shared = SharedObjects(connect(meeting, timedelta(seconds=plan.patience)))
    # load on the CPU: sharding moves layers to the device one by one, so it never holds more than a rank's share
    student = shared.get("student", partial(build_student, plan, "cpu"))
    heads = {name: shared.get(f"teacher {name}", partial(build_head, each)) for name, each in plan.teachers.items()}
    critic = None if plan.critic is None else shared.get("critic", partial(build_model, on_cpu(plan.critic)))
    device = pick_device(plan.student.device)
    ranks = join(meeting, index, plan.settings.ranks, device=device, patience=plan.patience)
    shared.memory.clear()
    return build_learner(plan, tokenizer, student, ranks, heads, critic)


def on_cpu(model: ModelPlan) -> ModelPlan:
    return replace(model, device="cpu")


def build_head(teacher: ModelPlan) -> Head:
    """Load a teacher on the CPU, because only its head is kept."""
    return build_model(on_cpu(teacher)).head


class Meet:
    """Rendezvous store for the ranks of this machine."""

    def __init__(self) -> None:
        self.store, self.at = open_store(LOOPBACK)

    async def where(self) -> Meeting:
        return self.at


def build_learner(
    plan: LearnerPlan,
    tokenizer: Tokenizer,
    student: LanguageModel | None = None,
    ranks: Ranks | None = None,
    loaded: Mapping[str, Head] | None = None,
    critic: LanguageModel | None = None,
    *,
    kind: Callable[..., NativeLearner] = NativeLearner,
) -> NativeLearner:
    """Build a learner; `loaded` are the heads of teachers that are in host memory already, as are given models."""
    student = student or build_student(plan)
    critic = critic or (None if plan.critic is None else build_model(plan.critic))
    if plan.stop:  # so that the saved student stops there, too
        generation = student.model.generation_config
        generation.eos_token_id = sorted(stop_ids(tokenizer, generation, plan.stop))
    heads = dict[str, TeacherHead]()
    for name, teacher in plan.teachers.items():
        head = build_head(teacher) if loaded is None else loaded[name]
        layout_X = None
        if (respelling := plan.respellings.get(name)) is not None:
            spellings = Spelling(tokenizer), Spelling(load_tokenizer(respelling.tokenizer))
            sizes = student.vocab_size, head.weight.shape[0]
            layout_X = torch.from_numpy(shared_layout(*spellings, respelling.roles, sizes=sizes))
        heads[name] = TeacherHead(head.to(pick_device(teacher.device)), plan.one_ends.get(name), layout_X)
    return kind(student, plan, ranks, tokenizer=tokenizer, heads=heads, critic=critic)
