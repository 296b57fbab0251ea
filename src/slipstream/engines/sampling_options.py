"""Sampling options that follow from a config."""

from __future__ import annotations

from slipstream.config.schema import Config
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.protocols import Sampling


def rollout_sampling(config: Config) -> Sampling:
    sampler, asks = config.sampler, config.loss.asks if config.loss.weight else None
    draws = asks.draws if asks else 1
    if (fresh := config.freshness) is not None and not (asks and asks.cache == "sampled"):
        draws = fresh.draws
    return Sampling(
        max_tokens=sampler.max_tokens,
        group=sampler.group,
        draws=draws,
        best=asks.k if asks and asks.cache == "student_topk" else 0,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        greedy=config.policy is not None and "greedy_rewards" in ADVANTAGES[config.policy.advantage].evidence,
        keep_mask=sampler.keep_mask,
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(max_tokens=config.sampler.max_tokens, group=config.eval.n, temperature=config.eval.temperature)
