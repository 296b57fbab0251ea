"""Decisions on engines: derive the plan of each engine from a config."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipstream.config.base import at_first
from slipstream.config.costs import load as load_costs
from slipstream.config.schema import Config
from slipstream.config.teacher import FollowConfig
from slipstream.engines.http.client import Endpoint, key_from_environment
from slipstream.engines.native.config import vocabulary_of, width_of
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.server.api import ServerEndpoint, ServerSettings
from slipstream.engines.vllm.core import Settings
from slipstream.objective.method import Method, supervised_of
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.engine_plans import (
    EnginesPlan,
    LearnerPlan,
    ModelPlan,
    SamplerPlan,
    ScorerPlan,
)
from slipstream.plan.environment import environments_of
from slipstream.plan.graders import grader_of
from slipstream.protocols import Follower, OneEnd, Respelling

SCORED = 64
"""Maximum number of responses that a teacher in vLLM scores at the same time."""
GENERATED = 1
"""Tokens that vLLM generates, and has to have room for, after a sequence that it scores."""


def engines_of(
    config: Config,
    method: Method,
    one_ends: Mapping[str, OneEnd | None] | None = None,
    respellings: Mapping[str, Respelling] | None = None,
) -> EnginesPlan:
    """Return the specification of every engine.

    `one_ends` has the mapping of each teacher with ends = "map", `respellings` those with spelling = "own".
    """
    mapped = {name for name, teacher in config.teachers.items() if teacher.ends == "map"}
    one_ends = {name: one_end for name, one_end in (one_ends or {}).items() if name in mapped}
    return EnginesPlan(
        learner=learner_of(config, method, one_ends, respellings or {}),
        sampler=sampler_of(config),
        teacher_samplers=teacher_samplers_of(config, respellings or {}),
        scorers={
            name: scorer_of(config, name, one_ends.get(name), (respellings or {}).get(name)) for name in config.teachers
        },
        grader=grader_of(config),
        runtime=config.runtime,
        tokens_in_flight=schedule_of(config.schedule, config.groups_per_update, config.reuse).held
        * config.sampler.group
        * config.sampler.max_tokens,
        serial=config.schedule.serial,
        costs=load_costs(config.runtime.costs) if config.runtime.clock == "modelled" else None,
    )


def student_of(config: Config, dtype: str) -> ModelPlan:
    device, max_length = config.runtime.device, config.sampler.max_length
    lora, seed = config.learner.lora, config.seed
    return ModelPlan(name=config.student, dtype=dtype, device=device, max_length=max_length, lora=lora, seed=seed)


def critic_of(config: Config) -> ModelPlan | None:
    """Return the critic's own model; None: it has none."""
    critic = config.critic
    if critic is None or critic.model is None:
        return None
    return replace(student_of(config, critic.dtype or config.learner.dtype), name=critic.model, lora=critic.lora)


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
        environments=environments_of(config),
        teacher=beside_sampler(config),
        router=config.learner.records_router,
    )


def beside_sampler(config: Config) -> ModelPlan | None:
    """Return the teacher that the sampler asks at every token; None: it asks none."""
    if not config.sampler.asks_teacher:
        return None
    (name,) = config.teachers
    return replace(teacher_of(config, name), max_length=config.sampler.max_length)


def teacher_samplers_of(config: Config, respellings: Mapping[str, Respelling]) -> dict[str, SamplerPlan]:
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
            stop=config.sampler.stop if name not in respellings else (),
            ends_as=config.student if name not in respellings else "",
            respelling=respellings.get(name),
            cache=str(Path(config.sft.cache).absolute()) if config.sft is not None and config.sft.cache else None,
        )
        for name, teacher in config.teachers.items()
    }


def scorer_of(
    config: Config, name: str, one_end: OneEnd | None = None, respelling: Respelling | None = None
) -> ScorerPlan:
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
        vocabulary=vocabulary_of(config.student) if respelling is None else sys.maxsize,
        respelling=respelling,
        context=teacher.context,
        timeout=config.task.timeout,
        keep=0 if teacher.follow is None or teacher.relabel == "never" else versions_in_flight(config, teacher.follow),
        threads=config.runtime.threads,
        replicas=at_first(teacher.replicas),
    )


