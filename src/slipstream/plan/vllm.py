"""Plans of vLLM engines and rollout servers, and checks that refuse or replace settings that they do not support."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config.schema import Config, TeacherConfig
from slipstream.engines.http.client import key_from_environment
from slipstream.engines.native.config import context_length, experts_of, load_config, vocabulary_of
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.server.api import APIS, ServerEndpoint, ServerSettings
from slipstream.engines.vllm import RANKS, TORCH, VERSION
from slipstream.engines.vllm.core import COLDEST, Settings, known, version
from slipstream.errors import ConfigError, EndpointError
from slipstream.models.adapters import is_adapter
from slipstream.pipeline.watchdog import ResponseWatch

SCORED = 64
"""Maximum number of responses that a teacher in vLLM scores at the same time."""
GENERATED = 1
"""Tokens that vLLM generates, and has to have room for, after a sequence that it scores."""
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
        lora=config.learner.lora,
    )


def scorer_settings(config: Config, name: str) -> Settings:
    teacher = config.teachers[name]
    longest = {"max_model_len": teacher.longest + GENERATED} if teacher.longest else {}
    return Settings(
        config.model_of(teacher),
        teacher.dtype,
        SCORED,
        longest | teacher.engine_args,
        where=f"teachers.{name}.engine_args",
        threads=config.runtime.threads,
        device=config.runtime.device,
        heartbeat=config.runtime.heartbeat,
    )


def sampler_context(config: Config) -> int:
    """Return the longest sequence, in tokens, that the sampler accepts."""
    longest = context_length(load_config(config.student))
    return min(longest, int(config.sampler.engine_args.get("max_model_len", longest)))


def teacher_context(config: Config, teacher: TeacherConfig) -> int:
    """Return the longest sequence, in tokens, that a teacher can score here."""
    longest = context_length(load_config(config.model_of(teacher)))
    if teacher.engine != "vllm":
        return longest
    return min(longest, int(teacher.engine_args.get("max_model_len", longest))) - GENERATED


def with_vllm(config: Config, say: Callable[[str], None], planned: str = "") -> Config:
    """Replace a default loss.m, and the teachers' engine "auto", by what vLLM supports. ConfigError for conflicts.

    `planned`: version of vLLM for GPUs that need not be installed here; empty: the installed version.
    """
    installed = planned or version()
    used = config.sampler.engine == "vllm" or any(teacher.engine == "vllm" for teacher in config.teachers.values())
    if used and installed and not known(installed):
        say(
            f"note: vLLM {installed} was never tested; publishes use internals of vLLM {VERSION} with torch {TORCH}: "
            f"run pip install 'vllm=={VERSION}.*'"
        )
    config = with_draws(config, say, planned)
    teachers = dict(config.teachers)
    for name, teacher in config.teachers.items():
        if teacher.engine == "native" or teacher.base_url is not None:
            continue
        why = unserved(config, name, planned)
        if teacher.engine == "vllm" and why:
            drop = " without engine_args" if teacher.engine_args else ' (or "auto", where vLLM is a preference)'
            raise ConfigError(f'teachers.{name}.engine = "vllm": {why}: write engine = "native"{drop}')
        if teacher.engine == "auto":
            engine, why = ("native", why) if why else ("vllm", "vLLM can score what the loss needs")
            say(f'note: teachers.{name}.engine = "{engine}", because {why}')
            teachers[name] = teacher.model_copy(update={"engine": engine})
    return config.model_copy(update={"teachers": teachers})


def unserved(config: Config, name: str, planned: str = "") -> str:
    """Return the reason why vLLM cannot score for this teacher and loss; empty if vLLM can."""
    installed, for_gpus = planned or version(), planned or version("vllm")
    loss, cache, draws = config.loss, config.loss.spec.cache, config.loss.spec.draws
    if not installed:
        return "vLLM is not installed here"
    if is_adapter(config.model_of(config.teachers[name])):
        return f"{config.model_of(config.teachers[name])} is an adapter, and vLLM takes only whole models here"
    if loss.temperature != 1:
        return f"vLLM scores at temperature 1, and loss.temperature = {loss.temperature:g}"
    if cache == "hidden":
        return "vLLM gives no hidden states"
    if cache == "student_topk":
        return f'vLLM cannot score token ids chosen by the student, as loss.kind = "{loss.kind}" requires'
    if draws > 1 and not (known(installed) and for_gpus and config.runtime.device != "cpu"):
        return f"vLLM {installed} scores several draws (loss.m = {draws}) on GPUs only, and from {VERSION} on"
    return ""


def with_draws(config: Config, say: Callable[[str], None], planned: str = "") -> Config:
    if config.sampler.engine != "vllm":
        return config
    settings, student = sampler_settings(config), load_config(config.student)
    if experts_of(student) and config.runtime.device != "cpu" and settings.args.get("moe_backend") != "triton":
        say(
            "note: vLLM's kernel of experts must keep their layout, or the run stops as it starts: on other GPUs than "
            'Hopper write sampler.engine_args = { moe_backend = "triton" }'
        )
    if student.model_type in UNPUBLISHED:
        raise ConfigError(f"{settings.named}: vLLM cannot update its weights while it runs; {settings.instead}")
    if settings.lora and settings.lora.rank > RANKS[-1]:
        why = f"vLLM has no room for more than {RANKS[-1]}; write less, or sampler.engine = 'native'"
        raise ConfigError(f"learner.lora.rank = {settings.lora.rank}: {why}")
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(
                f"{field}.temperature = {temperature:g}: vLLM would sample at {COLDEST}; write that or more, or "
                "sampler.engine = 'native'"
            )
    draws, installed = rollout_sampling(config).draws, planned or version()
    if draws == 1 or known(installed):
        return config
    why = f"vLLM {installed} draws one token per position (several are drawn with vLLM {VERSION})"
    if "m" in config.loss.model_fields_set:
        raise ConfigError(f"loss.m = {draws}: {why}; write loss.m = 1, or sampler.engine = 'native'")
    say(f"note: loss.m = 1, because {why}")
    return config.model_copy(update={"loss": config.loss.model_copy(update={"m": 1})})


# --- rollout servers -----------------------------------------------------------------------------------------------


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
        longest=sampler.longest,
        threads=config.runtime.threads,
    )


def with_server(config: Config, say: Callable[[str], None]) -> Config:
    """Return the config with one draw per position; ConfigError for what a rollout server cannot sample."""
    if config.sampler.engine != "server":
        return config
    for field, temperature in ("sampler", config.sampler.temperature), ("eval", config.eval.temperature):
        if 0 < temperature < COLDEST:
            raise ConfigError(f"{field}.temperature = {temperature:g}: a rollout server needs at least {COLDEST}")
    sampling, why = rollout_sampling(config), "a rollout server returns one token per position"
    if sampling.best:
        raise ConfigError(
            f'loss.kind = "{config.loss.kind}" needs the most likely tokens of the student, and {why}: write '
            'loss.kind = "reverse_kl_mc" with loss.m = 1, or sampler.engine = "native"'
        )
    if sampling.draws == 1:
        return config
    if "m" not in type(config.loss).model_fields or not config.loss.weight:
        raise ConfigError(f'freshness.draws = {sampling.draws}: {why}: write 1, or sampler.engine = "native"')
    if "m" in config.loss.model_fields_set:
        raise ConfigError(f'loss.m = {sampling.draws}: {why}; write loss.m = 1, or sampler.engine = "native"')
    say(f"note: loss.m = 1, because {why}")
    return config.model_copy(update={"loss": config.loss.model_copy(update={"m": 1})})


def check_folder(config: Config) -> None:
    """Raise ConfigError if the key is missing, or if the folder for weights cannot be written here."""
    if (server := config.sampler.server) is None:
        return
    key_from_environment("sampler.server.api_key_env", server.api_key_env)
    if not Path(server.folder).is_dir() or not os.access(server.folder, os.W_OK):
        raise ConfigError(
            f"sampler.server.folder = {server.folder!r} is not a directory that can be written here: name one that the "
            "server mounts under the same path"
        )


def check_server(config: Config, longest: int, prompt: Sequence[int], say: Callable[[str], None]) -> None:
    """Send small requests to the rollout server; raise ConfigError if it cannot serve the run."""
    if config.sampler.engine != "server":
        return
    settings = server_settings(config)
    api, url = APIS[settings.api](settings.endpoint, vocabulary_of(settings.model)), settings.endpoint.url

    async def ask() -> str:
        with ResponseWatch("the rollout server", say).waiting():
            await api.label()
            context = await api.context()
            if context is not None and context < longest:
                raise ConfigError(
                    f"sampler.server.url: {url} has a context of {context}, but prompt + sampler.max_tokens are up to "
                    f"{longest}: lower sampler.max_tokens, or start the server with {longest} or more"
                )
            if wrong := await api.unprocessed([int(token) for token in prompt], config.sampler.temperature):
                raise ConfigError(f"sampler.server.url: {url} {wrong}")
        return f"{api.where} answers" + (f", context {context}" if context is not None else "")

    try:
        say(asyncio.run(ask()))
    except EndpointError as error:
        if error.status in (401, 403) and "scale-out" not in str(error):
            hint = "sampler.server.api_key_env: the server wants a key: name its variable"
        else:
            hint = f"sampler.server.url = {url!r}: it cannot serve rollouts: {api.begin}"
        raise ConfigError(f"{hint} ({error})") from None
