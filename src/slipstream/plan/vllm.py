"""What vLLM's engines are to be, and what is refused, or replaced, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.config.schema import Config
from slipstream.engines.native.config import context_length, load_config
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.vllm import VERSION
from slipstream.engines.vllm.core import COLDEST, Settings, check_args, check_installed, known, version
from slipstream.errors import ConfigError

SCORED = 64
"""Responses that a teacher scores at a time."""
UNPUBLISHED = {"gpt_oss"}
"""Families to which vLLM gives their weights once, by loaders that do not know of later ones."""


def sampler_settings(config: Config) -> Settings:
    return Settings(
        config.student,
        config.sampler.dtype,
        config.sampler.slots,
        longest_first(config.sampler.longest) | config.sampler.engine_args,
        threads=config.runtime.threads,
        device=config.runtime.device,
        seed=config.seed,
        heartbeat=config.runtime.heartbeat,
    )


def longest_first(longest: int | None) -> dict[str, Any]:
    """vLLM keeps room for the longest sequence, and chooses position factors by it."""
    return {"max_model_len": longest} if longest else {}


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
    """The longest sequence that the sampler takes."""
    longest = context_length(load_config(config.student))
    return min(longest, int(config.sampler.engine_args.get("max_model_len", longest)))


def sampler_devices(config: Config) -> int:
    """How many devices one sampler takes."""
    return int(config.sampler.engine_args.get("tensor_parallel_size", 1))


def with_vllm(config: Config, say: Callable[[str], None]) -> Config:
    """What the vLLM that is installed here makes of a config; refused if it cannot do what was written."""
    config = with_draws(config, say)
    here = {name: teacher for name, teacher in config.teachers.items() if teacher.base_url is None}
    natives = {}
    for name, teacher in here.items():
        if teacher.engine == "vllm" and (why := unserved(config, name)):
            say(f"note: teachers.{name}.engine = 'native', because {why}")
            natives[name] = teacher.model_copy(update={"engine": "native"})
    return config.model_copy(update={"teachers": {**config.teachers, **natives}}) if natives else config


def unserved(config: Config, name: str) -> str:
    """What the loss asks of a teacher that vLLM does not give, or nothing."""
    check_installed(f"teachers.{name}.engine")
    loss, asks = config.loss, config.loss.asks
    if loss.temperature != 1:
        return f"vLLM scores at temperature 1, and loss.temperature = {loss.temperature:g}"
    if asks.cache == "hidden":
        return "vLLM gives no hidden states"
    if asks.cache == "student_topk":
        return f'vLLM scores no ids of the student\'s choice, as loss.kind = "{loss.kind}" asks'
    if asks.draws > 1 and not (known(version()) and version("vllm") and config.runtime.device != "cpu"):
        return f"vLLM {version()} scores several draws (loss.m = {asks.draws}) on GPUs only, and from {VERSION} on"
    return ""


def with_draws(config: Config, say: Callable[[str], None]) -> Config:
    if config.sampler.engine != "vllm":
        return config
    check_installed("sampler.engine")
    settings = sampler_settings(config)
    check_args(settings)
    if load_config(config.student).model_type in UNPUBLISHED:
        raise ConfigError(f"{settings.named}: vLLM takes no new weights for it while it runs; {settings.instead}")
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(
                f"{field}.temperature = {temperature:g}: vLLM would draw at {COLDEST}; write that or more, or "
                "sampler.engine = 'native'"
            )
    draws, installed = rollout_sampling(config).draws, version()
    if draws == 1 or known(installed):
        return config
    why = f"vLLM {installed} draws one token at a time (several are drawn under vLLM {VERSION})"
    if "m" in config.loss.model_fields_set:
        raise ConfigError(f"loss.m = {draws}: {why}; write loss.m = 1, or sampler.engine = 'native'")
    say(f"note: loss.m = 1, because {why}")
    return config.model_copy(update={"loss": config.loss.model_copy(update={"m": 1})})
