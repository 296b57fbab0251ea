"""Rules between the config and vLLM or a rollout server, and what each can score. Nothing is started or asked here."""

import os
from pathlib import Path

from slipstream.config.losses import caches
from slipstream.config.schema import Config
from slipstream.engines.http.client import key_from_environment
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.vllm import LORA_RANKS, VERSION
from slipstream.engines.vllm.core import COLDEST, known
from slipstream.errors import ConfigError
from slipstream.plan.engines import sampler_settings
from slipstream.plan.facts import Facts

UNPUBLISHED = {"gpt_oss"}
"""Model types whose weights vLLM cannot replace while it runs."""


def check_vllm_sampler(config: Config, facts: Facts) -> None:
    """Raise ConfigError for a model or a setting with which vLLM cannot roll out."""
    if config.sampler.engine != "vllm":
        return
    settings, student = sampler_settings(config), facts.student.config
    if student.model_type in UNPUBLISHED:
        raise ConfigError(f"{settings.title}: vLLM cannot update its weights while it runs; {settings.instead}")
    if settings.lora and settings.lora.rank > LORA_RANKS[-1]:
        why = f"vLLM has no room for more than {LORA_RANKS[-1]}; write less, or sampler.engine = 'native'"
        raise ConfigError(f"learner.lora.rank = {settings.lora.rank}: {why}")
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(
                f"{field}.temperature = {temperature:g}: vLLM would sample at {COLDEST}; write that or more, or "
                "sampler.engine = 'native'"
            )
    draws = rollout_sampling(config).draws
    if draws > 1 and not known(facts.vllm):
        why = f"vLLM {facts.vllm} draws one token per position (several are drawn with vLLM {VERSION})"
        raise ConfigError(f"loss.m = {draws}: {why}; write loss.m = 1, or sampler.engine = 'native'")


def check_vllm_evaluation(config: Config, facts: Facts) -> None:
    """Raise ConfigError if vLLM cannot run the model of an evaluation."""
    if config.sampler.engine != "vllm":
        return
    student, temperature = facts.student, config.eval.temperature
    if student.is_adapter:
        raise ConfigError(
            f"--engine vllm: {student.name} is an adapter: name the directory above it, a model with it merged"
        )
    if 0 < temperature < COLDEST:
        raise ConfigError(f"--temperature {temperature:g}: vLLM would sample at {COLDEST}; write that or more")


def check_vllm_teachers(config: Config, facts: Facts) -> None:
    """Raise ConfigError if vLLM cannot score for a teacher and the loss."""
    for name, teacher in config.teachers.items():
        if teacher.engine == "vllm" and teacher.base_url is None and (why := unserved(config, facts, name)):
            drop = " without engine_args" if teacher.engine_args else ' (or "auto", where vLLM is a preference)'
            raise ConfigError(f'teachers.{name}.engine = "vllm": {why}: write engine = "native"{drop}')


def unserved(config: Config, facts: Facts, name: str) -> str:
    """Return the reason why vLLM cannot score for this teacher and loss; empty if vLLM can."""
    loss, spec, model = config.loss, config.loss.spec, facts.teachers[name]
    if not facts.vllm:
        return "vLLM is not installed here"
    if model.is_adapter:
        return f"{model.name} is an adapter, and vLLM takes only whole models here"
    if loss.temperature != 1:
        return f"vLLM scores at temperature 1, and loss.temperature = {loss.temperature:g}"
    if spec.cache == "hidden":
        other = ' (loss.cache = "teacher_topk" needs none)' if "teacher_topk" in caches(type(loss)) else ""
        return f"vLLM gives no hidden states{other}"
    if spec.cache == "student_topk":
        return f'vLLM cannot score token ids chosen by the student, as loss.kind = "{loss.kind}" requires'
    if spec.draws > 1 and not (known(facts.vllm) and facts.vllm_for_gpus and config.runtime.device != "cpu"):
        return f"vLLM {facts.vllm} scores several draws (loss.m = {spec.draws}) on GPUs only, and from {VERSION} on"
    return ""


def check_server_sampling(config: Config, facts: Facts) -> None:
    """Raise ConfigError for what a rollout server cannot sample."""
    if config.sampler.engine != "server":
        return
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(f"{field}.temperature = {temperature:g}: a rollout server needs at least {COLDEST}")
    sampling, why = rollout_sampling(config), "a rollout server returns one token per position"
    if config.policy is not None and (centre := config.policy.centre) is not None:
        raise ConfigError(f'policy.centre = "{centre}" needs several tokens, and {why}: write engine = "native"')
    if sampling.best:
        raise ConfigError(
            f'loss.kind = "{config.loss.kind}" needs the most likely tokens of the student, and {why}: write '
            'loss.kind = "reverse_kl_mc" with loss.m = 1, or sampler.engine = "native"'
        )
    if sampling.draws == 1:
        return
    if "m" not in type(config.loss).model_fields or not config.loss.weight:
        raise ConfigError(f'freshness.draws = {sampling.draws}: {why}: write 1, or sampler.engine = "native"')
    raise ConfigError(f'loss.m = {sampling.draws}: {why}; write loss.m = 1, or sampler.engine = "native"')


def check_folder(config: Config, facts: Facts) -> None:
    """Raise ConfigError if the key is missing, or if the folder for weights cannot be written here."""
    if (server := config.sampler.server) is None:
        return
    key_from_environment("sampler.server.api_key_env", server.api_key_env)
    if not Path(server.folder).is_dir() or not os.access(server.folder, os.W_OK):
        raise ConfigError(
            f"sampler.server.folder = {server.folder!r} is not a directory that can be written here: name one that the "
            "server mounts under the same path"
        )
