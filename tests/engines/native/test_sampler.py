"""The native sampler against full forward passes of the same model."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Gemma2Config, PreTrainedModel

from slipstream.engines.draws import process
from slipstream.engines.native.sampling import decoding, kv
from slipstream.engines.native.sampling import sampler as sampler_file
from slipstream.engines.native.sampling.decoding import MIN_SHORTER, compacted, ranges
from slipstream.engines.native.sampling.requests import Row
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.errors import ModelError, NonFiniteError
from slipstream.estimators import products
from slipstream.protocols import Loaded, Mode, Sampling
from slipstream.records import Handle, Prompt, Rollout
from support.engines import native_sampler
from support.tiny_models import CONFIGS, EOS, SHAPE, VOCAB, ByHand, make_model, make_prompts, wrap

T = TypeVar("T")


def with_sampler(model: PreTrainedModel, work: Callable[[NativeSampler], Awaitable[T]], *, slots: int = 8) -> T:
    async def main() -> T:
        sampler = native_sampler(wrap(model), slots=slots, stop_ids={EOS})
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


@pytest.mark.parametrize("cuts", [(7,), (3, 11)])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_a_response_made_in_several_calls_is_the_same_response(name: str, cuts: tuple[int, ...]) -> None:
    """Every draw. Log-probs to the rounding: a later call reads at once what an earlier one wrote token by token."""
    model, (prompt,), length = make_model(name, dtype=torch.float64), make_prompts(1), 20
    sampling = Sampling(max_tokens=length, group=6, draws=4, top_p=0.9)
    whole = [r for r in generate(model, [prompt], [sampling]) if len(r.tokens) > cuts[-1]]
    assert len(whole) >= 2, "what ended before a cut was never continued"
    for rollout in whole:
        parts = list[Rollout]()
        for start, stop in pairwise([0, *cuts, length]):
            tokens = np.concatenate([prompt.tokens, rollout.tokens[:start]])
            asked = replace(prompt, tokens=tokens, offset=start, first=rollout.index)
            parts += generate(model, [asked], [replace(sampling, max_tokens=stop - start, group=1)])
        assert {part.index for part in parts} == {rollout.index}
        np.testing.assert_array_equal(np.concatenate([part.actions for part in parts]), rollout.actions)
        logp = np.concatenate([part.action_logp for part in parts])
        np.testing.assert_allclose(logp, rollout.action_logp, rtol=0, atol=1e-12)


def test_rows_of_every_length_are_exact_in_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs after prompts of 1 to 90 tokens come and go in 40 slots: blocks are cut, and holes filled from behind."""
    cut, moved = [], []
    monkeypatch.setattr(decoding, "ranges", lambda at: cut.append(ranges(at)) or cut[-1])
    compact = lambda *args: moved.append(compacted(*args)) or moved[-1]  # noqa: E731
    monkeypatch.setattr(sampler_file, "compacted", compact)
    model, prompts = make_model(dtype=torch.float64), make_prompts(70, longest=90)
    sampling = Sampling(max_tokens=30, group=2)
    for rollout in generate(model, prompts, [sampling] * 70, slots=40):
        expected = full_forward(model, rollout, sampling).gather(1, torch.from_numpy(rollout.actions).long())
        np.testing.assert_allclose(rollout.action_logp, expected.numpy(), rtol=0, atol=1e-11)
    assert max(map(len, cut)) > 1 and any(order != list(range(len(order))) for order in moved)


@pytest.mark.parametrize("seed", range(20))
def test_holes_are_filled_by_rows_from_behind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, rng.integers(1, 70)).tolist()
    ended = np.flatnonzero(rng.random(len(lengths)) < rng.choice([0.05, 0.5, 1.0])).tolist()
    order = compacted(ended, lengths)
    assert sorted(order) == sorted(set(range(len(lengths))) - set(ended))
    assert all(source >= target for target, source in enumerate(order))
    at = [lengths[slot] for slot in order]
    cuts = ranges(at)
    assert [slot for a, b in cuts for slot in range(a, b)] == list(range(len(at)))
    assert all(max(at[b:c]) <= max(at[a:b]) - MIN_SHORTER for (a, b), (_, c) in pairwise(cuts))


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