def teacher_of(config: Config, name: str) -> ModelPlan:
    teacher, device = config.teachers[name], config.runtime.device
    if teacher.follow is not None:  # has the same architecture and adapters as the student
        return replace(student_of(config, teacher.dtype), max_length=teacher.max_length, devices=teacher.devices)
    return ModelPlan(
        name=config.model_of(teacher),
        dtype=teacher.dtype,
        device=device,
        max_length=teacher.max_length,
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


def learner_of(
    config: Config,
    method: Method,
    one_ends: Mapping[str, OneEnd | None],
    respellings: Mapping[str, Respelling] = MappingProxyType({}),
) -> LearnerPlan:
    constant = [name for name, teacher in config.teachers.items() if teacher.follow is None]
    max_length, step_tokens = config.sampler.max_length, None
    if max_length is not None and not config.every_environment:  # an episode may have any number of samples
        steps = config.learner.minibatches * config.learner.ranks
        step_tokens = -(-config.learner.batch_size // steps) * max_length
    sending = constant if sends_hidden(config) else []
    return LearnerPlan(
        student=student_of(config, config.learner.dtype),
        critic=critic_of(config),
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
        respellings={name: respellings[name] for name in sending if name in respellings},
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
    schedule = schedule_of(config.schedule, config.groups_per_update, config.reuse)
    return schedule.kept_versions // follow.period + 2


def snapshots_of(config: Config, method: Method) -> int:
    """Return `learner.snapshots`; if unset, the number of versions in flight, or 0 if nothing reads snapshots."""
    needed = config.learner.exact_drift or method.reads_snapshots
    if config.learner.snapshots is not None or not needed:
        return config.learner.snapshots or 0
    schedule = schedule_of(config.schedule, config.groups_per_update, config.reuse)
    return schedule.kept_versions // schedule.publish_every + 1


def sampler_settings(config: Config) -> Settings:
    sampler, lora = config.sampler, config.learner.lora
    args = with_longest(sampler.engine_args, sampler.max_length)
    settings = vllm_settings(config, config.student, sampler.dtype, sampler.slots, args, seed=config.seed, lora=lora)
    return replace(settings, sleeps=config.runtime.time_share)


def scorer_settings(config: Config, name: str) -> Settings:
    teacher, where = config.teachers[name], f"teachers.{name}.engine_args"
    args = with_longest(teacher.engine_args, teacher.max_length and teacher.max_length + GENERATED)
    return vllm_settings(config, config.model_of(teacher), teacher.dtype, SCORED, args, where=where)


def with_longest(args: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """Return vLLM's arguments with the longest sequence, on which its memory and position factors depend."""
    return {"max_model_len": longest, **args} if longest else {**args}


def vllm_settings(config: Config, model: str, dtype: str, slots: int, args: Mapping[str, Any], **more: Any) -> Settings:
    runtime = config.runtime
    machine: Any = {"threads": runtime.threads, "device": runtime.device, "heartbeat": runtime.heartbeat}
    return Settings(model, dtype, slots, args, **machine, **more)


def server_settings(config: Config) -> ServerSettings:
    sampler, server = config.sampler, config.sampler.server
    assert server is not None
    key = key_from_environment("sampler.server.api_key_env", server.api_key_env)
    return ServerSettings(
        ServerEndpoint("", server.url, config.student, key, sampler.slots, server.timeout),
        server.api,
        config.student,
        sampler.dtype,
        server.folder,
        max_length=sampler.max_length,
        threads=config.runtime.threads,
    )


SAMPLERS: dict[str, Callable[[Config], ModelPlan | Settings | ServerSettings]] = {
    "native": lambda config: replace(
        student_of(config, config.sampler.dtype), quantisation=config.sampler.quantisation
    ),
    "vllm": sampler_settings,
    "server": server_settings,
}
SCORERS: dict[str, Callable[[Config, str], ModelPlan | Settings]] = {"native": teacher_of, "vllm": scorer_settings}
"""Functions that plan local engines, by the engine's name in `config.engines.ENGINES`: samplers and scorers."""
