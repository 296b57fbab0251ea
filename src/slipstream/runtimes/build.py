"""One engine at a time, from the config: what every runtime puts together in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.config import Config
from slipstream.config_objective import JSD, ForwardKL, ReverseKL, ReverseKLMC
from slipstream.engines.native.learner import NativeLearner
from slipstream.engines.native.lora import with_adapters
from slipstream.engines.native.method import method_of
from slipstream.engines.native.model import LanguageModel, load_config, load_model
from slipstream.engines.native.sampler import NativeSampler
from slipstream.engines.native.scorer import Cache, NativeScorer
from slipstream.pipeline.schedules import schedule_of
from slipstream.tasks.chat import Tokenizer, stop_ids
from slipstream.tasks.rewards import PoolGrader


def build_sampler(config: Config, tokenizer: Tokenizer) -> NativeSampler:
    student = build_student(config, config.sampler.dtype)
    return NativeSampler(
        student,
        slots=config.sampler.slots,
        stop_ids=stop_ids(tokenizer, student.model.generation_config),
        threads=config.runtime.threads,
    )


def build_student(config: Config, dtype: str) -> LanguageModel:
    lm, lora = load_model(config.student, dtype=dtype, device=config.runtime.device), config.learner.lora
    return lm if lora is None else with_adapters(lm, lora, seed=config.seed)


def build_grader(config: Config, tokenizer: Tokenizer) -> PoolGrader:
    runtime, task = config.runtime, config.task
    return PoolGrader(task.reward, decoder(tokenizer), processes=runtime.graders, timeout=task.timeout)


def build_scorer(config: Config) -> NativeScorer:
    ((name, teacher),) = config.teachers.items()
    cache, k = cache_of(config)
    return NativeScorer(
        load_model(teacher.model, dtype=teacher.dtype, device=config.runtime.device),
        name=name,
        cache=cache,
        k=k,
        temperature=config.loss.temperature,
        token_budget=teacher.token_budget,
        packing=teacher.packing,
        vocabulary=load_config(config.student).get_text_config().vocab_size,
        threads=config.runtime.threads,
    )


def build_learner(config: Config, tokenizer: Tokenizer) -> NativeLearner:
    device, head = config.runtime.device, None
    if config.teachers and cache_of(config)[0] == "hidden":
        (teacher,) = config.teachers.values()
        head = load_model(teacher.model, dtype=teacher.dtype, device=device).head
    return NativeLearner(
        build_student(config, config.learner.dtype),
        method=method_of(config),
        config=config.learner,
        updates=config.updates,
        export_dtype=config.sampler.dtype,
        tokenizer=tokenizer,
        teacher_head=head,
        snapshots=snapshots_of(config),
        threads=config.learner.threads or config.runtime.threads,
    )


def snapshots_of(config: Config) -> int:
    """Published versions that tokens in flight may be of, if the method asks for them; or what the config says."""
    if config.learner.snapshots is not None or not method_of(config).decoupled:
        return config.learner.snapshots or 0
    schedule = schedule_of(config)
    return schedule.reach // schedule.publish_every + 1


def cache_of(config: Config) -> tuple[Cache, int]:
    match config.loss:
        case ReverseKLMC():
            return "sampled", 0
        case ReverseKL():
            return "hidden", 0
        case ForwardKL(cache=cache, k=k) | JSD(cache=cache, k=k):
            return cache, k


def decoder(tokenizer: Tokenizer) -> Callable[[object], str]:
    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def set_threads(config: Config) -> None:
    """For what runs on the calling thread; engines set their own."""
    torch.set_num_threads(config.runtime.threads)
