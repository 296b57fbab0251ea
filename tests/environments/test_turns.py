"""Episodes: turns and observations as one lineage, whatever happens meanwhile."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.engines.draws import process
from slipstream.environments import Call, Reply, Step
from slipstream.environments.episodes import Episode, Episodes
from slipstream.errors import EnvironmentFailed
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, GradingSampler, Sampling, TensorSpec, WeightsRef
from slipstream.records import Handle, Ints, Prompt, Rollout, derive_seed, parts_of, unfinished
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.tiny_models import uniform
from support.toy_episodes import WIDE, Numbers, World
from support.toy_runs import PROMPTS, VOCAB, config

TABLE = toy.random_table(VOCAB, seed=0)
FULL = Sampling(max_tokens=30, group=3, draws=4)
PROMPT = Prompt(id="p", number=7, tokens=np.array([1, 2], np.int32), seed=derive_seed(0, 7))


class Silent(Numbers):
    """A student that calls no tools."""

    def parse(self, ids: Ints, *, cut: bool = False) -> Reply:
        return replace(super().parse(ids, cut=cut), calls=())


def played(world: World, sampling: Sampling = FULL, limits: Any = WIDE, **of_sampler: Any) -> list[Rollout]:
    sampler = world.sampler(toy.ToySampler(TABLE, **of_sampler), limits)
    return [handle.body for handle in virtual.run(sampler.generate(PROMPT, sampling))[0]]


def check_lineage(rollout: Rollout, tables: dict[int, torch.Tensor], sampling: Sampling) -> None:
    """Every call's prompt and answer are a prefix of it, and every log-prob is that of reading it."""
    before = np.concatenate([rollout.prompt.tokens[-1:], rollout.tokens[:-1]])
    expected = [
        process(tables[version][last][None], sampling)[0, token].item()
        for last, token, version in zip(
            *(array[rollout.loss_mask] for array in (before, rollout.tokens, rollout.versions)), strict=True
        )
    ]
    np.testing.assert_allclose(rollout.logp[rollout.loss_mask], expected, rtol=0, atol=1e-12)
    assert rollout.tokens[rollout.loss_mask].tolist() == rollout.actions[:, 0].tolist()
    numbers = Numbers()
    said = [part for part in parts_of(rollout) if isinstance(part, Rollout)]
    assert sorted(set(rollout.turn[rollout.loss_mask].tolist())) == list(range(len(said)))
    assert all(numbers.parse(part.tokens).calls for part in said)
    assert not rollout.logp[~rollout.loss_mask].any() and (rollout.versions[~rollout.loss_mask] == -1).all()


def test_an_episode_is_one_lineage_of_what_was_said_and_seen() -> None:
    world = World()
    group = played(world)
    assert [rollout.index for rollout in group] == [rollout.episode for rollout in group] == [0, 1, 2]
    for rollout, said in zip(group, world.said, strict=True):
        check_lineage(rollout, {0: TABLE}, FULL)
        assert rollout.finish == "eos" and rollout.outcome["turns"] == len(said) == 3
        assert rollout.outcome["reward"] == 3.0 and rollout.outcome["failures"] == 0
        parts = parts_of(rollout)
        assert [isinstance(part, Rollout) for part in parts] == [True, False, True, False, True]
        seen = [part.tolist() for part in parts if isinstance(part, np.ndarray)]
        for reply, turn, observed in zip(said, parts[::2], seen, strict=False):
            assert isinstance(turn, Rollout) and reply == Numbers().parse(turn.tokens)
            assert observed[-2] == 1 + sum(reply.calls[0].arguments["ids"]) % 5
    assert world.opened == world.closed == 3 and world.dropped == 0