# --- publishing and aborting, at every token boundary ----------------------------------------------------------


def by_hand(
    model: PreTrainedModel,
    work: Callable[[ByHand], Awaitable[T]],
    *,
    slots: int = 8,
) -> T:
    async def main() -> T:
        sampler = ByHand(wrap(model), slots=slots, stop_ids={EOS})
        try:
            return await work(sampler)
        finally:
            sampler.close()

    return asyncio.run(main())


def begin(sampler: NativeSampler, prompt: Prompt, sampling: Sampling) -> asyncio.Task[list[Handle]]:
    return asyncio.create_task(sampler.generate(prompt, sampling))


def publishing(sampler: NativeSampler, model: PreTrainedModel, version: int, mode: Mode) -> asyncio.Task[Loaded]:
    return asyncio.create_task(sampler.publish(export_weights(model, "float64", version=version), mode))


STEPS, SAMPLING = 9, Sampling(max_tokens=7, draws=2)
ARRIVALS = ((0, 1), (0, 2), (2, 1), (3, 2))
"""(how many steps have been made, group) when each prompt arrives: rows stand at different positions."""


def exact_models(name: str, count: int) -> list[PreTrainedModel]:
    return [make_model(name, seed=seed, dtype=torch.float64) for seed in range(count)]


IDLE: dict[tuple[object, ...], ByHand] = {}
"""Samplers that have nothing to do: to prove itself costs a new one more than all that is asked of it here."""


def publish_at(
    models: Sequence[PreTrainedModel],
    boundaries: Sequence[int],
    mode: Mode,
    *,
    slots: int = 8,
    on_publish: Literal["rebuild", "reuse"] = "rebuild",
) -> tuple[list[Rollout], list[Loaded]]:
    """Requests arrive as planned; after so many steps, the next model's weights come in."""
    prompts = make_prompts(len(ARRIVALS))

    async def work() -> tuple[list[Rollout], list[Loaded]]:
        running, loaded = [], []
        await sampler.finish(publishing(sampler, models[0], 0, "keep"))
        for done in range(STEPS):
            for version, boundary in enumerate(boundaries, 1):
                if boundary == done:
                    loaded.append(publishing(sampler, models[version], version, mode))
                    await asyncio.sleep(0)
            for prompt, (arrival, group) in zip(prompts, ARRIVALS, strict=True):
                if arrival == done:
                    running.append(begin(sampler, prompt, replace(SAMPLING, group=group)))
            await sampler.step()
        groups = await sampler.finish(*running)
        return [handle.body for group in groups for handle in group], await asyncio.gather(*loaded)

    kind = type(models[0]), slots, on_publish
    sampler = IDLE.pop(kind, None) or ByHand(wrap(models[0]), slots=slots, stop_ids={EOS}, on_publish=on_publish)
    found = asyncio.run(work())
    IDLE[kind] = sampler
    return found


def assert_exact_in_every_segment(rollout: Rollout, models: Sequence[PreTrainedModel]) -> None:
    """All draws' log-probs equal a full forward under that segment's weights on that prefix."""
    for version in np.unique(rollout.versions):
        at = rollout.versions == version
        full = full_forward(models[version], rollout, SAMPLING)
        expected = full.gather(1, torch.from_numpy(rollout.actions).long()).numpy()
        np.testing.assert_allclose(rollout.action_logp[at], expected[at], rtol=0, atol=1e-11)
        np.testing.assert_array_equal(rollout.logp, rollout.action_logp[:, 0])


