"""All engines in this process, each on a thread of its own: laptops, notebooks, tests, one GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.config import Config
from slipstream.engines.base import Engines
from slipstream.engines.native.learner import NativeLearner
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampler import NativeSampler
from slipstream.engines.native.scorer import Cache, NativeScorer
from slipstream.tasks.chat import Tokenizer, stop_ids
from slipstream.tasks.rewards import PoolGrader


def cache_of(config: Config) -> tuple[Cache, int]:
    match config.loss.kind:
        case "reverse_kl_mc":
            return "sampled", 0
        case "forward_kl":
            return config.loss.cache, config.loss.k


def open_engines(config: Config, tokenizer: Tokenizer, *, say: Callable[[str], None] = print) -> Engines:
    (name, teacher), runtime = next(iter(config.teachers.items())), config.runtime
    torch.set_num_threads(runtime.threads)
    grader = PoolGrader(config.task.reward, decoder(tokenizer), processes=runtime.graders, timeout=config.task.timeout)
    try:
        say(f"loading student {config.student}")
        student = load_model(config.student, dtype=config.learner.dtype, device=runtime.device)
        copy = load_model(config.student, dtype=config.sampler.dtype, device=runtime.device)
        say(f"loading teacher {teacher.model}")
        expert = load_model(teacher.model, dtype=teacher.dtype, device=runtime.device)
        cache, k = cache_of(config)
        scorer = NativeScorer(
            expert,
            name=name,
            cache=cache,
            k=k,
            temperature=config.loss.temperature,
            token_budget=teacher.token_budget,
            vocabulary=student.vocab_size,
            threads=runtime.threads,
        )
        sampler = NativeSampler(
            copy,
            slots=config.sampler.slots,
            stop_ids=stop_ids(tokenizer, copy.model.generation_config),
            threads=runtime.threads,
        )
        learner = NativeLearner(
            student,
            loss=config.loss,
            config=config.learner,
            updates=config.updates,
            export_dtype=config.sampler.dtype,
            tokenizer=tokenizer,
            teacher_head=expert.head,
            threads=runtime.threads,
        )
    except BaseException:
        grader.close()
        raise

    def close() -> None:
        for engine in (sampler, scorer, learner, grader):
            engine.close()

    return Engines(sampler=sampler, scorer=scorer, learner=learner, grader=grader, close=close)


def decoder(tokenizer: Tokenizer) -> Callable[[object], str]:
    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode
