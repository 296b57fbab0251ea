"""Sequences that go on from what is known of them: the same records as by reading them again, and less to read."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedModel

from slipstream.engines.native.sampling import tape
from slipstream.engines.native.sampling.admission import Move, PrefixCache
from slipstream.engines.native.sampling.requests import Lineage
from slipstream.engines.weights import export_weights
from slipstream.protocols import GradingSampler, Mode, Sampler, Sampling
from slipstream.records import Group, Prompt, Rollout, unfinished
from slipstream.simulation.timed_engines import SleepSampler
from support import tabular_engines as toy
from support.tiny_models import EOS, SHAPE, VOCAB, ByHand, make_model, make_prompts, wrap

PARKED = Sampling(max_tokens=1, draws=3, park=True)
SCRIPT = ((4, 3), (1, 5), (6, 0), (3, 2), (5, 1))
"""At most so many tokens are sampled in a turn, and so many observed after it."""


def exact(name: str, count: int = 1) -> list[PreTrainedModel]:
    return [make_model(name, seed=seed, dtype=torch.float64) for seed in range(count)]


def counted(sampler: ByHand) -> list[int]:
    """Return a list that receives the number of tokens of each pass of the model."""
    passes = list[int]()
    sampler.lm.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return passes


def assert_same(found: Sequence[Rollout], expected: Sequence[Rollout], *, atol: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.index, one.finish) == (other.index, other.finish)
        for name in ("tokens", "versions", "actions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        np.testing.assert_allclose(one.action_logp, other.action_logp, rtol=0, atol=atol)


# --- which slot is whose ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_parked_sequences_lie_behind_the_rows_and_the_oldest_give_way(seed: int) -> None:
    """Random arrivals and ends; what lies in a slot is followed from move to move."""
    rng, count = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(1, 9))
    cache, rows, slots, born = PrefixCache(count), list[Lineage](), dict[int, Lineage](), 0
    tokens: Callable[[Lineage], np.ndarray] = lambda lineage: np.arange(lineage[0] + 1)  # noqa: E731

    def copy(moves: Sequence[Move]) -> None:
        assert len({move.target for move in moves}) == len(moves)
        assert all(move.source != move.target for move in moves)
        slots.update({move.target: slots[move.source] for move in moves})

    for _ in range(60):
        ended = [slot for slot in range(len(rows)) if rng.random() < 0.4]
        leaving = {slot: (rows[slot], tokens(rows[slot])) for slot in ended if rng.random() < 0.8}
        before = list(cache.prefixes)
        stay = [slot for slot in range(len(rows)) if slot not in ended]
        parks = cache.store(leaving, len(stay))
        copy([*(Move(slot, at, 1) for at, slot in enumerate(stay) if slot != at), *parks])
        rows = [rows[slot] for slot in stay]
        assert list(cache.prefixes) == [*before, *(lineage for lineage, _ in leaving.values())]
        come = int(rng.integers(0, count - len(rows) + 1))
        going = [lineage for lineage in cache.prefixes if rng.random() < 0.4][:come]
        fresh = [(born + i, 0, 1.0) for i in range(come - len(going))]
        born += len(fresh)
        before = [lineage for lineage in cache.prefixes if lineage not in going]
        stop = len(rows) + come
        copy(cache.make_room(stop, {lineage: stop - len(going) + i for i, lineage in enumerate(going)}))
        kept = list(cache.prefixes)
        assert kept == before[max(0, len(before) - (count - stop)) :], "the oldest have gone, and no more of them"
        slots.update({len(rows) + i: lineage for i, lineage in enumerate(fresh)})
        rows += [*fresh, *going]
        held = {prefix.slot: lineage for lineage, prefix in cache.prefixes.items()}
        assert len(held) == len(kept) and all(stop <= slot < count for slot in held)
        assert {slot: slots[slot] for slot in held} == held
        assert [slots[slot] for slot in range(stop)] == rows


def test_only_an_exact_beginning_is_known_and_another_is_forgotten() -> None:
    cache, lineage = PrefixCache(4), (7, 0, 1.0)
    for tokens, known in [([1, 2, 3, 9], 3), ([1, 2, 3], 0), ([1, 2], 0), ([1, 5, 3, 9], 0), ([1, 2, 3, 9, 9], 3)]:
        assert cache.store({0: (lineage, np.array([1, 2, 3]))}, 0) == []
        assert cache.known((7, 1, 1.0), np.array(tokens)) == cache.known((7, 0, 0.0), np.array(tokens)) == 0
        assert cache.known(lineage, np.array(tokens)) == known
        assert (lineage in cache.prefixes) == (known > 0)


# --- one response, however it was made ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "atol", "cuts"),
    [
        ("qwen3", torch.float64, 1e-10, []),
        ("qwen3", torch.float64, 1e-10, [1]),
        ("qwen3", torch.float64, 1e-10, [19]),
        ("qwen3", torch.float64, 1e-10, [5, 6]),
        ("qwen3", torch.float64, 1e-10, [2, 4, 9, 13, 18]),
        ("mistral-window", torch.float64, 1e-10, [5, 6]),
        ("mistral-window", torch.float64, 1e-10, [2, 4, 9, 13, 18]),
        ("gemma3-window", torch.float64, 1e-10, [2, 4, 9, 13, 18]),
        ("phi", torch.float32, 1e-5, [2, 4, 9, 13, 18]),
    ],
    ids=str,
)
def test_one_response_is_its_calls_wherever_they_are_cut(
    name: str, dtype: torch.dtype, atol: float, cuts: list[int]
) -> None:
    """Every member of two groups, side by side; every token of a response goes through the model once."""
    model, prompts = make_model(name, dtype=dtype), make_prompts(2)

    async def member(sampler: ByHand, prompt: Prompt, index: int, park: bool) -> Rollout:
        parts, tokens = list[Rollout](), prompt.tokens
        for start, stop in pairwise([0, *cuts, 20]):
            asked = replace(prompt, tokens=tokens, offset=start, first=index)
            sampling = replace(PARKED, max_tokens=stop - start, park=park)
            (handle,) = await sampler.generate(asked, sampling)
            parts.append(handle.body)
            tokens = np.concatenate([tokens, handle.body.tokens])
        fields = {n: np.concatenate([getattr(p, n) for p in parts]) for n in ("tokens", "versions", "logp", "turn")}
        drawn = {n: np.concatenate([getattr(p, n) for p in parts]) for n in ("actions", "action_logp", "loss_mask")}
        return replace(parts[-1], prompt=prompt, **fields, **drawn)

    async def main(park: bool) -> tuple[list[Rollout], list[Rollout], int]:
        sampler = ByHand(wrap(model), slots=16, stop_ids=set())
        whole = [
            asyncio.create_task(sampler.generate(p, replace(PARKED, max_tokens=20, group=4, park=False)))
            for p in prompts
        ]
        groups = await sampler.finish(*whole)
        passes = counted(sampler)
        members = [asyncio.create_task(member(sampler, p, i, park)) for p in prompts for i in range(4)]
        while not all(task.done() for task in members):
            await sampler.step()
        made = await asyncio.gather(*members)
        sampler.close()
        return [handle.body for group in groups for handle in group], made, sum(passes)

    (whole, parked, read), (_, unparked, most) = (asyncio.run(main(park)) for park in (True, False))
    assert_same(parked, whole, atol=atol)
    assert_same(parked, unparked, atol=atol)
    assert read == sum(len(prompt.tokens) + 4 * 19 for prompt in prompts)
    saved = 0
    for cut in cuts:  # members that have drawn the same so far are read together
        different = {(rollout.prompt.id, *rollout.tokens[:cut]): rollout.prompt for rollout in whole}
        saved += sum(len(prompt.tokens) + cut for prompt in different.values()) - len(whole)
    assert most - read == saved


# --- episodes, whatever happens -----------------------------------------------------------------------------------


@dataclass
class Plan:
    """Events of a test, by the step before which they happen."""

    slots: int = 16
    publishes: dict[int, Mode] = field(default_factory=dict)
    releases: Sequence[int] = ()
    aborts: dict[int, int] = field(default_factory=dict)
    """Which episode."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"


