"""Rollouts that are handed over at a token boundary go on elsewhere as if nothing had happened."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipstream.engines.weights import export_weights
from slipstream.protocols import GradingSampler, Sampler, Sampling
from slipstream.records import Group, Handle, Prompt, Rollout, continued, unfinished
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepSampler
from support import tabular_engines as toy
from support.tiny_models import EOS, ByHand, make_model, make_prompts, wrap

FULL = Sampling(max_tokens=12, group=3, draws=4, best=5)
KINDS = [FULL, replace(FULL, best=0, top_p=0.8, keep_mask=True), replace(FULL, temperature=0.0, group=1, draws=1)]
ARRAYS = ("tokens", "versions", "actions", "best_ids", "turn", "loss_mask")


def assert_same(found: Group, expected: Group, *, atol: float = 1e-12) -> None:
    """The same draws of the same members, by the same versions, with the same log-probs."""
    assert [handle.header for handle in found] == [handle.header for handle in expected]
    for one, other in ((a.body, b.body) for a, b in zip(found, expected, strict=True)):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        for name in ("logp", "action_logp", "best_logp"):
            if getattr(other, name) is not None:
                np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=0, atol=atol)
                assert getattr(one, name).dtype == getattr(other, name).dtype
        assert (one.kept is None) == (other.kept is None)
        if other.kept is not None:
            np.testing.assert_array_equal(one.kept.ids, other.kept.ids)
            np.testing.assert_array_equal(one.kept.sizes, other.kept.sizes)


# --- the native sampler -------------------------------------------------------------------------------------------


def by_hand(model: PreTrainedModel, *, slots: int = 8) -> ByHand:
    return ByHand(wrap(model), slots=slots, stop_ids={EOS})


def asked(sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Group] = ()) -> Any:
    each = begun or [()] * len(prompts)
    return [asyncio.create_task(sampler.generate(p, sampling, b)) for p, b in zip(prompts, each, strict=True)]


async def handed(sampler: ByHand, calls: Sequence[asyncio.Task[list[Handle]]], *numbers: int) -> list[list[Handle]]:
    release = asyncio.create_task(sampler.release(numbers))
    await asyncio.sleep(0)
    while not release.done():
        await sampler.step()
    return [call.result() for call in calls]


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("sampling", KINDS, ids=["best", "kept", "greedy"])
def test_what_goes_on_in_another_sampler_is_what_would_have_been(name: str, sampling: Sampling) -> None:
    """Handed over after every number of tokens, among neighbours that stay, and once more after two."""
    model, prompts = make_model(name, dtype=torch.float64), make_prompts(4)
    cut = 0

    async def main() -> None:
        nonlocal cut
        first, second, third = (by_hand(model, slots=16) for _ in range(3))
        whole = await first.finish(*asked(first, prompts, sampling))
        for tokens in range(13):
            staying, going = asked(first, prompts[:1], sampling), asked(first, prompts[1:], sampling)
            await first.step(tokens)
            groups = [call.result() for call in going if call.done()]
            calls = [call for call in going if not call.done()]
            handed_over = await handed(first, calls, *(p.number for p in prompts[1:]))
            for group in handed_over:
                assert unfinished(group)
                assert {handle.header.finish for handle in group} <= {"released"}
                lengths = [len(h.body.tokens) for h in group if h.body.finish == "released"]
                assert lengths == [tokens] * len(lengths)
                cut += len(lengths)
            left = [p for p, call in zip(prompts[1:], going, strict=True) if call in calls]
            again = asked(second, left, sampling, handed_over)
            await second.step(2)
            ended = [call for call in again if call.done()]
            more = [call for call in again if not call.done()]
            rest = await handed(second, more)
            assert not second.rows and not second.waiting
            last = await third.finish(
                *asked(third, [p for p, call in zip(left, again, strict=True) if call in more], sampling, rest)
            )
            found = groups + [call.result() for call in ended] + last
            for group in found:
                assert_same(group, whole[group[0].header.number])
            assert {group[0].header.number for group in found} == {p.number for p in prompts[1:]}
            (neighbour,) = await first.finish(*staying)
            assert_same(neighbour, whole[0])

    asyncio.run(main())
    assert cut > 20


def test_versions_are_right_across_a_change_of_weights_and_of_samplers() -> None:
    """Half by version 1 in one sampler, half by version 2 in another, is what one that had both would have drawn."""
    models, prompts = [make_model(seed=seed, dtype=torch.float64) for seed in range(2)], make_prompts(3)
    weights = [export_weights(model, "float64", version=version) for version, model in enumerate(models, 1)]
    sampling = replace(FULL, group=2)

    async def main() -> None:
        one, other, both = (by_hand(models[0]) for _ in range(3))
        for sampler, version in ((one, 0), (both, 0), (other, 1)):
            await sampler.finish(asyncio.create_task(sampler.publish(weights[version], "keep")))
        expected = asked(both, prompts, sampling)
        calls = asked(one, prompts, sampling)
        await asyncio.gather(both.step(4), one.step(4))
        publishing = asyncio.create_task(both.publish(weights[1], "keep"))
        whole = await both.finish(*expected)
        await publishing
        running = [call for call in calls if not call.done()]
        groups = iter(await handed(one, running))
        begun = [next(groups) if call in running else call.result() for call in calls]
        found = await other.finish(*asked(other, prompts, sampling, begun))
        for group, expected_group in zip(found, whole, strict=True):
            assert_same(group, expected_group)
        assert {handle.header.versions for group in found for handle in group} >= {((1, 4), (2, 8))}

    asyncio.run(main())


def test_what_waits_is_handed_over_too_and_room_is_free() -> None:
    model, prompts, sampling = make_model(), make_prompts(3), replace(FULL, group=8)

    async def main() -> None:
        sampler = by_hand(model)
        first, second = asked(sampler, prompts[:2], sampling)
        await sampler.step(2)
        begun, nothing = await handed(sampler, [first, second])
        assert len(begun) == 8 and nothing == []
        assert not sampler.rows and not sampler.waiting and not sampler.open
        waiting = asked(sampler, prompts[2:], sampling)
        await sampler.step()
        again = asked(sampler, prompts[:1], sampling, [begun])
        await sampler.step()
        assert not again[0].done()
        (still,) = await handed(sampler, again, prompts[0].number)
        assert_same(still, begun)
        await sampler.finish(*waiting, *asked(sampler, prompts[:1], sampling, [still]))
        await sampler.release()

    asyncio.run(main())


def test_a_restart_begins_again_with_what_was_handed_over_as_well() -> None:
    models, (prompt,), sampling = [make_model(seed=s, dtype=torch.float64) for s in range(2)], make_prompts(1), FULL

    async def main() -> None:
        one, other, fresh = by_hand(models[0]), by_hand(models[0]), by_hand(models[1])
        calls = asked(one, [prompt], sampling)
        await one.step(3)
        begun = await handed(one, calls)
        (call,) = asked(other, [prompt], sampling, begun)
        await other.step(2)
        publishing = asyncio.create_task(other.publish(export_weights(models[1], "float64", version=0), "restart"))
        found, expected = await other.finish(call), await fresh.finish(*asked(fresh, [prompt], sampling))
        assert (await publishing).thrown == sum(min(len(h.body.tokens), 5) for h in (await whole(models[0], prompt)))
        assert_same(found[0], expected[0])

    async def whole(model: PreTrainedModel, prompt: Prompt) -> list[Handle]:
        sampler = by_hand(model)
        (group,) = await sampler.finish(*asked(sampler, [prompt], sampling))
        return group

    asyncio.run(main())


def test_a_complete_group_is_answered_as_it_is() -> None:
    model, prompts = make_model(), make_prompts(1)

    async def main() -> None:
        sampler = by_hand(model)
        (group,) = await sampler.finish(*asked(sampler, prompts, FULL))
        (again,) = await asyncio.gather(*asked(sampler, prompts, FULL, [group]))
        assert [h.body for h in again] == [h.body for h in group] and not unfinished(again)

    asyncio.run(main())


# --- toys ---------------------------------------------------------------------------------------------------------


VOCAB = 6
TABLE = toy.random_table(VOCAB, seed=0)
PROMPTS = [Prompt(id=str(i), number=i, tokens=np.array([1 + i], np.int32), seed=i) for i in range(5)]
TOY = Sampling(max_tokens=9, group=3, draws=2, top_p=0.9, keep_mask=True)


def timed(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return virtual.run(work())[0]


@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.2, 4.1, 30.0])
def test_a_toy_goes_on_elsewhere(seconds: float) -> None:
    async def main() -> None:
        one, other = (toy.ToySampler(TABLE, seconds=1.0) for _ in range(2))
        whole = await asyncio.gather(*asked(toy.ToySampler(TABLE), PROMPTS, TOY))
        calls = asked(one, PROMPTS, TOY)
        await asyncio.sleep(seconds)
        await one.release()
        assert all(call.done() for call in calls) and not one.running | one.waiting
        found = await asyncio.gather(*asked(other, PROMPTS, TOY, [call.result() for call in calls]))
        for group, expected in zip(found, whole, strict=True):
            assert_same(group, expected, atol=0)

    timed(main)


def test_parts_are_joined_without_a_word_of_the_cut() -> None:
    async def main() -> tuple[list[Handle], list[Handle]]:
        whole = await toy.ToySampler(TABLE).generate(PROMPTS[0], TOY)
        return whole, [Handle(h.header, continued(*cut(h.body))) for h in whole]

    def cut(rollout: Rollout) -> list[Rollout]:
        at, kept = len(rollout.tokens) // 2, rollout.kept
        assert kept is not None
        edge, parts = int(kept.sizes[:at].sum()), []
        for rows, ids in ((slice(at), slice(edge)), (slice(at, None), slice(edge, None))):
            arrays = {n: getattr(rollout, n)[rows] for n in ("tokens", "versions", "logp", "turn", "loss_mask")}
            arrays |= {n: getattr(rollout, n)[rows] for n in ("actions", "action_logp")}
            parts.append(replace(rollout, **arrays, kept=type(kept)(kept.ids[ids], kept.sizes[rows])))
        return parts

    whole, joined = timed(main)
    assert_same(joined, whole, atol=0)


class Slow(toy.ToyGrader):
    """Grades what it is given once, and tells how often."""

    def __init__(self) -> None:
        self.graded = 0

    async def grade(self, group: Group) -> list[Handle]:
        self.graded += len(group)
        return await super().grade(group)


@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_handed_over_is_not_graded_before_its_end(greedy: bool) -> None:
    """With a greedy answer beside it, too, which is drawn from its first token where the group goes on."""
    sampling = replace(TOY, greedy=greedy, max_tokens=30)

    async def main() -> None:
        for seconds in range(8):
            grader = Slow()
            one, other = (GradingSampler(toy.ToySampler(TABLE, seconds=1.0), grader) for _ in range(2))
            whole = await asyncio.gather(
                *asked(GradingSampler(toy.ToySampler(TABLE), toy.ToyGrader()), PROMPTS, sampling)
            )
            calls = asked(one, PROMPTS, sampling)
            await asyncio.sleep(seconds + 0.5 if seconds else 0)
            await one.release()
            await asyncio.sleep(0)
            begun = [await call for call in calls]
            for group in begun:
                if unfinished(group):
                    assert all(not handle.header.rewards for handle in group)
            complete = sum(len(group) for group in begun if not unfinished(group))
            assert grader.graded == complete or greedy
            found = await asyncio.gather(*asked(other, PROMPTS, sampling, begun))
            for group, expected in zip(found, whole, strict=True):
                if not unfinished(begun[group[0].header.number]):
                    continue  # it was complete, and graded
                assert_same(group, expected, atol=0)

    timed(main)


@pytest.mark.parametrize("seconds", [0.0, 0.4, 3.5, 7.0])
def test_time_goes_on_where_it_was(seconds: float) -> None:
    """Engines that only take time: all that is lost is part of a step."""

    async def main() -> tuple[list[list[Handle]], float]:
        lengths = [4, 10]
        one, other = (SleepSampler(lambda _, index: lengths[index], step=lambda _: 1.0) for _ in range(2))
        other.version = 3
        calls = asked(one, PROMPTS[:2], Sampling(max_tokens=99, group=2))
        await asyncio.sleep(seconds)
        await one.release()
        begun = await asyncio.gather(*calls)
        assert (one.count, one.waiting) == (0, type(one.waiting)())
        began = asyncio.get_running_loop().time()
        found = await asyncio.gather(*asked(other, PROMPTS[:2], Sampling(max_tokens=99, group=2), begun))
        return found, asyncio.get_running_loop().time() - began

    groups, took = timed(main)
    made = int(seconds)
    for group in groups:
        assert [handle.header.tokens for handle in group] == [4, 10]
        for handle in group:
            before = min(made, handle.header.tokens)
            assert handle.header.versions == tuple(
                run for run in ((0, before), (3, handle.header.tokens - before)) if run[1]
            )
            assert not unfinished(group)
    assert took == pytest.approx(10 - made)
