"""Workers that die or hang at chosen moments."""

import asyncio
from typing import Any

from slipstream.errors import WorkerDied
from slipstream.protocols import Engines, Sampling
from slipstream.records import Group, Handle, Prompt
from slipstream.simulation.timed_engines import SleepSampler
from support.simulated_runs import engines


class Once(SleepSampler):
    """Dies at its fifth prompt; so do those that take its place, as often as is said."""

    deaths = 1

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if self.seated >= 5 and type(self).deaths:
            type(self).deaths -= 1
            self.seated = 10**9
        if self.seated >= 10**9:
            raise WorkerDied("its process is gone")
        return await super().generate(prompt, sampling, begun)


def mortal(deaths: int, *, samplers: int = 1, load: float = 10.0) -> Engines:
    """The first sampler is mortal."""

    class Kind(Once):
        pass

    Kind.deaths = deaths

    async def replace(old: Any) -> Any:
        await asyncio.sleep(load)
        return Kind(lambda *_: 10, step=lambda _: 0.2)

    others = engines(samplers=samplers).samplers[1:]
    made = engines()
    return Engines((Kind(lambda *_: 10, step=lambda _: 0.2), *others), made.scorers, made.learner, made.close, replace)
