"""Completion of a config by facts: values that it leaves open, and defaults that an engine cannot serve.

Each function returns a changed config and says why. What the config asks for explicitly is never changed: rules
refuse it.
"""

import json
from collections.abc import Callable, Mapping

from slipstream.config.learner import LoraConfig
from slipstream.config.schema import Config
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.vllm import TORCH, VERSION
from slipstream.engines.vllm.core import known
from slipstream.errors import ConfigError
from slipstream.models.resolve import without_weights
from slipstream.plan.facts import Facts, ModelFacts
from slipstream.plan.placement import adapted
from slipstream.plan.rules.vllm import unserved

Say = Callable[[str], object]


def completed(config: Config, facts: Facts, say: Say) -> Config:
    """Return the config with adapters as the student has them, draws that samplers can serve, and teachers' engines."""
    lora = lora_of_student(facts.student, config.learner.lora, say)
    config = config.with_values(learner={"lora": lora})
    engines = {config.sampler.engine, *(teacher.engine for teacher in config.teachers.values())}
    if "vllm" in engines and facts.vllm and not known(facts.vllm):
        say(
            f"note: vLLM {facts.vllm} was never tested; publishes use internals of vLLM {VERSION} with torch {TORCH}: "
            f"run pip install 'vllm=={VERSION}.*'"
        )
    config = with_draws(config, facts, say)
    chosen = dict[str, dict[str, str]]()
    for name, teacher in config.teachers.items():
        if teacher.engine == "auto" and teacher.base_url is None:
            why = unserved(config, facts, name)
            engine, why = ("native", why) if why else ("vllm", "vLLM can score what the loss needs")
            say(f'note: teachers.{name}.engine = "{engine}", because {why}')
            chosen[name] = {"engine": engine}
    return config.with_values(chosen)


def lora_of_student(student: ModelFacts, requested: LoraConfig | None, say: Say) -> LoraConfig | None:
    """Return the requested LoRA settings, or those of a student that is an adapter; ConfigError if they disagree."""
    adapter = student.adapter
    if adapter is None:
        return requested
    adapter_lora = LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)
    for name in requested.model_fields_set if requested else ():
        wanted, own = getattr(requested, name), getattr(adapter_lora, name)
        if wanted == own:
            continue
        # targets agree if they select the layers that have an adapter, compared by the last part of their names
        selected = adapted(student.name, LoraConfig(targets=wanted)) if name == "targets" else {}
        if not selected or {layer.rpartition(".")[2] for layer in selected} != set(own):
            raise ConfigError(
                f"learner.lora.{name} = {json.dumps(wanted)}, and {student.name} is an adapter with {json.dumps(own)}: "
                "write that, or drop it"
            )
    if requested is None:
        layers = ", ".join(adapter.targets)
        say(f"learner.lora: rank {adapter.rank}, alpha {adapter.alpha:g}, at {layers}, as {student.name} has them")
    return adapter_lora


def with_draws(config: Config, facts: Facts, say: Say) -> Config:
    """Return the config with one draw per position if its engine draws no more and the config does not set loss.m."""
    engine, draws = config.sampler.engine, rollout_sampling(config).draws
    why = {
        "vllm": ""
        if known(facts.vllm)
        else f"vLLM {facts.vllm} draws one token per position (several are drawn with vLLM {VERSION})",
        "server": "a rollout server returns one token per position",
    }.get(engine, "")
    free = config.loss.weight and "m" in type(config.loss).model_fields and "m" not in config.loss.model_fields_set
    if draws == 1 or not why or not free:
        return config
    say(f"note: loss.m = 1, because {why}")
    return config.with_values(loss={"m": 1})


def on_gpus(config: Config, facts: Facts) -> Config:
    """Return the config of a run on the GPUs of other machines; the config itself if it is for this machine."""
    if facts.gpus is None:
        return config
    if config.runtime.device == "cpu":
        raise ConfigError('--gpus: runtime.device = "cpu" uses no GPU: drop one of them')
    return config.with_values(runtime={"device": "cuda"}) if config.runtime.device == "auto" else config


def with_shapes(config: Config) -> Config:
    """Return the config with `shapes:NAME` for every model on the hub whose config.json is part of this package."""
    local = {n: t for n, t in config.teachers.items() if t.base_url is None and config.model_of(t) == t.model}
    teachers = {name: {"model": without_weights(teacher.model)} for name, teacher in local.items()}
    if config.critic is not None and config.critic.model is not None:
        config = config.with_values(critic={"model": without_weights(config.critic.model)})
    return config.with_values(teachers, student=without_weights(config.student))


def with_lengths(config: Config, drawn: int, scored: Mapping[str, int]) -> Config:
    """Return the config with missing `max_length` settings of the sampler and of local teachers filled in."""
    teachers = {
        name: {"max_length": length_for(f"teachers.{name}", config.teachers[name].max_length, longest)}
        for name, longest in scored.items()
    }
    return config.with_values(teachers, sampler={"max_length": length_for("sampler", config.sampler.max_length, drawn)})


def length_for(section: str, given: int | None, longest: int) -> int:
    if given is not None and given < longest:
        raise ConfigError(
            f"{section}.max_length = {given} is less than the longest prompt and response of {longest} tokens: write "
            "that or more, or drop it"
        )
    return given or longest
