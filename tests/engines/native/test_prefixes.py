"""Responses that begin with given tokens: the student draws the rest exactly as if it had drawn the beginning, too."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from slipstream.data.tokenizers import load_tokenizer
from slipstream.protocols import GradingSampler, Sampling
from slipstream.records import (
    Group,
    Handle,
    Prompt,
    Rollout,
    after_prefix,
    header_of,
    one_turn,
    unfinished,
    with_prefix,
    without_prefix,
)
from slipstream.rewards.grading import PoolGrader
from support.engines import native_sampler
from support.tiny_models import EOS, make_model, make_prompts, wrap

T = TypeVar("T")
SAMPLING = Sampling(max_tokens=24, group=2, draws=3)


class NoGrader:
    async def grade(self, group: Group) -> list[Handle]:
        return list(group)


def with_graded(work: Callable[[GradingSampler], Awaitable[T]]) -> T:
    async def main() -> T:
        sampler = native_sampler(wrap(make_model()), slots=4, stop_ids={EOS})
        try:
            return await work(GradingSampler(sampler, NoGrader()))
        finally:
            sampler.close()

    return asyncio.run(main())


def longest(group: Group) -> Rollout:
    return max((handle.body for handle in group), key=lambda rollout: len(rollout.tokens))


@pytest.mark.parametrize("released", [False, True])
def test_the_rest_of_a_response_is_what_the_student_would_have_drawn(released: bool) -> None:
    """Random numbers belong to a seed and a position. So a response whose first k tokens are given ends as before."""
    prompt = make_prompts(3)[2]

    async def work(graded: GradingSampler) -> tuple[Rollout, Rollout]:
        whole = longest(await graded.generate(prompt, SAMPLING))
        given = replace(prompt, prefix=whole.tokens[: len(whole.tokens) // 2])
        call = asyncio.create_task(graded.generate(given, SAMPLING))
        if released:
            await graded.release([prompt.number])
        group = await call
        assert unfinished(group) == released
        while unfinished(group):
            group = await graded.generate(given, SAMPLING, group)
        return whole, next(handle.body for handle in group if handle.body.index == whole.index)

    whole, rest = with_graded(work)
    k = len(whole.tokens) // 2
    assert 0 < k < len(whole.tokens)
    np.testing.assert_array_equal(rest.tokens, whole.tokens)
    np.testing.assert_array_equal(rest.loss_mask, np.arange(len(whole.tokens)) >= k)
    np.testing.assert_array_equal(rest.actions, whole.actions[k:])
    np.testing.assert_allclose(rest.action_logp, whole.action_logp[k:], atol=1e-5)
    assert (rest.versions[:k] == -1).all() and (rest.versions[k:] == 0).all()
    assert rest.finish == whole.finish and len(rest.prompt.tokens) == len(prompt.tokens)


def test_a_header_counts_the_prefix_and_trains_the_rest() -> None:
    prompt = replace(make_prompts(1)[0], prefix=np.array([5, 6, 7], np.int32))
    group = with_graded(lambda graded: graded.generate(prompt, replace(SAMPLING, max_tokens=8)))
    for handle in group:
        header = handle.header
        assert header.prefix == 3 and header.tokens <= 8 and header.trained_tokens == header.tokens - 3
        assert header.source == "" and header.oldest == 0
        again = with_prefix(prompt, without_prefix(handle))
        assert again.header == header
        np.testing.assert_array_equal(again.body.actions, handle.body.actions)
        continued: Prompt = without_prefix(handle).body.prompt
        np.testing.assert_array_equal(continued.tokens, after_prefix(prompt).tokens)
        assert continued.offset == 3


def test_rewards_see_the_whole_response() -> None:
    tokenizer = load_tokenizer("builtin:student")
    question, answer = (
        np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in ("C3D8E5=", "C33D81E56")
    )
    prompt = Prompt(id="r", number=0, tokens=question, ground_truth="C33D81E56", prefix=answer[:4])
    rest = np.array([*answer[4:], tokenizer.eos_token_id], np.int32)
    logp, versions = np.full((len(rest), 1), -0.1, np.float32), np.zeros(len(rest), np.int32)
    part = one_turn(after_prefix(prompt), 0, actions=rest[:, None], action_logp=logp, versions=versions, finish="eos")
    whole = with_prefix(prompt, Handle(header_of(part), part))
    grader = PoolGrader(("exact",), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    try:
        (graded,) = asyncio.run(grader.grade([whole]))
    finally:
        grader.close()
    assert graded.header.rewards == {"exact": 1.0}
