"""Experts that the native sampler records: row t has the choices of the pass that predicted token t."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from slipstream.engines.record_files import read_groups, write_groups
from slipstream.engines.weights import export_weights
from slipstream.protocols import Sampling
from slipstream.records import (
    Handle,
    Prompt,
    Rollout,
    after_prefix,
    lineage,
    parts_of,
    with_prefix,
    without_prefix,
)
from support.engines import native_sampler
from support.learners import run
from support.tiny_experts import CHOSEN, MIXTURES, choices_in, make_mixture, routers_in
from support.tiny_models import EOS, VOCAB, ByHand, make_prompts, wrap

ROUTED = Sampling(max_tokens=9, group=3, router=True)


def sampler_of(model: PreTrainedModel, slots: int = 8) -> ByHand:
    return ByHand(wrap(model), slots=slots, stop_ids={EOS}, router=True)


def expected(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """The sets of experts in a plain pass over all tokens before the last one."""
    ids = np.concatenate([rollout.prompt.tokens, rollout.tokens[:-1]])
    return np.sort(choices_in(model, ids).numpy(), -1)


def recorded(rollout: Rollout) -> np.ndarray:
    assert rollout.router is not None and rollout.prompt_router is not None
    assert len(rollout.router) == len(rollout.tokens) and len(rollout.prompt_router) == len(rollout.prompt.tokens) - 1
    return np.sort(np.concatenate([rollout.prompt_router, rollout.router]), -1)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_pass_is_recorded_at_prefill_and_in_decoding(name: str) -> None:
    model = make_mixture(name)

    async def work() -> list[list[Handle]]:
        sampler = sampler_of(model)
        jobs = [asyncio.create_task(sampler.generate(prompt, ROUTED)) for prompt in make_prompts(6, longest=9)]
        return await sampler.finish(*jobs)

    rollouts = [handle.body for group in run(work()) for handle in group]
    assert {rollout.router.dtype for rollout in rollouts} == {np.dtype(np.uint8)}
    for rollout in rollouts:
        np.testing.assert_array_equal(recorded(rollout), expected(model, rollout))


def test_a_publish_in_mid_response_splits_the_record_at_its_token() -> None:
    """Rows keep the choices of the weights that predicted their tokens, though the cache is computed again."""
    model, other = make_mixture("qwen3_moe"), make_mixture("qwen3_moe", seed=1)
    (prompt,) = make_prompts(1, longest=6)

    async def work() -> list[Handle]:
        sampler = sampler_of(model)
        job = asyncio.create_task(sampler.generate(prompt, replace(ROUTED, group=2)))
        await sampler.step(4)
        weights = export_weights(wrap(other).model, "float64", version=1)
        publish = asyncio.create_task(sampler.publish(weights, "keep"))
        (group,) = await sampler.finish(job)
        await publish
        return group

    for handle in run(work()):
        rollout, q = handle.body, len(prompt.tokens)
        row, changed = recorded(rollout), q - 1 + int((rollout.versions == 0).sum())
        np.testing.assert_array_equal(row[:changed], expected(model, rollout)[:changed])
        np.testing.assert_array_equal(row[changed:], expected(other, rollout)[changed:])
        assert changed < len(row)


def test_a_released_response_goes_on_with_its_record_in_another_sampler_and_from_a_file(tmp_path: object) -> None:
    model, (prompt, *_) = make_mixture("mixtral"), make_prompts(2)

    async def work() -> tuple[list[Handle], list[Handle]]:
        whole = sampler_of(model)
        (at_once,) = await whole.finish(asyncio.create_task(whole.generate(prompt, ROUTED)))
        first, second = sampler_of(model), sampler_of(model)
        job = asyncio.create_task(first.generate(prompt, ROUTED))
        await first.step(3)
        release = asyncio.create_task(first.release())
        (begun,) = await first.finish(job)
        await release
        write_groups(tmp_path, [begun])  # type: ignore[arg-type]
        (stored,) = read_groups(tmp_path)  # type: ignore[arg-type]
        (continued,) = await second.finish(asyncio.create_task(second.generate(prompt, ROUTED, stored)))
        return at_once, continued

    for one, other in zip(*run(work()), strict=True):
        np.testing.assert_array_equal(one.body.tokens, other.body.tokens)
        np.testing.assert_array_equal(recorded(one.body), recorded(other.body))


@pytest.mark.parametrize("park", [False, True])
def test_the_record_of_an_episode_has_its_observations(park: bool) -> None:
    """The call after an observation reads its tokens; a parked sequence keeps the choices of what it knows."""
    model, rng = make_mixture("qwen3_moe"), np.random.default_rng(3)
    (prompt,) = make_prompts(1, longest=5)
    turn = Sampling(max_tokens=4, router=True, park=park)

    async def work() -> list[Rollout | np.ndarray]:
        sampler, parts, tokens = sampler_of(model), list[Rollout | np.ndarray](), prompt.tokens
        for observed in (3, 1, 2):
            call = replace(prompt, tokens=tokens, offset=len(tokens) - len(prompt.tokens))
            (group,) = await sampler.finish(asyncio.create_task(sampler.generate(call, turn)))
            parts += [group[0].body, rng.integers(2, VOCAB, observed).astype(np.int32)]
            tokens = np.concatenate([tokens, parts[-2].tokens, parts[-1]])
        return parts

    *parts, last = run(work())
    episode = lineage(prompt, 0, parts, finish="turns")
    np.testing.assert_array_equal(recorded(episode), expected(model, episode))
    again = lineage(prompt, 0, parts_of(episode), finish="turns")
    np.testing.assert_array_equal(recorded(again), recorded(episode))
    ended = lineage(prompt, 0, [*parts, last], finish="turns")
    assert (ended.router[-len(last) :] == 255).all(), "no call has read the last observation"


def test_the_record_of_a_response_after_a_given_beginning_has_that_too() -> None:
    model, (prompt,) = make_mixture("mixtral"), make_prompts(1, longest=5)
    given = replace(prompt, prefix=np.array([5, 6, 7], np.int32))

    async def work() -> list[Handle]:
        sampler = sampler_of(model)
        (group,) = await sampler.finish(asyncio.create_task(sampler.generate(after_prefix(given), ROUTED)))
        return group

    for handle in run(work()):
        whole = with_prefix(given, handle)
        np.testing.assert_array_equal(recorded(whole.body), expected(model, whole.body))
        np.testing.assert_array_equal(recorded(without_prefix(whole).body), recorded(handle.body))


def test_a_request_without_router_records_nothing_and_a_sampler_without_routers_does_not_either() -> None:
    model, (prompt,) = make_mixture("mixtral"), make_prompts(1)

    async def work() -> tuple[list[Handle], list[Handle]]:
        routed, plain = sampler_of(model), ByHand(wrap(model), slots=4, stop_ids={EOS})
        (one,) = await routed.finish(asyncio.create_task(routed.generate(prompt, replace(ROUTED, router=False))))
        (other,) = await plain.finish(asyncio.create_task(plain.generate(prompt, ROUTED)))
        return one, other

    one, other = run(work())
    assert one[0].body.router is None and other[0].body.router is None


def test_wrong_shapes_are_no_record() -> None:
    model, (prompt,) = make_mixture("mixtral"), make_prompts(1)

    async def work() -> list[Handle]:
        sampler = native_sampler(wrap(model), slots=4, stop_ids={EOS}, router=True)
        group = await sampler.generate(prompt, ROUTED)
        sampler.close()
        return group

    rollout: Rollout = run(work())[0].body
    t, r = len(rollout.tokens), len(routers_in(model))
    assert rollout.router.shape == (t, r, CHOSEN)
    with pytest.raises(ValueError, match="router and prompt_router need each other"):
        replace(rollout, prompt_router=None)
    with pytest.raises(ValueError, match=rf"router has shape \({t - 1}, {r}, {CHOSEN}\), must be \[{t}, L, X\]"):
        replace(rollout, router=rollout.router[1:])
    longer = Prompt(id="p", number=0, tokens=np.arange(2, 30))
    with pytest.raises(ValueError, match=r"prompt_router has \d+ rows, must have 27"):
        replace(rollout, prompt=longer)
