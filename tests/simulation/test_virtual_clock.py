"""The virtual clock: time passes as asked, in order, and a deadlock is found at once."""

import asyncio
import time

import pytest

from slipstream.simulation.virtual_clock import Deadlock, run


def test_sleeping_for_hours_takes_no_time_and_keeps_the_order() -> None:
    order: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    async def main() -> None:
        await asyncio.gather(sleeper("c", 7200), sleeper("a", 0.5), sleeper("b", 3600))

    began = time.perf_counter()
    _, seconds = run(main())
    assert order == ["a", "b", "c"] and seconds == pytest.approx(7200)
    assert time.perf_counter() - began < 60, "virtual hours"


def test_a_deadlock_raises_instead_of_hanging() -> None:
    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"at 3\.000 virtual seconds"):
        run(main())


def test_timeouts_work_on_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), timeout=7)
        return asyncio.get_running_loop().time()

    assert run(main())[0] == pytest.approx(7)


def test_real_work_in_threads_is_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="engines that only sleep"):
        run(main())
