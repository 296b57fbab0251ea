"""Engines that only take time: they keep the promises of a sampler, and their times are what the model says."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Handle, Prompt
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepSampler, SleepScorer


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=str(number), number=number, tokens=np.array([1]))


def timed(work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, float]:
    return virtual.run(work())


def test_a_step_takes_longer_the_more_rows_share_it() -> None:
    """Alone a token takes 2 s, for two rows 3 s: the short row ends after 4·3 s, the long one 6·2 s later."""
    sampler = SleepSampler(lambda prompt, index: (4, 10)[index], step=lambda rows: 1.0 + rows)
    group, seconds = timed(lambda: sampler.generate(prompt(), Sampling(max_tokens=99, group=2)))
    assert seconds == pytest.approx(4 * 3 + 6 * 2)
    assert [handle.header.tokens for handle in group] == [4, 10]


def test_who_finds_no_slot_waits_in_order() -> None:
    sampler = SleepSampler(lambda prompt, _: 5, step=lambda _: 1.0, slots=2)

    async def main() -> list[float]:
        ends = []

        async def one(number: int) -> None:
            await sampler.generate(prompt(number), Sampling(max_tokens=99))
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(one(number) for number in range(5)))
        return ends

    assert timed(main)[0] == pytest.approx([5, 5, 10, 10, 15])


def published(mode: Mode, *, load: float = 0.0) -> tuple[list[tuple[int, int]], list[Loaded], float]:
    """A response of 10 s, with a publish after 3.5 s and one after 7 s."""
    sampler = SleepSampler(lambda *_: 10, step=lambda _: 1.0, load=load)

    async def main() -> tuple[list[Handle], list[Loaded]]:
        task = asyncio.create_task(sampler.generate(prompt(), Sampling(max_tokens=99)))
        loads = []
        for version, seconds in ((1, 3.5), (2, 3.5)):
            await asyncio.sleep(seconds)
            loads.append(await sampler.publish(WeightsRef((), None, version), mode))
        return await task, loads

    (group, loads), seconds = timed(main)
    return list(group[0].header.versions), loads, seconds


def test_keeping_changes_versions_at_the_token() -> None:
    versions, _, seconds = published("keep")
    assert versions == [(0, 3), (1, 4), (2, 3)] and seconds == pytest.approx(10)


def test_a_load_stands_still() -> None:
    versions, loads, seconds = published("keep", load=0.5)
    assert versions == [(0, 3), (1, 4), (2, 3)] and seconds == pytest.approx(11)
    assert [loaded.load for loaded in loads] == pytest.approx([0.5, 0.5])


def test_draining_waits_for_the_end() -> None:
    versions, loads, seconds = published("drain")
    assert versions == [(0, 10)] and seconds == pytest.approx(13.5)
    assert [loaded.wait for loaded in loads] == pytest.approx([6.5, 0])


def test_restarting_throws_tokens_away() -> None:
    versions, loads, seconds = published("restart")
    assert versions == [(2, 10)] and seconds == pytest.approx(17)
    assert [loaded.thrown for loaded in loads] == [3, 3]


def test_restarting_throws_away_what_waiting_requests_had_begun() -> None:
    sampler, alone = SleepSampler(lambda *_: 9, step=lambda _: 1.0, slots=1), Sampling(max_tokens=9)

    async def main() -> Loaded:
        first = asyncio.create_task(sampler.generate(prompt(0), alone))
        await asyncio.sleep(5.5)
        await sampler.release()
        begun = await first
        second = asyncio.create_task(sampler.generate(prompt(1), alone))  # takes the slot
        await asyncio.sleep(2.5)
        again = asyncio.create_task(sampler.generate(prompt(0), alone, begun))
        await asyncio.sleep(0)
        loaded = await sampler.publish(WeightsRef((), None, 1), "restart")
        assert [group[0].header.versions for group in (await second, await again)] == [((1, 9),)] * 2
        return loaded

    loaded, _ = timed(main)
    assert loaded.thrown == 2 + 5


def test_an_aborted_request_makes_room() -> None:
    sampler = SleepSampler(lambda prompt, _: 5 + 95 * (prompt.number == 0), step=lambda _: 1.0, slots=1)

    async def main() -> None:
        first, second = (
            asyncio.create_task(sampler.generate(prompt(number), Sampling(max_tokens=999))) for number in (0, 1)
        )
        await asyncio.sleep(2)
        first.cancel()
        await second

    assert timed(main)[1] == pytest.approx(2 + 5)
    assert (sampler.count, sampler.rows) == (0, [])


def test_a_scorer_works_on_one_group_at_a_time() -> None:
    scorer = SleepScorer(lambda _: 2.0)

    async def main() -> None:
        await asyncio.gather(*(scorer.score([]) for _ in range(3)))

    assert timed(main)[1] == pytest.approx(6)
