"""Work that shares cores: who works with whom decides how long it takes."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocols import Sampling, WeightsRef
from slipstream.records import Prompt
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.cores import Cores
from slipstream.simulation.timed_engines import SleepSampler


def ends(cores: Cores, works: Sequence[tuple[float, float]], *, wide: float = 1.0) -> list[float]:
    """When each of these (begin, seconds) is done."""

    async def one(begin: float, seconds: float) -> float:
        await asyncio.sleep(begin)
        await cores.work(seconds, wide=wide)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        return await asyncio.gather(*(one(*work) for work in works))

    return virtual.run(main())[0]


def test_as_many_as_there_are_cores_go_at_full_speed() -> None:
    assert ends(Cores(2), [(0, 1), (0, 3)]) == pytest.approx([1, 3])


def test_more_share_evenly() -> None:
    """Three on two cores go at two thirds. On one core the short one is done after 2·1 s, the long one has 2 s left."""
    assert ends(Cores(2), [(0, 1), (0, 1), (0, 1)]) == pytest.approx([1.5, 1.5, 1.5])
    assert ends(Cores(1), [(0, 1), (0, 3)]) == pytest.approx([2, 4])


def test_who_comes_later_slows_down_those_who_are_there() -> None:
    """Alone for 1 s; then both at half speed: 1 s is left of the first, which takes 2, and then 1 s of the second."""
    assert ends(Cores(1), [(0, 2), (1, 2)]) == pytest.approx([3, 4])


def test_strangers_take_their_share() -> None:
    assert ends(Cores(1, others=1), [(0, 1)]) == pytest.approx([2])
    assert ends(Cores(2, others=1), [(0, 1)]) == pytest.approx([1])


def test_wide_work_counts_for_several() -> None:
    """Two ranks each want a core of the two that there are: they share with the other two."""
    assert ends(Cores(2), [(0, 1), (0, 1)], wide=2) == pytest.approx([2, 2])


def test_without_a_limit_nobody_waits() -> None:
    assert ends(Cores(), [(0, 1), (0, 1), (0.5, 1)]) == pytest.approx([1, 1, 1.5])


def test_who_is_cancelled_makes_room() -> None:
    cores = Cores(1)

    async def main() -> float:
        first, second = asyncio.create_task(cores.work(5)), asyncio.create_task(cores.work(2))
        await asyncio.sleep(2)
        first.cancel()
        await second
        return cores.wide

    assert virtual.run(main()) == (0, pytest.approx(3))


@given(
    count=st.integers(1, 4),
    works=st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=8),
)
def test_cores_do_all_the_work_and_no_more(count: int, works: list[tuple[float, float]]) -> None:
    """Nobody is faster than alone, all together are no faster than the cores, and none is idle without need."""
    found = ends(Cores(count), works)
    for (begin, seconds), end in zip(works, found, strict=True):
        assert end >= begin + seconds - 1e-6
    total, last = sum(seconds for _, seconds in works), max(found)
    assert last - min(begin for begin, _ in works) >= total / count - 1e-6
    assert last <= max(begin for begin, _ in works) + total + 1e-6


# --- a sampler on them ------------------------------------------------------------------------------------------------


def prompt(tokens: int = 1, number: int = 0) -> Prompt:
    return Prompt(id="p", number=number, tokens=np.ones(tokens, np.int32))


def test_steps_grow_with_what_rows_attend_to() -> None:
    """∫ 1 + 0.1·(2 + s) ds over three tokens behind a prompt of two: 3 + 0.6 + 0.45."""
    sampler = SleepSampler(lambda *_: 3, step=lambda _: 1.0, context=0.1)
    _, seconds = virtual.run(sampler.generate(prompt(2), Sampling(max_tokens=9)))
    assert seconds == pytest.approx(4.05)
    assert sampler.context == 0


def test_a_prompt_is_read_once_for_its_group_before_the_next_step() -> None:
    sampler = SleepSampler(lambda *_: 5, step=lambda _: 1.0, read=lambda tokens: 0.5 * tokens)
    _, seconds = virtual.run(sampler.generate(prompt(4), Sampling(max_tokens=9, group=3)))
    assert seconds == pytest.approx(4 * 0.5 + 5)


@pytest.mark.parametrize(("rebuilds", "again"), [(True, 4 + 2 * 3), (False, 0)])
def test_a_publish_reads_running_prefixes_again(rebuilds: bool, again: int) -> None:
    """Two rows of three tokens each behind a prompt of four, which is read once."""
    sampler = SleepSampler(
        lambda *_: 6, step=lambda _: 1.0, load=0.25, read=lambda tokens: 0.1 * tokens, rebuilds=rebuilds
    )

    async def main() -> float:
        rolling = asyncio.create_task(sampler.generate(prompt(4), Sampling(max_tokens=9, group=2)))
        await asyncio.sleep(0.4 + 3)
        loaded = await sampler.publish(WeightsRef((), None, 1), "keep")
        await rolling
        return loaded.rebuild

    rebuilt, seconds = virtual.run(main())
    assert rebuilt == pytest.approx(0.1 * again)
    assert seconds == pytest.approx(0.4 + 6 + 0.25 + 0.1 * again)


def test_slots_gather_before_they_are_filled() -> None:
    """Two of three slots are taken at once; the third is not filled a second later, but when another is free, too."""
    lengths = [2, 5, 5]

    async def main(sampler: SleepSampler) -> list[float]:
        async def one(number: int) -> float:
            await asyncio.sleep(number // 2)
            await sampler.generate(prompt(number=number), Sampling(max_tokens=9))
            return asyncio.get_running_loop().time()

        return await asyncio.gather(*(one(number) for number in range(3)))

    for gather, found in ((2, [2, 5, 7]), (0, [2, 5, 6])):
        sampler = SleepSampler(lambda p, _: lengths[p.number], step=lambda _: 1.0, slots=3, gather=gather)
        assert virtual.run(main(sampler))[0] == pytest.approx(found)