@pytest.mark.parametrize("apart", [None, 1, 3])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma3-window"])
def test_keep_mode_is_exact_at_every_token_boundary(name: str, apart: int | None) -> None:
    """New weights after step b for every b, and again `apart` steps later, with rows at different positions."""
    models = exact_models(name, 3)
    untouched, _ = publish_at(models, [], "keep")
    assert len({len(rollout.prompt.tokens) for rollout in untouched}) > 2
    assert max(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in untouched) > 12, "beyond the window"
    for boundary in range(STEPS):
        boundaries = [boundary] if apart is None else [boundary, boundary + apart]
        rollouts, loaded = publish_at(models, boundaries, "keep")
        assert len(loaded) == sum(boundary < STEPS for boundary in boundaries)
        for rollout, before in zip(rollouts, untouched, strict=True):
            arrival, _ = ARRIVALS[rollout.prompt.number]
            expected = [sum(b <= arrival + t for b in boundaries if b < STEPS) for t in range(len(rollout.tokens))]
            assert rollout.versions.tolist() == expected
            kept = expected.count(0)
            np.testing.assert_array_equal(rollout.actions[:kept], before.actions[:kept])
            np.testing.assert_array_equal(rollout.action_logp[:kept], before.action_logp[:kept])
            assert_exact_in_every_segment(rollout, models)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma3-window", "gemma2"])
def test_long_sequences_are_read_again_a_few_queries_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capped = partial(Gemma2Config, **SHAPE, attn_logit_softcapping=2.0, sliding_window=6)
    monkeypatch.setitem(CONFIGS, "gemma2", capped)
    models = exact_models(name, 2)
    expected, _ = publish_at(models, [4], "keep")
    masks = list[int]()
    whole = kv.additive_mask
    monkeypatch.setattr(kv, "MASKED_AT_ONCE", 64)
    monkeypatch.setattr(kv, "additive_mask", lambda *args: masks.append(args[1].shape[1]) or whole(*args))
    rollouts, _ = publish_at(models, [4], "keep")
    assert len(masks) > 8 and max(masks) < 9
    for rollout, before in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(rollout.actions, before.actions)
        np.testing.assert_allclose(rollout.action_logp, before.action_logp, rtol=0, atol=1e-11)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("name", ["qwen3", "gemma3-window"])
def test_packed_weights_are_those_that_the_record_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "MIN_WEIGHT_SIZE", 1)
    models = [make_model(name, seed=seed) for seed in range(2)]
    expected = [make_model(name, seed=seed) for seed in range(2)]
    prompts = make_prompts(4)

    async def work(sampler: NativeSampler) -> list[Rollout]:
        found = []
        for version in (0, 1, 0):
            await sampler.publish(export_weights(models[version], "float32", version=version), "keep")
            groups = await asyncio.gather(*[sampler.generate(prompt, SAMPLING) for prompt in prompts])
            found += [handle.body for group in groups for handle in group]
            assert sampler.lm.head.linear.packed is not None
            await sampler.offload()
            assert sampler.lm.head.linear.packed is None  # it would stay in the memory that others need
            await sampler.reload()
        return found

    for rollout in with_sampler(make_model(name, seed=2), work):
        (version,) = set(rollout.versions.tolist())
        full = full_forward(expected[version], rollout, SAMPLING).gather(1, torch.from_numpy(rollout.actions).long())
        np.testing.assert_allclose(rollout.action_logp, full.numpy(), atol=1e-4)


