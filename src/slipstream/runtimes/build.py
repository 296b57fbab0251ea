"""One engine at a time, from the config: what every runtime puts together in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.config.schema import Config
from slipstream.engines.http.client import Endpoint, key_from_environment
from slipstream.engines.http.scorer import HttpScorer
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.lora import with_adapters
from slipstream.engines.native.model import LanguageModel, load_config, load_model, pick_device
from slipstream.engines.native.ranks import Meeting, Ranks, join
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.engines.vllm.scorer import VllmScorer
from slipstream.objective.method import method_of
from slipstream.pipeline.schedules import schedule_of
from slipstream.tasks.chat import Tokenizer, stop_ids
from slipstream.tasks.context import TemplateContext
from slipstream.tasks.rewards import PoolGrader

Sampling = NativeSampler | VllmSampler
Scoring = NativeScorer | HttpScorer | VllmScorer


def build_sampler(config: Config, tokenizer: Tokenizer) -> Sampling:
    if config.sampler.engine == "vllm":
        from slipstream.runtimes.build_vllm import build_vllm_sampler

        return build_vllm_sampler(config, tokenizer)
    student = build_student(config, config.sampler.dtype)
    return NativeSampler(
        student,
        slots=config.sampler.slots,
        stop_ids=stop_ids(tokenizer, student.model.generation_config),
        threads=config.runtime.threads,
        on_publish=config.sampler.on_publish,
    )


def build_student(config: Config, dtype: str, device: str | None = None) -> LanguageModel:
    device, lora = device or config.runtime.device, config.learner.lora
    lm = load_model(config.student, dtype=dtype, device=device, longest=config.sampler.longest)
    return lm if lora is None else with_adapters(lm, lora, seed=config.seed)


def build_grader(config: Config, tokenizer: Tokenizer) -> PoolGrader:
    runtime, task = config.runtime, config.task
    return PoolGrader(task.reward, decoder(tokenizer), processes=runtime.graders, timeout=task.timeout)


def build_scorer(config: Config, tokenizer: Tokenizer, name: str, endpoint: Endpoint | None) -> Scoring:
    """One replica of a teacher: behind an endpoint, or here."""
    teacher, asks = config.teachers[name], config.loss.asks
    context = None if teacher.context is None else TemplateContext(teacher.context, tokenizer)
    if endpoint is not None:
        return HttpScorer(endpoint, k=asks.k, context=context)
    if teacher.engine == "vllm":
        from slipstream.runtimes.build_vllm import build_vllm_scorer

        return build_vllm_scorer(config, name, context)
    return NativeScorer(
        load_model(
            config.model_of(teacher), dtype=teacher.dtype, device=config.runtime.device, longest=teacher.longest
        ),
        name=name,
        cache=asks.cache,
        k=asks.k,
        temperature=config.loss.temperature,
        token_budget=teacher.token_budget,
        packing=teacher.packing,
        vocabulary=load_config(config.student).get_text_config().vocab_size,
        context=context,
        threads=config.runtime.threads,
    )


def endpoint_of(config: Config, name: str) -> Endpoint | None:
    """Where a teacher is, if not here, with the key that is in this process's environment, and for one replica."""
    teacher = config.teachers[name]
    if teacher.base_url is None:
        return None
    return Endpoint(
        teacher=name,
        url=teacher.base_url,
        model=teacher.model,
        key=key_from_environment(f"teachers.{name}.api_key_env", teacher.api_key_env),
        concurrency=-(-teacher.concurrency // teacher.replicas),
        timeout=teacher.timeout,
    )


def build_rank(config: Config, tokenizer: Tokenizer, index: int, meeting: Meeting) -> NativeLearner:
    """One of several learner ranks. They meet when all have loaded their models, which takes its time."""
    # where it computes, a rank need not hold more than its share: layers go there one at a time, as they are sharded
    student, device = build_student(config, config.learner.dtype, "cpu"), pick_device(config.runtime.device)
    ranks = join(meeting, index, config.learner.ranks, device=device, patience=config.runtime.patience)
    return build_learner(config, tokenizer, student, ranks)


def build_learner(
    config: Config, tokenizer: Tokenizer, student: LanguageModel | None = None, ranks: Ranks | None = None
) -> NativeLearner:
    device, head = config.runtime.device, None
    if config.teachers and config.loss.asks.cache == "hidden":
        (teacher,) = config.teachers.values()
        # on the CPU first: only the head is kept
        head = load_model(config.model_of(teacher), dtype=teacher.dtype, device="cpu").head.to(pick_device(device))
    return NativeLearner(
        student or build_student(config, config.learner.dtype),
        method=method_of(config),
        config=config.learner,
        updates=config.updates,
        export_dtype=config.sampler.dtype,
        tokenizer=tokenizer,
        teacher_head=head,
        snapshots=snapshots_of(config),
        threads=config.learner.threads or config.runtime.threads,
        ranks=ranks,
    )


def snapshots_of(config: Config) -> int:
    """Published versions that tokens in flight may be of, if the method asks for them; or what the config says."""
    asked = config.learner.exact_drift or method_of(config).reads_snapshots
    if config.learner.snapshots is not None or not asked:
        return config.learner.snapshots or 0
    schedule = schedule_of(config)
    return max(schedule.reach, schedule.max_lag or 0) // schedule.publish_every + 1


def decoder(tokenizer: Tokenizer) -> Callable[[object], str]:
    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def set_threads(config: Config) -> None:
    """For what runs on the calling thread; engines set their own."""
    torch.set_num_threads(config.runtime.threads)
