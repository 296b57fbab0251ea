"""The native sampler against full forward passes of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipstream.engines.base import Sampling
from slipstream.engines.draws import process
from slipstream.engines.native.model import export_weights, fingerprint
from slipstream.engines.native.sampler import NativeSampler
from slipstream.errors import ModelError, NonFiniteError
from slipstream.records import Handle, Prompt, Rollout
from tiny import CONFIGS, EOS, VOCAB, make_model, make_prompts, wrap

T = TypeVar("T")


def with_sampler(model: PreTrainedModel, work: Callable[[NativeSampler], Awaitable[T]], *, slots: int = 8) -> T:
    async def main() -> T:
        sampler = NativeSampler(wrap(model), slots=slots, stop_ids={EOS})
        try:
            return await work(sampler)
        finally:
            sampler.close()

    return asyncio.run(main())


def generate(
    model: PreTrainedModel, prompts: Sequence[Prompt], samplings: Sequence[Sampling], *, slots: int = 8
) -> list[Rollout]:
    async def work(sampler: NativeSampler) -> list[list[Handle]]:
        return await asyncio.gather(*[sampler.generate(p, s) for p, s in zip(prompts, samplings, strict=True)])

    return [handle.body for group in with_sampler(model, work, slots=slots) for handle in group]


@torch.no_grad()
def full_forward(model: PreTrainedModel, rollout: Rollout, sampling: Sampling) -> torch.Tensor:
    """Processed log-probs [T, V] at every response position."""
    ids = np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64)
    logits = model(torch.from_numpy(ids)[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    return process(logits, sampling)


@pytest.mark.parametrize("name", CONFIGS)
def test_logp_equals_a_full_forward_of_every_architecture(name: str) -> None:
    """Ragged prompts, groups, several draws and truncations together in fewer slots than rows."""
    model, prompts = make_model(name), make_prompts(9)
    samplings = [
        Sampling(max_tokens=5 + 3 * i, group=1 + i % 3, draws=1 + i % 4, top_p=0.9 if i % 2 else 1.0) for i in range(9)
    ]
    rollouts = generate(model, prompts, samplings, slots=5)
    assert len(rollouts) == sum(s.group for s in samplings)
    for rollout in rollouts:
        sampling = samplings[rollout.prompt.number]
        expected = full_forward(model, rollout, sampling).gather(1, torch.from_numpy(rollout.actions).long())
        np.testing.assert_allclose(rollout.action_logp, expected.numpy(), atol=1e-5)
        assert rollout.actions.shape[1] == sampling.draws
        assert len(rollout.tokens) == sampling.max_tokens or rollout.tokens[-1] == EOS


def test_tokens_do_not_depend_on_neighbours_slots_or_draws() -> None:
    model, prompts = make_model(), make_prompts(12)
    crowd = generate(model, prompts, [Sampling(max_tokens=20, group=2)] * 12, slots=8)
    for rollout in crowd[::5]:
        alone = generate(model, [rollout.prompt], [Sampling(max_tokens=20, group=2, draws=6)], slots=2)[rollout.index]
        assert alone.tokens.tolist() == rollout.tokens.tolist()


def test_members_of_a_group_differ_and_keep_their_order() -> None:
    group = generate(make_model(), make_prompts(1), [Sampling(max_tokens=20, group=8)])
    assert [rollout.index for rollout in group] == list(range(8))
    assert len({tuple(rollout.tokens) for rollout in group}) == 8


def test_finish_says_why_a_response_ended() -> None:
    rollouts = generate(make_model(), make_prompts(8), [Sampling(max_tokens=6)] * 8)
    assert {rollout.finish for rollout in rollouts} == {"eos", "length"}
    for rollout in rollouts:
        assert (rollout.finish == "eos") == (rollout.tokens[-1] == EOS)
        assert EOS not in rollout.tokens[:-1]


def test_first_token_has_the_probabilities_of_the_model() -> None:
    """4,000 responses of one token to one prompt, against the exact distribution."""
    model, prompt = make_model(), make_prompts(1)[0]
    sampling = Sampling(max_tokens=1, group=400, draws=10)
    rollouts = generate(model, [prompt], [sampling], slots=400)
    p = full_forward(model, rollouts[0], sampling).exp()[0].double().numpy()
    counts = np.bincount(np.concatenate([r.actions[0] for r in rollouts]), minlength=VOCAB)
    common = p * 4000 >= 5
    chi2 = ((counts - 4000 * p) ** 2 / (4000 * p))[common].sum()
    assert chi2 < common.sum() + 4 * np.sqrt(2 * common.sum())


def test_greedy_follows_the_most_likely_token() -> None:
    model = make_model()
    for rollout in generate(model, make_prompts(4), [Sampling(max_tokens=10, temperature=0)] * 4):
        best = full_forward(model, rollout, Sampling(max_tokens=1)).argmax(-1)
        assert rollout.tokens.tolist() == best.tolist()
        assert (rollout.logp == 0).all()


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_publish_changes_weights_exactly_where_the_version_changes(mode: str) -> None:
    """Each segment's log-probs equal a full forward under that segment's weights on that prefix."""
    models = [make_model(seed=seed) for seed in range(3)]
    prompts, sampling = make_prompts(6), Sampling(max_tokens=40, draws=3)

    async def work(sampler: NativeSampler) -> list[Rollout]:
        running = [asyncio.create_task(sampler.generate(prompt, sampling)) for prompt in prompts]
        for version in (1, 2):
            while sum(row.length for row in sampler.rows) < version * 30 and not all(t.done() for t in running):
                await asyncio.sleep(0.001)
            weights = export_weights(models[version], "float32")
            found = await sampler.publish(weights, version, mode)  # type: ignore[arg-type]
            assert found == fingerprint(models[version], "float32")
        return [handle.body for group in await asyncio.gather(*running) for handle in group]

    rollouts = with_sampler(models[0], work, slots=4)
    for rollout in rollouts:
        assert (np.diff(rollout.versions) >= 0).all()
        for version in np.unique(rollout.versions):
            at = rollout.versions == version
            expected = full_forward(models[version], rollout, sampling).gather(
                1, torch.from_numpy(rollout.actions).long()
            )
            np.testing.assert_allclose(rollout.action_logp[at], expected.numpy()[at], atol=1e-5)
    if mode != "keep":
        assert all(len(np.unique(rollout.versions)) == 1 for rollout in rollouts)


def test_keep_mode_at_every_token_boundary() -> None:
    """New weights after token t, for every t: tokens before keep version and log-prob, later ones are exact."""
    old, new = make_model(seed=0), make_model(seed=1)
    sampling = Sampling(max_tokens=9)
    before = next(r for r in generate(old, make_prompts(8), [sampling] * 8) if len(r.tokens) == 9)
    prompt = before.prompt

    for boundary in range(1, 9):

        async def work(sampler: NativeSampler, boundary: int = boundary) -> Rollout:
            """Step the engine by hand, as its own thread would, so that the boundary is exact."""
            running = asyncio.create_task(sampler.generate(prompt, sampling))
            sampler._wake = lambda: None  # type: ignore[method-assign]
            await asyncio.sleep(0)
            with torch.inference_mode():
                sampler._emit(*sampler._admit())
                for _ in range(boundary - 1):
                    sampler._decode()
            publish = asyncio.create_task(sampler.publish(export_weights(new, "float32"), 1, "keep"))
            await asyncio.sleep(0)
            del sampler._wake
            sampler._wake()
            await publish
            (handle,) = await running
            return handle.body

        rollout = with_sampler(old, work)
        assert rollout.versions.tolist() == [0] * boundary + [1] * (len(rollout.tokens) - boundary)
        np.testing.assert_array_equal(rollout.tokens[:boundary], before.tokens[:boundary])
        np.testing.assert_allclose(rollout.logp[:boundary], before.logp[:boundary], atol=1e-5)
        expected = full_forward(new, rollout, sampling).gather(1, torch.from_numpy(rollout.actions).long()).numpy()
        np.testing.assert_allclose(rollout.action_logp[boundary:], expected[boundary:], atol=1e-5)


def test_a_failure_in_the_engine_reaches_everyone_who_waits() -> None:
    class Broken(Exception):
        pass

    async def work(sampler: NativeSampler) -> list[object]:
        def fail(*_: object) -> None:
            raise Broken

        handle = sampler.lm.backbone.register_forward_pre_hook(fail)
        prompts = make_prompts(4)
        failed = await asyncio.gather(
            *[sampler.generate(p, Sampling(max_tokens=5)) for p in prompts], return_exceptions=True
        )
        handle.remove()
        assert len(await sampler.generate(prompts[0], Sampling(max_tokens=5))) == 1, "the engine is usable again"
        return list(failed)

    assert [type(error) for error in with_sampler(make_model(), work, slots=2)] == [Broken] * 4


def test_a_prompt_that_cannot_fit_is_refused_by_name() -> None:
    async def work(sampler: NativeSampler) -> None:
        with pytest.raises(ModelError, match="prompt p0 has .* exceeds the context of 128"):
            await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=128))

    with_sampler(make_model(), work)


def test_a_publish_that_cannot_be_loaded_is_answered_with_its_error() -> None:
    async def work(sampler: NativeSampler) -> None:
        with pytest.raises(ModelError, match="weights do not fit the model"):
            await asyncio.wait_for(sampler.publish(export_weights(make_model("llama"), "float32"), 1, "keep"), 20)
        assert len(await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=3))) == 1

    with_sampler(make_model(), work)


def test_a_student_that_has_diverged_is_told_as_such() -> None:
    async def work(sampler: NativeSampler) -> None:
        with torch.no_grad():
            sampler.lm.head.weight.fill_(torch.nan)
        with pytest.raises(NonFiniteError, match="has training diverged"):
            await asyncio.wait_for(sampler.generate(make_prompts(1)[0], Sampling(max_tokens=3)), 20)

    with_sampler(make_model(), work)
