"""What a config asks of samplers and scorers."""

from __future__ import annotations

from typing import Literal

from slipstream.config.objective import JSD, ForwardKL, ReverseKL, ReverseKLMC
from slipstream.config.schema import Config
from slipstream.engines.base import Sampling

Cache = Literal["sampled", "teacher_topk", "hidden"]
"""What a teacher's answer holds."""


def rollout_sampling(config: Config) -> Sampling:
    sampler = config.sampler
    return Sampling(
        max_tokens=sampler.max_tokens,
        group=sampler.group,
        draws=config.loss.m if config.loss.kind == "reverse_kl_mc" and config.loss.weight else 1,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        keep_mask=sampler.keep_mask,
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(max_tokens=config.sampler.max_tokens, group=config.eval.n, temperature=config.eval.temperature)


def cache_of(config: Config) -> tuple[Cache, int]:
    match config.loss:
        case ReverseKLMC():
            return "sampled", 0
        case ReverseKL():
            return "hidden", 0
        case ForwardKL(cache=cache, k=k) | JSD(cache=cache, k=k):
            return cache, k