def test_an_episode_does_not_depend_on_how_many_calls_it_is_made_in() -> None:
    """In a world that answers nothing and puts nothing between, turns of any length are one response."""
    whole = toy.ToySampler(TABLE)
    (expected,) = virtual.run(whole.generate(PROMPT, replace(FULL, group=1, max_tokens=12)))[0]

    class Silent(Numbers):
        def extend(self, ids: Any, messages: Any) -> Any:
            return np.zeros(0, np.int32)

    for length in range(1, 12):
        world = World(turns=100)
        sampler = world.sampler(toy.ToySampler(TABLE), replace(WIDE, turn_tokens=length, turns=100))
        sampler.renderer = Silent()
        (found,) = virtual.run(sampler.generate(PROMPT, replace(FULL, group=1, max_tokens=12)))[0]
        n = len(expected.body.tokens)
        for name in ("tokens", "logp", "actions", "action_logp", "versions"):
            np.testing.assert_array_equal(getattr(found.body, name)[:n], getattr(expected.body, name))


@pytest.mark.parametrize("seed", range(8))
def test_versions_are_those_that_drew_whenever_weights_change(seed: int) -> None:
    """In the middle of a turn, and while the environment is at work."""
    rng = random.Random(seed)
    world = World(seconds=lambda rng: rng.uniform(0, 3))
    policy = toy.ToySampler(TABLE, seconds=0.4)
    sampler, tables = world.sampler(policy), {0: TABLE}

    async def main() -> list[Handle]:
        call = asyncio.create_task(sampler.generate(PROMPT, FULL))
        while not call.done():
            await asyncio.sleep(rng.uniform(0.2, 2))
            version = len(tables)
            tables[version] = toy.random_table(VOCAB, seed=version)
            await sampler.publish(flat(tables[version], version), rng.choice(["keep", "drain", "restart"]))
        return call.result()

    group = virtual.run(main())[0]
    versions = set[int]()
    for handle in group:
        check_lineage(handle.body, tables, FULL)
        assert (np.diff(handle.body.versions[handle.body.loss_mask]) >= 0).all()
        versions |= {version for version, _ in handle.header.versions}
    assert len(versions) > 1


def flat(table: torch.Tensor, version: int) -> WeightsRef:
    spec = TensorSpec("table", "float64", tuple(table.shape), 0, table.numel() * 8)
    return WeightsRef((spec,), table.view(-1).view(torch.uint8).numpy().copy(), version)


# --- limits and failures --------------------------------------------------------------------------------------------


def test_limits_end_an_episode_and_say_so() -> None:
    assert {r.finish for r in played(World(turns=9))} == {"turns"}
    assert {r.finish for r in played(World(turns=9), limits=replace(WIDE, calls=2, turns=9))} == {"turns"}
    for rollout in played(World(turns=9), replace(FULL, max_tokens=9), replace(WIDE, turns=9)):
        assert rollout.finish == "length" and len(rollout.tokens) <= 9 and rollout.loss_mask[-1]
    slow = World(turns=9, seconds=lambda rng: 4.0)
    for rollout in played(slow, limits=replace(WIDE, turns=9, seconds=10.0)):
        assert rollout.finish == "time" and rollout.outcome["turns"] == 3 and rollout.outcome["seconds"] == 10.0
        assert rollout.outcome["reward"] == 3.0 and rollout.outcome["failures"] == 0.0
    assert slow.closed == 3 and slow.dropped == 0


def test_a_last_turn_that_is_cut_off_did_not_end_by_itself() -> None:
    for most in (None, 1, 2):
        limits, world = replace(WIDE, turns=9, turn_tokens=most), World(turns=1)
        sampler = Episodes(toy.ToySampler(TABLE), Silent(), world, limits)
        for rollout in (handle.body for handle in virtual.run(sampler.generate(PROMPT, FULL))[0]):
            assert rollout.finish == ("eos" if rollout.tokens[-1] == toy.EOS else "length")
        assert {rollout.finish for rollout in played(world, limits=limits)} == {"eos"}, "it ended with a call"