def test_a_rebuild_reads_the_prompt_of_a_group_once() -> None:
    models, (prompt, other) = exact_models("qwen3", 2), make_prompts(30, seed=5)[-2:]

    async def work(sampler: ByHand) -> tuple[list[int], list[Row]]:
        begin(sampler, prompt, replace(SAMPLING, group=4))
        begin(sampler, other, SAMPLING)
        await sampler.step(3)
        rows, read = list(sampler.rows), []
        hook = sampler.lm.backbone.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        publishing(sampler, models[1], 1, "keep")
        await asyncio.sleep(0)
        sampler._step()
        hook.remove()
        return read, rows

    read, rows = by_hand(models[0], work)
    group = [row for row in rows if row.request.prompt is prompt]
    assert len(group) > 1
    whole = sum(row.length - 1 for row in rows)
    assert read == [whole - (len(group) - 1) * len(prompt.tokens)]


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_reuse_goes_on_from_the_keys_that_the_old_weights_left(name: str) -> None:
    """The same tokens until then, versions exact, and log-probs of the new weights after what the old ones remember."""
    models = exact_models(name, 2)
    untouched, _ = publish_at(models, [], "keep")
    off = []
    for boundary in range(1, STEPS):
        rollouts, (loaded,) = publish_at(models, [boundary], "keep", on_publish="reuse")
        assert loaded.fingerprint == fingerprint(models[1], "float64")
        for rollout, before in zip(rollouts, untouched, strict=True):
            arrival, _ = ARRIVALS[rollout.prompt.number]
            assert rollout.versions.tolist() == [int(boundary <= arrival + t) for t in range(len(rollout.tokens))]
            kept = int((rollout.versions == 0).sum())
            np.testing.assert_array_equal(rollout.action_logp[:kept], before.action_logp[:kept])
            if kept in (0, len(rollout.tokens)):
                continue
            ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))[None]
            newest = len(rollout.prompt.tokens) + kept - 1  # drawn by the old weights, read by the new ones
            with torch.no_grad():
                past = DynamicCache(config=models[0].config)
                named = "cache" if "cache" in inspect.signature(models[0].forward).parameters else "past_key_values"
                models[0](ids[:, :newest], use_cache=True, **{named: past})
                logits = models[1](ids[:, newest:-1], **{named: past}).logits[0]
            actions = torch.from_numpy(rollout.actions[kept:]).long()
            drew = process(logits, SAMPLING).gather(1, actions).numpy()
            np.testing.assert_allclose(rollout.action_logp[kept:], drew, rtol=0, atol=1e-11)
            alone = full_forward(models[1], rollout, SAMPLING)[kept:].gather(1, actions).numpy()
            off.append(np.abs(rollout.action_logp[kept:] - alone).max())
    assert min(off) > 0.01, "approximate, by its name"


@pytest.mark.parametrize("boundary", range(STEPS))
def test_restart_gives_what_a_new_sampler_with_the_new_weights_gives(boundary: int) -> None:
    models = exact_models("qwen3", 2)
    old, _ = publish_at(models, [], "keep")
    IDLE.clear()
    fresh, _ = publish_at(models[1:], [], "keep")
    rollouts, (loaded,) = publish_at(models, [boundary], "restart")
    thrown = 0
    for arrival, group in enumerate_groups(old):
        tokens = [min(len(rollout.tokens), max(0, boundary - arrival)) for rollout in group]
        finished = all(boundary - arrival >= len(rollout.tokens) for rollout in group)
        thrown += 0 if finished else sum(tokens)
        for rollout in group:
            (again,) = [r for r in rollouts if (r.prompt.id, r.index) == (rollout.prompt.id, rollout.index)]
            (expected,) = [r for r in fresh if (r.prompt.id, r.index) == (rollout.prompt.id, rollout.index)]
            assert set(again.versions) == {0 if finished else 1}
            np.testing.assert_array_equal(again.actions, (rollout if finished else expected).actions)
            assert_exact_in_every_segment(again, models)
    assert loaded.thrown == thrown


def enumerate_groups(rollouts: Sequence[Rollout]) -> list[tuple[int, list[Rollout]]]:
    return [
        (arrival, [rollout for rollout in rollouts if rollout.prompt.number == number])
        for number, (arrival, _) in enumerate(ARRIVALS)
    ]


@pytest.mark.parametrize("boundary", range(STEPS))
def test_drain_finishes_what_runs_and_admits_nothing_before_the_new_weights(boundary: int) -> None:
    models = exact_models("qwen3", 2)
    old, _ = publish_at(models, [], "keep")
    rollouts, (loaded,) = publish_at(models, [boundary], "drain")
    assert loaded.thrown == 0
    for rollout in rollouts:
        arrival, _ = ARRIVALS[rollout.prompt.number]
        assert set(rollout.versions) == {int(arrival >= boundary)}, (
            "what arrives while it waits runs under the new ones"
        )
        assert_exact_in_every_segment(rollout, models)
        if arrival < boundary:
            (before,) = [r for r in old if (r.prompt.id, r.index) == (rollout.prompt.id, rollout.index)]
            np.testing.assert_array_equal(rollout.actions, before.actions)