def play(models: Sequence[PreTrainedModel], plan: Plan, *, park: bool) -> tuple[list[list[Rollout]], int]:
    """Two groups of four episodes each, whose turns begin some steps after those before have ended.

    Returns the calls of each, and how many tokens went through the model."""
    waiting, clock = list[tuple[int, asyncio.Future[None]]](), 0

    async def episode(sampler: ByHand, prompt: Prompt, index: int, calls: list[Rollout]) -> None:
        rng, tokens = np.random.default_rng([prompt.number, index]), prompt.tokens
        for most, observed in SCRIPT:
            due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append((clock + int(rng.integers(0, 4) if calls else 0), due))
            await due
            asked = replace(prompt, tokens=tokens, offset=sum(len(c.tokens) for c in calls), first=index)
            group: Group = ()
            while not group or unfinished(group):
                group = await sampler.generate(asked, replace(PARKED, max_tokens=most, park=park), group)
            calls.append(group[0].body)
            tokens = np.concatenate([tokens, calls[-1].tokens, rng.integers(2, VOCAB, observed).astype(np.int32)])

    async def main() -> tuple[list[list[Rollout]], int]:
        nonlocal clock
        sampler = ByHand(wrap(models[0]), slots=plan.slots, stop_ids={EOS}, on_publish=plan.on_publish)
        passes, told = counted(sampler), list[asyncio.Task[Any]]()
        calls: list[list[Rollout]] = [[] for _ in range(8)]
        running = [asyncio.create_task(episode(sampler, make_prompts(2)[i // 4], i % 4, calls[i])) for i in range(8)]
        while not all(task.done() for task in running):
            await settled()
            for due in [due for step, due in waiting if step <= clock and not due.done()]:
                due.set_result(None)
            await settled()
            if clock in plan.publishes:
                version = 1 + sum(step < clock for step in plan.publishes)
                weights = export_weights(models[version], "float64", version=version)
                told.append(asyncio.create_task(sampler.publish(weights, plan.publishes[clock])))
            if clock in plan.aborts:
                running[plan.aborts[clock]].cancel()
            if clock in plan.releases:
                told.append(asyncio.create_task(sampler.release()))
            clock += 1
            await sampler.step()
            assert all(len(sampler.rows) <= prefix.slot for prefix in sampler.prefixes.prefixes.values())
            assert park or not sampler.prefixes.prefixes
        await asyncio.gather(*running, return_exceptions=True)
        await sampler.finish(*told)
        sampler.close()
        return calls, sum(passes)

    async def settled() -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    return asyncio.run(main())


def planned(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    modes: list[Mode] = ["keep", "drain", "restart"]
    steps = sorted(rng.choice(24, 2, replace=False).tolist())
    return Plan(
        slots=int(rng.choice([2, 4, 6, 16])),
        publishes={step: modes[int(rng.integers(3))] for step in steps if rng.random() < 0.7},
        releases=[int(step) for step in rng.choice(24, 2, replace=False) if rng.random() < 0.5],
        aborts={int(rng.integers(1, 20)): int(rng.integers(8))} if rng.random() < 0.6 else {},
    )


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_episodes_are_the_same_whether_or_not_they_are_parked_whatever_happens(name: str) -> None:
    """Few slots and many, weights that come in between turns and inside of them by every mode, releases, an abort."""
    models, saved = exact(name, 3), []
    for seed in range(8):
        plan = planned(seed)
        (parked, read), (unparked, most) = (play(models, plan, park=park) for park in (True, False))
        for one, other in zip(parked, unparked, strict=True):
            assert_same(one, other, atol=1e-10)
        assert read <= most
        saved.append(most - read)
        if plan.slots == 16 and not plan.releases:
            assert saved[-1] > 0
    assert sum(saving > 0 for saving in saved) > 4


def test_a_slot_that_is_needed_is_not_kept_for_anybody() -> None:
    """Eight episodes, of which some wait for what they will observe: the fewer slots, the less stays."""
    (model,) = exact("qwen3")
    read = {
        (slots, park): play([model], Plan(slots=slots), park=park)[1] for slots in (1, 5, 8) for park in (True, False)
    }
    saved = {slots: read[slots, False] - read[slots, True] for slots in (1, 5, 8)}
    assert 0 <= saved[1] < saved[5] < saved[8]


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
@pytest.mark.parametrize("on_publish", ["rebuild", "reuse"])
def test_what_is_parked_fares_as_what_runs(mode: Mode, on_publish: Literal["rebuild", "reuse"]) -> None:
    """Weights that come in between two calls, and in the middle of one: the same log-probs, and the same approximation
    where keys and values are kept."""
    models, (prompt,) = exact("qwen3", 2), make_prompts(1)
    weights = export_weights(models[1], "float64", version=1)

    async def main(cut: int) -> tuple[list[Rollout], int]:
        sampler = ByHand(wrap(models[0]), slots=4, stop_ids=set(), on_publish=on_publish)
        parts, tokens, stops = list[Rollout](), prompt.tokens, (0, 5, 12) if cut else (0, 12)
        for start, stop in pairwise(stops):
            asked = replace(prompt, tokens=tokens, offset=start)
            call = asyncio.create_task(sampler.generate(asked, replace(PARKED, max_tokens=stop - start)))
            await sampler.step(5)
            if not start:
                loading = asyncio.create_task(sampler.publish(weights, mode))
            (group,) = await sampler.finish(call)
            parts.append(group[0].body)
            tokens = np.concatenate([tokens, parts[-1].tokens])
            if stop == 5:
                await sampler.finish(loading)
                held = len(sampler.prefixes.prefixes)
        sampler.close()
        return parts, held if cut else 0

    (calls, held), (whole, _) = asyncio.run(main(5)), asyncio.run(main(0))
    assert held == (on_publish == "reuse" and mode == "keep")
    if mode == "keep":
        logp = np.concatenate([call.action_logp for call in calls])
        np.testing.assert_allclose(logp, whole[0].action_logp, rtol=0, atol=1e-10)
        assert whole[0].versions.tolist() == [0] * 5 + [1] * 7
    else:
        assert [set(call.versions) for call in calls] == [{0}, {1}]


def test_who_is_handed_over_or_fails_leaves_nothing() -> None:
    (model,), prompts = exact("qwen3"), make_prompts(2)

    async def main() -> None:
        sampler = ByHand(wrap(model), slots=4, stop_ids=set())
        for empty in ("release", "failure"):
            calls = [asyncio.create_task(sampler.generate(p, replace(PARKED, max_tokens=3, group=2))) for p in prompts]
            await sampler.finish(*calls)
            assert len(sampler.prefixes.prefixes) == 4
            if empty == "release":
                await sampler.release()  # nobody is there to be handed over
            else:
                call = asyncio.create_task(sampler.generate(prompts[0], PARKED))
                with pytest.raises(RuntimeError, match="broken"):
                    await failing(sampler, call)
            await sampler.step()
            assert not sampler.prefixes.prefixes
        sampler.close()

    async def failing(sampler: ByHand, call: asyncio.Task[Any]) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        hook = sampler.lm.backbone.register_forward_pre_hook(broken)
        await asyncio.sleep(0)
        await sampler._drive()
        hook.remove()
        await call

    asyncio.run(main())


def test_states_that_have_seen_every_token_are_not_parked() -> None:
    torch.manual_seed(0)
    config = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    (parked, read), (unparked, most) = (play([model], Plan(slots=5), park=park) for park in (True, False))
    assert read == most
    for one, other in zip(parked, unparked, strict=True):
        assert_same(one, other, atol=1e-10)


# --- requests with one prompt -------------------------------------------------------------------------------------


def test_requests_with_one_prompt_share_its_reading_as_members_of_a_group_do() -> None:
    """When they come in, and when new weights do; other prompts of the same length have readings of their own."""
    models, (prompt, *_) = exact("qwen3", 2), make_prompts(30, seed=5)[-2:]
    other = replace(prompt, number=9, tokens=prompt.tokens[::-1].copy(), seed=3)
    weights = export_weights(models[1], "float64", version=1)

    async def main(apart: bool) -> tuple[list[Rollout], list[int]]:
        sampler = ByHand(wrap(models[0]), slots=16, stop_ids=set())
        passes, most = counted(sampler), replace(PARKED, max_tokens=6)
        asked = [replace(prompt, first=index) for index in range(4)] if apart else [prompt]
        asked.insert(1 if apart else 0, other)
        calls = [
            asyncio.create_task(sampler.generate(p, replace(most, group=1 if apart or p is other else 4)))
            for p in asked
        ]
        await sampler.step(3)
        loading = asyncio.create_task(sampler.publish(weights, "keep"))
        groups = await sampler.finish(*calls)
        await loading
        sampler.close()
        found = [handle.body for group in groups for handle in group]
        return sorted(found, key=lambda rollout: (rollout.prompt.number, rollout.index)), passes

    (members, passes), (group, expected) = asyncio.run(main(True)), asyncio.run(main(False))
    assert_same(members, group, atol=1e-10)
    assert passes == expected and passes[0] == 2 * len(prompt.tokens)


def test_what_differs_only_in_length_is_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    (model,), prompts, kinds = exact("qwen3"), make_prompts(6), []
    real = tape.process
    monkeypatch.setattr(tape, "process", lambda logits, sampling: kinds.append(0) or real(logits, sampling))

    async def main(*, alike: bool) -> list[Rollout]:
        sampler, asks = (
            ByHand(wrap(model), slots=16, stop_ids=set()),
            [replace(PARKED, max_tokens=2 + i) for i in range(6)],
        )
        asked = [ask if alike or i % 2 else replace(ask, temperature=0.5) for i, ask in enumerate(asks)]
        calls = [asyncio.create_task(sampler.generate(p, ask)) for p, ask in zip(prompts, asked, strict=True)]
        groups = await sampler.finish(*calls)
        sampler.close()
        return [group[0].body for group in groups]

    found = asyncio.run(main(alike=True))
    assert [len(rollout.tokens) for rollout in found] == [2, 3, 4, 5, 6, 7] and len(kinds) == 7
    mixed = asyncio.run(main(alike=False))
    assert_same(mixed[1::2], found[1::2], atol=1e-10)


# --- the other engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["toy", "graded", "sleep"])
def test_other_samplers_take_the_wish_and_answer_as_without(kind: str) -> None:
    table = toy.random_table(7, seed=1)
    made: dict[str, Callable[[], Sampler]] = {
        "toy": lambda: toy.ToySampler(table),
        "graded": lambda: GradingSampler(toy.ToySampler(table), toy.ToyGrader()),
        "sleep": lambda: SleepSampler(lambda prompt, index: 3 + index, step=lambda rows: 1e-4),
    }
    prompt = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=4)
    sampling = Sampling(max_tokens=5, group=2)
    headers = [
        [handle.header for handle in asyncio.run(made[kind]().generate(prompt, replace(sampling, park=park)))]
        for park in (False, True)
    ]
    assert headers[0] == headers[1] and len(headers[0]) == 2