@pytest.mark.parametrize("faults", [0.1, 0.5, 1.0])
def test_an_environment_that_fails_is_begun_again_and_told_what_was_said(faults: float) -> None:
    """After three tries its episode is left out, and all others are as they would have been."""
    sampler = World(faults=faults).sampler(toy.ToySampler(TABLE))
    group = virtual.run(sampler.generate(PROMPT, replace(FULL, group=12)))[0]
    left, failures = 0, 0.0
    for handle, expected in zip(group, played(World(), replace(FULL, group=12)), strict=True):
        if handle.header.finish == "error":
            (kind,) = handle.header.outcome.keys() - {"failures"}
            assert kind in ("failed/timeout", "failed/crash", "failed/error") and handle.header.cause
            left += 1
            continue
        failures += handle.header.outcome["failures"]
        for name in ("tokens", "action_logp", "turn"):
            np.testing.assert_array_equal(getattr(handle.body, name), getattr(expected, name))
    assert (left < 12) == (failures > 0) == (faults < 1) and (left > 0) == (faults > 0.2)


@pytest.mark.parametrize(("turn_tokens", "most"), [(None, 3), (2, 30)], ids=["of the episode", "of a turn"])
def test_a_reply_that_a_limit_cut_is_still_cut_when_its_environment_is_begun_again(
    turn_tokens: int | None, most: int
) -> None:
    class Unlucky(World):
        def place(self, *, alone: bool = False) -> Any:
            room = super().place(alone=alone)
            if self.opened <= 8:
                room.close = fails  # type: ignore[method-assign]
            return room

    async def fails() -> dict[str, float]:
        raise EnvironmentFailed("timeout", "closing took too long")

    def seen(world: World) -> list[Any]:
        limits = replace(WIDE, turns=9, turn_tokens=turn_tokens)
        sampler = Episodes(toy.ToySampler(TABLE), Silent(), world, limits)
        group = virtual.run(sampler.generate(PROMPT, replace(FULL, max_tokens=most, group=8)))[0]
        return [(h.body.tokens.tolist(), h.body.finish, h.body.outcome["reward"]) for h in group]

    whole = seen(World(turns=1))
    assert "length" in {finish for _, finish, _ in whole}
    assert seen(Unlucky(turns=1)) == whole


def test_a_first_observation_is_read_before_the_first_turn_and_counts_as_tokens_of_the_episode() -> None:
    for rollout in played(World(first="3 1 2", turns=9), limits=replace(WIDE, turns=9)):
        assert rollout.prompt.tokens.tolist() == [1, 2, 3, 1, 2] and rollout.prompt.seed == PROMPT.seed
        check_lineage(rollout, {0: TABLE}, FULL)
        assert rollout.loss_mask[0] and rollout.finish == "length" and len(rollout.tokens) <= 27
    sampler = World(first="1 " * 30).sampler(toy.ToySampler(TABLE))
    handles = virtual.run(sampler.generate(PROMPT, FULL))[0]
    why = "start returned 30 tokens, and the episode has sampler.max_tokens = 30"
    assert {handle.header.cause for handle in handles} == {why}


@pytest.mark.parametrize("where", ["start", "close"])
def test_an_environment_that_hangs_as_it_starts_or_closes_is_left_out(where: str) -> None:
    class Hanging(World):
        def place(self, *, alone: bool = False) -> Any:
            room = super().place(alone=alone)
            setattr(room, where, lambda *given: asyncio.Event().wait())
            return room

    world = Hanging()
    group, seconds = virtual.run(world.sampler(toy.ToySampler(TABLE)).generate(PROMPT, FULL))
    assert {handle.header.cause for handle in group} == {f"the environment took more than 1000 s to {where}"}
    assert world.opened == 9 and seconds == 3000.0
    assert all(handle.header.outcome == {"failed/timeout": 1.0, "failures": 3.0} for handle in group)


