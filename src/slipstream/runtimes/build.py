"""One engine at a time, from the config: what every runtime puts together in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.config import Config, TeacherConfig
from slipstream.engines.native.learner import NativeLearner
from slipstream.engines.native.model import load_config, load_model
from slipstream.engines.native.sampler import NativeSampler
from slipstream.engines.native.scorer import Cache, NativeScorer
from slipstream.tasks.chat import Tokenizer, stop_ids
from slipstream.tasks.rewards import PoolGrader


def build_sampler(config: Config, tokenizer: Tokenizer) -> NativeSampler:
    student = load_model(config.student, dtype=config.sampler.dtype, device=config.runtime.device)
    return NativeSampler(
        student,
        slots=config.sampler.slots,
        stop_ids=stop_ids(tokenizer, student.model.generation_config),
        threads=config.runtime.threads,
    )


def build_grader(config: Config, tokenizer: Tokenizer) -> PoolGrader:
    runtime, task = config.runtime, config.task
    return PoolGrader(task.reward, decoder(tokenizer), processes=runtime.graders, timeout=task.timeout)


def build_scorer(config: Config) -> NativeScorer:
    name, teacher = the_teacher(config)
    cache, k = cache_of(config)
    return NativeScorer(
        load_model(teacher.model, dtype=teacher.dtype, device=config.runtime.device),
        name=name,
        cache=cache,
        k=k,
        temperature=config.loss.temperature,
        token_budget=teacher.token_budget,
        vocabulary=load_config(config.student).get_text_config().vocab_size,
        threads=config.runtime.threads,
    )


def build_learner(config: Config, tokenizer: Tokenizer) -> NativeLearner:
    device, head = config.runtime.device, None
    if cache_of(config)[0] == "hidden":
        _, teacher = the_teacher(config)
        head = load_model(teacher.model, dtype=teacher.dtype, device=device).head
    return NativeLearner(
        load_model(config.student, dtype=config.learner.dtype, device=device),
        loss=config.loss,
        config=config.learner,
        updates=config.updates,
        export_dtype=config.sampler.dtype,
        tokenizer=tokenizer,
        teacher_head=head,
        threads=config.learner.threads or config.runtime.threads,
    )


def the_teacher(config: Config) -> tuple[str, TeacherConfig]:
    return next(iter(config.teachers.items()))


def cache_of(config: Config) -> tuple[Cache, int]:
    match config.loss.kind:
        case "reverse_kl_mc":
            return "sampled", 0
        case "forward_kl":
            return config.loss.cache, config.loss.k


def decoder(tokenizer: Tokenizer) -> Callable[[object], str]:
    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def set_threads(config: Config) -> None:
    """For what runs on the calling thread; engines set their own."""
    torch.set_num_threads(config.runtime.threads)
