"""Simulated runs whose number of workers can change."""

import asyncio
from typing import Any

from slipstream.protocols import Engines
from slipstream.simulation.timed_engines import SleepSampler
from support.simulated_runs import engines


def scalable(length: Any = lambda *_: 10, *, most: float = 9, in_vain: bool = False, **costs: Any) -> Engines:
    """One sampler, and as many more as there is room for, which take ten seconds to load, if they can."""
    made = engines(length, **costs)
    first = made.samplers[0]
    assert isinstance(first, SleepSampler)
    room = [most - 1]

    async def another(before: Any) -> Any:
        await asyncio.sleep(10.0)
        if in_vain:
            raise MemoryError("no room")
        return SleepSampler(first.length, step=first.step, slots=first.slots)

    def hire(kind: str, name: str) -> None:
        room[0] -= 1

    async def dismiss(engine: SleepSampler | None) -> None:
        assert engine is None or not (engine.count or engine.waiting)
        room[0] += 1

    return Engines(
        made.samplers,
        made.scorers,
        made.learner,
        made.close,
        replace=another,
        hire=hire,
        dismiss=dismiss,
        takes={"sampler": {"CPU": 1.0}},
        free=lambda: {"CPU": room[0]},
    )