def test_an_environment_that_cannot_be_closed_when_time_is_up_has_failed_and_says_so() -> None:
    """It has what is left of its step, and then as long as any other to close."""

    class Stuck(World):
        def place(self, *, alone: bool = False) -> Any:
            room = super().place(alone=alone)
            room.close = lambda: asyncio.Event().wait()  # type: ignore[method-assign,assignment,return-value]
            return room

    world = Stuck(turns=9, seconds=lambda rng: 4.0)
    sampler = world.sampler(toy.ToySampler(TABLE), replace(WIDE, turns=9, seconds=10.0, step_seconds=20.0))
    group, seconds = virtual.run(sampler.generate(PROMPT, replace(FULL, group=2)))
    why = "the environment took more than 40 s to close after the 10 s of its episode (environment.seconds)"
    assert [handle.header.cause for handle in group] == [why] * 2
    assert all(handle.header.outcome == {"failed/timeout": 1.0, "failures": 3.0} for handle in group)
    assert seconds == 3 * (10 + 40) and world.dropped == 6


# --- handing over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "3 1 2"])
@pytest.mark.parametrize("seed", range(6))
def test_an_episode_that_is_handed_over_goes_on_as_if_nothing_had_happened(seed: int, first: str) -> None:
    expected = played(World(first=first), FULL)
    rng = random.Random(seed)
    cuts = 0

    async def main() -> list[Handle]:
        nonlocal cuts
        begun: list[Handle] = []
        while True:
            world = World(seconds=lambda rng: rng.uniform(0, 3), first=first)
            sampler = world.sampler(toy.ToySampler(TABLE, seconds=0.4))
            call = asyncio.create_task(sampler.generate(PROMPT, FULL, begun))
            await asyncio.sleep(rng.uniform(0, 8))
            await sampler.release()
            begun = await call
            assert world.closed + world.dropped >= 0 and not sampler.calls.open
            if not unfinished(begun):
                return begun
            cuts += 1

    group = virtual.run(main())[0]
    assert cuts > 0
    for handle, other in zip(group, expected, strict=True):
        for name in ("tokens", "logp", "actions", "action_logp", "versions", "turn", "loss_mask"):
            np.testing.assert_array_equal(getattr(handle.body, name), getattr(other, name), err_msg=name)
        assert handle.body.outcome | {"seconds": 0.0} == other.outcome | {"seconds": 0.0}


def test_an_episode_that_is_handed_over_while_it_is_graded_keeps_its_turns() -> None:
    async def main() -> tuple[list[Handle], list[Handle]]:
        sampler = World(closing=50.0).sampler(toy.ToySampler(TABLE, seconds=0.1))
        call = asyncio.create_task(sampler.generate(PROMPT, FULL))
        await asyncio.sleep(40)
        await sampler.release()
        begun = await call
        return begun, await World().sampler(toy.ToySampler(TABLE)).generate(PROMPT, FULL, begun)

    begun, ended = virtual.run(main())[0]
    assert [handle.header.finish for handle in begun] == ["released"] * len(begun) and len(begun) == len(ended) == 3
    for half, whole in zip(begun, ended, strict=True):
        np.testing.assert_array_equal(half.body.tokens, whole.body.tokens)


@pytest.mark.parametrize("other_first", ["", "2"])
def test_an_episode_whose_world_is_another_begins_again_there(other_first: str) -> None:
    async def main() -> list[Handle]:
        world = World(seconds=lambda rng: 1.0)
        sampler = world.sampler(toy.ToySampler(TABLE, seconds=0.4))
        call = asyncio.create_task(sampler.generate(PROMPT, FULL))
        await asyncio.sleep(4.5)
        await sampler.release([PROMPT.number])
        begun = await call
        assert unfinished(begun) and begun
        other = World(moody=not other_first, opened=17, said=[[]] * 17, first=other_first)
        return await other.sampler(toy.ToySampler(TABLE)).generate(PROMPT, FULL, begun)

    for handle in virtual.run(main())[0]:
        check_lineage(handle.body, {0: TABLE}, FULL)
        assert handle.header.finish == "eos" and handle.body.prompt.tokens.tolist()[2:] == ([2] if other_first else [])