def long_prompt(model: PreTrainedModel) -> Prompt:
    """One whose response does not end early."""
    rollouts = generate(model, make_prompts(12), [SAMPLING] * 12, slots=12)
    return next(rollout.prompt for rollout in rollouts if len(rollout.tokens) == SAMPLING.max_tokens)


def test_publishes_take_effect_in_their_order_behind_one_that_drains() -> None:
    models = exact_models("qwen3", 3)
    prompt = long_prompt(models[0])

    async def work(sampler: ByHand) -> None:
        running = begin(sampler, prompt, SAMPLING)
        await sampler.step()
        first, second = publishing(sampler, models[1], 1, "drain"), publishing(sampler, models[2], 2, "keep")
        await sampler.step()
        assert sampler.version == 0 and not first.done() and not second.done()
        (handle,), loaded, last = await sampler.finish(running, first, second)  # type: ignore[misc]
        assert set(handle.body.versions) == {0}
        assert [loaded.fingerprint, last.fingerprint] == [fingerprint(model, "float64") for model in models[1:]]
        assert sampler.version == 2

    by_hand(models[0], work)


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_a_publish_into_a_sampler_that_runs_by_itself(mode: Mode) -> None:
    """Wherever the boundary falls, every segment is exact and every call is answered."""
    models = exact_models("qwen3", 2)

    async def work(sampler: NativeSampler) -> tuple[Loaded, list[list[Handle]]]:
        running = [begin(sampler, prompt, SAMPLING) for prompt in make_prompts(12)]
        await running[0]
        loaded = await publishing(sampler, models[1], 1, mode)
        return loaded, await asyncio.gather(*running)

    loaded, groups = with_sampler(models[0], work, slots=3)
    assert loaded.fingerprint == fingerprint(models[1], "float64")
    assert loaded.wait > 0 and loaded.load > 0 and loaded.rebuild >= 0
    versions = set()
    for (handle,) in groups:
        assert_exact_in_every_segment(handle.body, models)
        versions |= set(handle.body.versions)
    assert versions == {0, 1}


@pytest.mark.parametrize("boundary", range(1, STEPS))
@pytest.mark.parametrize("number", range(len(ARRIVALS)))
def test_an_aborted_request_frees_its_slots_and_changes_no_other_token(number: int, boundary: int) -> None:
    """In the middle of its group, before it came in, or after its end. Then a group as large as the sampler fits."""
    (model,) = exact_models("qwen3", 1)
    untouched, _ = publish_at([model], [], "keep")
    prompts = make_prompts(len(ARRIVALS) + 1)

    async def work(sampler: ByHand) -> list[Rollout]:
        running = {}
        for done in range(boundary):
            for prompt, (arrival, group) in zip(prompts, ARRIVALS, strict=False):
                if arrival == done:
                    running[prompt.number] = begin(sampler, prompt, replace(SAMPLING, group=group))
            await sampler.step()
        aborted = running.pop(number, None)
        if aborted is not None and not aborted.done():
            aborted.cancel()
            await sampler.step()
            assert all(row.request.prompt.number != number for row in sampler.rows)
            with pytest.raises(asyncio.CancelledError):
                await aborted
        last = begin(sampler, prompts[-1], replace(SAMPLING, group=6))
        groups = await sampler.finish(*running.values(), last)
        assert len(groups.pop()) == 6 and not sampler.rows and not sampler.open
        return [handle.body for group in groups for handle in group]

    for rollout in by_hand(model, work, slots=6):
        (before,) = [r for r in untouched if (r.prompt.id, r.index) == (rollout.prompt.id, rollout.index)]
        np.testing.assert_array_equal(rollout.actions, before.actions)
        np.testing.assert_allclose(rollout.action_logp, before.action_logp, rtol=0, atol=1e-11)


def test_a_request_aborted_while_it_waits_never_runs() -> None:
    (model,) = exact_models("qwen3", 1)
    first, second, third = make_prompts(3)

    async def work(sampler: ByHand) -> None:
        running = begin(sampler, first, SAMPLING)
        await sampler.step()
        waiting, behind = begin(sampler, second, SAMPLING), begin(sampler, third, SAMPLING)
        await sampler.step()
        waiting.cancel()
        seen = set()
        while not behind.done():
            await sampler.step()
            seen |= {row.request.prompt.id for row in sampler.rows}
        assert second.id not in seen and third.id in seen and waiting.cancelled()
        await running

    by_hand(model, work, slots=1)


