"""One model on held-out prompts: what `eval` and the demo start from, with nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config.schema import DataConfig
from slipstream.engines.base import Sampling
from slipstream.engines.native.config import context_length, load_config, vocabulary_of
from slipstream.errors import DataError
from slipstream.plan.engines import GraderPlan, ModelPlan, SamplerPlan
from slipstream.records import Prompt
from slipstream.tasks import grading
from slipstream.tasks.chat import Tokenizer, check_ids, encode_rows
from slipstream.tasks.data import Prompts, Row
from slipstream.tasks.rewards import unfit

SLOTS = 64


@dataclass(frozen=True)
class Evaluation:
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    sampler: SamplerPlan
    sampling: Sampling
    grader: GraderPlan


def graded_rows(rows: Sequence[Row], rewards: Sequence[str]) -> Sequence[Row]:
    """Rows whose answers each of these rewards can compare with what a student says."""
    needed = grading.needs(rewards)
    for row in rows if rewards else ():
        for reward in rewards:
            if row.ground_truth is None:
                if "ground_truth" in needed[reward]:
                    raise DataError(
                        f"{row.place}: has no answer, which the reward {reward!r} needs: data.answer names a column"
                    )
            elif why := unfit(reward, row.ground_truth):
                raise DataError(f"{row.place}: the reward {reward!r} cannot compare the answer: {why}")
    return rows


def eval_prompts(rows: Sequence[Row], tokenizer: Tokenizer, data: DataConfig, *, seed: int) -> list[Prompt]:
    """Prompts in the order of the rows."""
    prompts = Prompts(rows, encode_rows(rows, tokenizer, data), seed=seed, shuffle=False)
    return [prompts.at(number) for number in range(len(rows))]


def evaluation(
    model: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, sampling: Sampling, reward: str
) -> Evaluation:
    """Whatever is illegal is refused here, before a weight is loaded."""
    check_ids(prompts, [prompt.tokens for prompt in prompts], model, vocabulary_of(model))
    longest, context = 0, context_length(load_config(model))
    for prompt in prompts:
        longest = max(longest, len(prompt.tokens) + sampling.max_tokens)
        if longest > context:
            raise DataError(f"{prompt.id}: prompt and --max-tokens exceed the context of {context} of {model}")
    student = ModelPlan(name=model, dtype="float32", device="auto", longest=longest)
    sampler = SamplerPlan(runs=student, slots=max(SLOTS, sampling.group))
    return Evaluation(tokenizer, prompts, sampler, sampling, GraderPlan(rewards=(reward,)))
