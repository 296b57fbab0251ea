"""Sampling options that follow from a config."""

from dataclasses import replace

from slipstream.config.schema import Config
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.policy import CENTRE_SIZES
from slipstream.protocols import Sampling


def rollout_sampling(config: Config) -> Sampling:
    sampler, spec = config.sampler, config.loss.spec if config.loss.weight else None
    draws = spec.draws if spec else 1
    best = spec.k if spec and spec.cache == "student_topk" else 0
    if not (spec and spec.cache == "sampled"):
        draws = max(config.freshness.draws if config.freshness is not None else 1, centre_size(config, "draws"))
    best = best or centre_size(config, "top_k") or centre_size(config, "support")
    return Sampling(
        max_tokens=sampler.max_tokens,
        group=sampler.group,
        draws=draws,
        best=best,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        greedy=config.policy is not None and "greedy_rewards" in ADVANTAGES[config.policy.advantage].columns,
        keep_mask=sampler.keep_mask,
        teacher_replaces=sampler.teacher_replaces,
        router=config.learner.records_router,
    )


def centre_size(config: Config, kind: str) -> int:
    """Return the number of draws or of most likely tokens that score centering needs; 0 if it does not use them."""
    policy = config.policy
    if policy is None or policy.centre != kind:
        return 0
    return config.sampler.top_k if kind == "support" else policy.centre_size or CENTRE_SIZES[kind]


def eval_sampling(config: Config, name: str) -> Sampling:
    """Return how the student, without its teacher, answers the prompts of a held-out set.

    A run with rewards measures accuracy at eval.temperature. A run without rewards measures the KL to the teacher, of
    answers that are sampled as rollouts are.
    """
    n, temperature = config.eval.of(name, "n"), config.eval.temperature
    if not config.task.reward:
        return replace(rollout_sampling(config), group=n, teacher_replaces=0, fusion=0.0)
    return Sampling(max_tokens=config.sampler.max_tokens, group=n, temperature=temperature)
