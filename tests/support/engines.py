"""Native engines and scorers from single settings, as tests need them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import Cache, LossSpec, ReverseKLMC
from slipstream.engines.http.client import Endpoint
from slipstream.engines.http.scorer import MAX_TOKEN_ID, HttpScorer
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.learning.passes import Passes
from slipstream.engines.native.learning.student import Student
from slipstream.engines.native.learning.weights import Snapshots
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.settings import LearnerSettings, SamplerSettings, ScorerSettings
from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.engines.vllm.scorer import VllmScorer
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import Context


def native_sampler(
    lm: LanguageModel, *, stop_ids: set[int], teacher: LanguageModel | None = None, **settings: Any
) -> NativeSampler:
    return NativeSampler(lm, SamplerSettings(**settings), stop_ids=stop_ids, teacher=teacher)


def native_scorer(
    lm: LanguageModel,
    *,
    cache: Cache = "sampled",
    k: int = 32,
    vocabulary: int | None = None,
    context: Context | None = None,
    **settings: Any,
) -> NativeScorer:
    spec = LossSpec(cache=cache, k=k, formula="")
    return NativeScorer(lm, ScorerSettings(spec=spec, vocabulary=vocabulary or lm.vocab_size, **settings), context)


def scorer_settings(k: int = 0, vocabulary: int = MAX_TOKEN_ID) -> ScorerSettings:
    """Return settings of a scorer that returns the log-prob of the emitted token, or those of the k best."""
    spec = LossSpec(cache="teacher_topk" if k else "sampled", k=k, formula="")
    return ScorerSettings(spec=spec, vocabulary=vocabulary)


def http_scorer(
    endpoint: Endpoint, *, k: int = 0, vocabulary: int = MAX_TOKEN_ID, context: Context | None = None
) -> HttpScorer:
    return HttpScorer(endpoint, scorer_settings(k, vocabulary), context)


def vllm_sampler(settings: Settings, *, stop_ids: set[int], **plan: Any) -> VllmSampler:
    return VllmSampler(settings, SamplerSettings(slots=settings.slots, **plan), stop_ids=stop_ids)


def vllm_scorer(settings: Settings, *, k: int = 0, vocabulary: int) -> VllmScorer:
    return VllmScorer(settings, replace(scorer_settings(k, vocabulary), name="main"))


def native_learner(
    lm: LanguageModel,
    *,
    method: Method,
    config: LearnerConfig,
    updates: int,
    tokenizer: Any = None,
    teacher_heads: Mapping[str, TeacherHead] | None = None,
    ranks: Ranks | None = None,
    critic: LanguageModel | None = None,
    kind: type[NativeLearner] = NativeLearner,
    **settings: Any,
) -> NativeLearner:
    plan = LearnerSettings(method=method, settings=config, updates=updates, **settings)
    return kind(lm, plan, ranks, tokenizer=tokenizer, heads=teacher_heads, critic=critic)


def student_passes(
    lm: LanguageModel, config: LearnerConfig, ranks: Ranks, *, temperature: float, snapshots: int = 0
) -> Passes:
    method = Method(loss=ReverseKLMC(), temperature=temperature)
    student = Student(lm, config, ranks)
    plan = LearnerSettings(method=method, settings=config, updates=1, snapshots=snapshots)
    return Passes(student, Snapshots(lm.model, keep=snapshots), plan, ranks)