def test_a_drain_waits_for_running_requests_or_for_their_abortion() -> None:
    models = exact_models("qwen3", 2)
    prompt = long_prompt(models[0])

    async def work(sampler: ByHand) -> None:
        running = begin(sampler, prompt, replace(SAMPLING, group=2))
        await sampler.step(2)
        draining = publishing(sampler, models[1], 1, "drain")
        waiting = begin(sampler, make_prompts(1)[0], SAMPLING)
        await sampler.step(2)
        assert len(sampler.rows) == 2 and not draining.done() and not waiting.done(), "room, but not yet"
        running.cancel()
        await sampler.step()
        assert draining.done() and [row.request.prompt.id for row in sampler.rows] == ["p0"]
        ((handle,),) = await sampler.finish(waiting)
        assert set(handle.body.versions) == {1}

    by_hand(models[0], work)


def test_a_publish_whose_caller_is_gone_holds_nothing_up() -> None:
    models = exact_models("qwen3", 2)
    prompt = long_prompt(models[0])

    async def work(sampler: ByHand) -> None:
        running = begin(sampler, prompt, SAMPLING)
        await sampler.step()
        draining = publishing(sampler, models[1], 1, "drain")
        await sampler.step()
        draining.cancel()
        ((handle,),) = await sampler.finish(running)
        assert set(handle.body.versions) == {0} and sampler.version == 0

    by_hand(models[0], work)


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_a_sampler_that_runs_by_itself_answers_after_everything_was_aborted(mode: Mode) -> None:
    models, sampling = exact_models("qwen3", 2), Sampling(max_tokens=100, group=2)

    async def work(sampler: NativeSampler) -> list[Handle]:
        running = [begin(sampler, prompt, sampling) for prompt in make_prompts(6)]
        await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=1))  # first in the queue: tasks begin later
        loading = publishing(sampler, models[1], 1, mode)
        await asyncio.sleep(0)
        for task in running:
            task.cancel()
        assert (await loading).fingerprint == fingerprint(models[1], "float64")
        return await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=3, group=5))

    group = with_sampler(models[0], work, slots=5)
    assert [set(handle.body.versions) for handle in group] == [{1}] * 5


# --- failures ----------------------------------------------------------------------------------------------------


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
            await asyncio.wait_for(sampler.publish(export_weights(make_model("llama"), "float32"), "keep"), 20)
        assert len(await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=3))) == 1

    with_sampler(make_model(), work)


def test_a_student_that_has_diverged_is_told_as_such() -> None:
    async def work(sampler: NativeSampler) -> None:
        with torch.no_grad():
            sampler.lm.head.weight.fill_(torch.nan)
        with pytest.raises(NonFiniteError, match="has training diverged"):
            await asyncio.wait_for(sampler.generate(make_prompts(1)[0], Sampling(max_tokens=3)), 20)

    with_sampler(make_model(), work)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_response_ends_at_the_first_of_several_stops_even_at_its_limit() -> None:
    stops, prompts = {EOS, 7, 9}, make_prompts(40)

    async def work() -> list[Rollout]:
        sampler = native_sampler(wrap(make_model()), slots=16, stop_ids=stops)
        groups = await asyncio.gather(*[sampler.generate(prompt, Sampling(max_tokens=6)) for prompt in prompts])
        sampler.close()
        return [handle.body for group in groups for handle in group]

    rollouts = asyncio.run(work())
    for rollout in rollouts:
        *before, last = rollout.tokens.tolist()
        assert not stops & set(before)
        assert (rollout.finish == "eos") == (last in stops)
        assert rollout.finish == "eos" or len(rollout.tokens) == 6
    assert {last for rollout in rollouts if (last := int(rollout.tokens[-1])) in stops} == stops
    assert any(rollout.finish == "eos" and len(rollout.tokens) == 6 for rollout in rollouts)
