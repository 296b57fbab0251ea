"""Plans of vLLM engines, and checks that refuse or replace settings that vLLM does not support."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config.schema import Config
from slipstream.engines.native.config import context_length, load_config
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.vllm import VERSION
from slipstream.engines.vllm.core import COLDEST, Settings, check_args, check_installed, known, version
from slipstream.errors import ConfigError

SCORED = 64
"""Maximum number of responses that a teacher in vLLM scores at the same time."""
UNPUBLISHED = {"gpt_oss"}
"""Model types whose weights vLLM cannot replace while it runs."""


def sampler_settings(config: Config) -> Settings:
    # vLLM's memory and position factors depend on the longest sequence
    longest = {"max_model_len": config.sampler.longest} if config.sampler.longest else {}
    return Settings(
        config.student,
        config.sampler.dtype,
        config.sampler.slots,
        longest | config.sampler.engine_args,
        threads=config.runtime.threads,
        device=config.runtime.device,
        seed=config.seed,
        heartbeat=config.runtime.heartbeat,
    )


def scorer_settings(config: Config, name: str) -> Settings:
    teacher = config.teachers[name]
    return Settings(
        config.model_of(teacher),
        teacher.dtype,
        SCORED,
        where=f"teachers.{name}",
        threads=config.runtime.threads,
        device=config.runtime.device,
        heartbeat=config.runtime.heartbeat,
    )


def sampler_context(config: Config) -> int:
    """Return the longest sequence, in tokens, that the sampler accepts."""
    longest = context_length(load_config(config.student))
    return min(longest, int(config.sampler.engine_args.get("max_model_len", longest)))


def sampler_devices(config: Config) -> int:
    return int(config.sampler.engine_args.get("tensor_parallel_size", 1))


def with_vllm(config: Config, say: Callable[[str], None]) -> Config:
    """Replace settings that vLLM does not support: loss.m, and engines of teachers. ConfigError for other conflicts."""
    config = with_draws(config, say)
    teachers = dict(config.teachers)
    for name, teacher in config.teachers.items():
        if teacher.engine == "vllm" and (why := unserved(config, name)):
            say(f"note: teachers.{name}.engine = 'native', because {why}")
            teachers[name] = teacher.model_copy(update={"engine": "native"})
    return config.model_copy(update={"teachers": teachers})


def unserved(config: Config, name: str) -> str:
    """Return the reason why vLLM cannot score for this teacher and loss; empty if vLLM can."""
    check_installed(f"teachers.{name}.engine")
    loss, cache, draws = config.loss, config.loss.spec.cache, config.loss.spec.draws
    if loss.temperature != 1:
        return f"vLLM scores at temperature 1, and loss.temperature = {loss.temperature:g}"
    if cache == "hidden":
        return "vLLM gives no hidden states"
    if cache == "student_topk":
        return f'vLLM cannot score token ids chosen by the student, as loss.kind = "{loss.kind}" requires'
    if draws > 1 and not (known(version()) and version("vllm") and config.runtime.device != "cpu"):
        return f"vLLM {version()} scores several draws (loss.m = {draws}) on GPUs only, and from {VERSION} on"
    return ""


def with_draws(config: Config, say: Callable[[str], None]) -> Config:
    if config.sampler.engine != "vllm":
        return config
    check_installed("sampler.engine")
    settings = sampler_settings(config)
    check_args(settings)
    if load_config(config.student).model_type in UNPUBLISHED:
        raise ConfigError(f"{settings.named}: vLLM cannot update its weights while it runs; {settings.instead}")
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(
                f"{field}.temperature = {temperature:g}: vLLM would sample at {COLDEST}; write that or more, or "
                "sampler.engine = 'native'"
            )
    draws, installed = rollout_sampling(config).draws, version()
    if draws == 1 or known(installed):
        return config
    why = f"vLLM {installed} draws one token per position (several are drawn with vLLM {VERSION})"
    if "m" in config.loss.model_fields_set:
        raise ConfigError(f"loss.m = {draws}: {why}; write loss.m = 1, or sampler.engine = 'native'")
    say(f"note: loss.m = 1, because {why}")
    return config.model_copy(update={"loss": config.loss.model_copy(update={"m": 1})})
