"""New weights into the samplers: gate, pause, load, check, resume.

The gate is `admission`'s, pausing and resuming is the sampler's. Guarantor that what rolls out is what was learned: the
fingerprint of what every sampler will really run must be the learner's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from slipstream.engines.base import Fingerprint, Loaded, Mode, Sampler, WeightsRef
from slipstream.errors import ModelError, RecordsLost, WorkerDied
from slipstream.metrics import Metrics
from slipstream.pipeline.pool import Pool, Worker


async def load(sampler: Sampler, name: str, weights: WeightsRef, expected: Fingerprint, *, mode: Mode) -> Loaded:
    """Into one sampler, which says what it runs now."""
    loaded = await sampler.publish(weights, mode)
    if loaded.fingerprint != expected:
        raise ModelError(
            f"publish of version {weights.version}: {name} runs weights {loaded.fingerprint}, the learner exported "
            f"{expected}: its rollouts would be from another policy than recorded; is its model the student, and its "
            "dtype sampler.dtype?"
        )
    return loaded


class Samplers(Pool[Sampler]):
    """A pool in which everybody runs the newest weights, whoever comes when."""

    newest: tuple[WeightsRef, Fingerprint] | None = None
    """For those who come later; kept only if any may."""
    version = 0
    """Of the weights that are in all of them, or on the way there."""

    async def publish(self, weights: WeightsRef, expected: Fingerprint, *, version: int, mode: Mode) -> Metrics:
        """Load weights into all samplers at the same time; returns how long the slowest of them stood still, and why.

        `version` is the one that is due.
        """
        if weights.version != version:
            raise ModelError(
                f"publish of version {version}: the learner exported its weights after update {weights.version}"
            )
        self.version = version
        if self.engines.replace is not None:
            self.newest = weights, expected
        done: list[Loaded] = []

        async def one(worker: Worker[Sampler]) -> None:
            try:
                # what drains goes on rolling out until nothing runs; else all that runs stands still
                worker.track.begin(f"publish {version}", "other" if mode == "drain" else "pause")
                loaded = await load(worker.engine, worker.name, weights, expected, mode=mode)
            except WorkerDied as error:
                self.bury(worker, error)
                return
            except RecordsLost as error:  # the learner's machine is gone, and it with it
                raise WorkerDied(str(error)) from None
            finally:
                worker.track.end(f"publish {version}")
            worker.track.relabel(f"rollout v{version}")
            done.append(loaded)

        async with asyncio.TaskGroup() as tasks:
            for worker in list(self.workers):
                tasks.create_task(one(worker))
        return {
            "publish/wait": max((loaded.wait for loaded in done), default=0.0),
            "publish/load": max((loaded.load for loaded in done), default=0.0),
            "publish/rebuild": max((loaded.rebuild for loaded in done), default=0.0),
            "thrown_tokens": float(sum(loaded.thrown for loaded in done)),
        }

    async def welcome(self, worker: Worker[Sampler]) -> None:
        """The newest weights, and those that are published while it loads them."""
        loaded = None
        while self.newest is not loaded:
            loaded = self.newest
            assert loaded is not None, "nobody is welcomed before the first publish"
            weights, expected = loaded
            await load(worker.engine, worker.name, weights, expected, mode="drain")
            worker.track.label = f"rollout v{weights.version}"

    async def relieve(self, worker: Worker[Sampler]) -> None:
        """What is half rolled out goes on elsewhere."""
        with suppress(WorkerDied):
            await worker.engine.release()
