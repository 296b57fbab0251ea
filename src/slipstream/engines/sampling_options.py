"""Sampling options that follow from a config."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.schema import Config
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.protocols import Sampling


def rollout_sampling(config: Config) -> Sampling:
    sampler, spec = config.sampler, config.loss.spec if config.loss.weight else None
    draws = spec.draws if spec else 1
    if (fresh := config.freshness) is not None and not (spec and spec.cache == "sampled"):
        draws = fresh.draws
    return Sampling(
        max_tokens=sampler.max_tokens,
        group=sampler.group,
        draws=draws,
        best=spec.k if spec and spec.cache == "student_topk" else 0,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        greedy=config.policy is not None and "greedy_rewards" in ADVANTAGES[config.policy.advantage].evidence,
        keep_mask=sampler.keep_mask,
        interleave=sampler.interleave,
        router=config.learner.records_router,
    )


def eval_sampling(config: Config, name: str) -> Sampling:
    """Return the sampling of a held-out set: without rewards that of training, whose KL to the teacher is measured."""
    n, temperature = config.eval.of(name, "n"), config.eval.temperature
    if not config.task.reward:
        return replace(rollout_sampling(config), group=n)
    return Sampling(max_tokens=config.sampler.max_tokens, group=n, temperature=temperature)