def test_who_cancels_an_episode_ends_its_environment() -> None:
    async def main() -> World:
        world = World(seconds=lambda rng: 100.0)
        call = asyncio.create_task(world.sampler(toy.ToySampler(TABLE, seconds=0.1)).generate(PROMPT, FULL))
        await asyncio.sleep(10)
        call.cancel()
        await asyncio.wait([call])
        return world

    world = virtual.run(main())[0]
    assert world.opened == world.dropped == 3


# --- in the pipeline ------------------------------------------------------------------------------------------------


def trained(path: Any, schedule: Any, world: World, **sizes: Any) -> tuple[toy.ToyLearner, list[dict[str, Any]]]:
    student = toy.random_table(VOCAB, seed=0)
    settings = config(schedule, **sizes)
    settings = settings.model_copy(
        update={"sampler": settings.sampler.model_copy(update={"max_tokens": FULL.max_tokens})}
    )
    made = Engines(
        samplers=(GradingSampler(world.sampler(toy.ToySampler(student, seconds=0.3)), toy.ToyGrader()),),
        scorers={"": (toy.ToyScorer(toy.random_table(VOCAB, seed=1, scale=2.0), cost=lambda _: 0.5),)},
        learner=toy.ToyLearner(student, cost=lambda _: 1.0),
        close=lambda: None,
    )

    async def work() -> None:
        with RunLog.create(settings, path) as log:
            await Run(settings, made, PROMPTS, log).train()

    virtual.run(work())
    assert isinstance(made.learner, toy.ToyLearner)
    return made.learner, read_lines(path / "metrics.jsonl")


def test_async_without_staleness_trains_what_sync_does_with_tools(tmp_path: Any) -> None:
    latency = {"seconds": lambda rng: rng.lognormvariate(0, 1)}
    sync, _ = trained(tmp_path / "sync", {"kind": "sync"}, World(**latency))
    other, lines = trained(tmp_path / "async", {"kind": "async", "tau": 0}, World(**latency))
    torch.testing.assert_close(sync.table, other.table, rtol=0, atol=1e-12)
    assert lines[-1]["episode/turns"] > 1 and 0 < lines[-1]["episode/observed"] < 1


@pytest.mark.parametrize("seed", range(4))
def test_whatever_environments_do_every_group_ends_once_and_no_credit_is_lost(tmp_path: Any, seed: int) -> None:
    rng = random.Random(seed)
    world = World(
        seconds=lambda each: each.lognormvariate(0, 1), faults=rng.choice([0.1, 0.3, 0.6]), turns=rng.choice([1, 3])
    )
    _, lines = trained(tmp_path / "run", {"kind": "async", "tau": 3}, world, updates=12)
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
    assert lines[-1]["credits"] == 0 or lines[-1]["update"] == 12
    assert world.opened == world.closed + world.dropped
    failed = [entry for entry in ledger if entry.get("failed")]
    assert lines[-1]["failed_samples"] >= len(failed)
    assert lines[-1]["failed_samples"] == sum(lines[-1].get(f"failed/{c}", 0) for c in ("timeout", "crash", "error"))


@pytest.mark.parametrize(
    ("reply", "premature"),
    [(Reply(" \n"), 1), (Reply("4"), 0), (Reply("", (Call("buy", {"n": 1}),)), 0), (Reply("", (), ("not JSON",)), 1)],
)
def test_an_episode_is_premature_if_its_last_reply_has_neither_text_nor_a_call(reply: Reply, premature: int) -> None:
    unused: Any = None
    episode = Episode(unused, 0, 0, PROMPT, parts=[uniform(PROMPT, 0, [1, 2], finish="eos")])
    episode.record(reply, Step(done=True))
    assert (episode.rollout("eos", {}).outcome or {})["premature"] == premature
