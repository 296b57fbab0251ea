"""New weights into the samplers, and into the scorers of teachers that follow: gate, pause, load, check, resume.

The gate is `admission`'s, pausing and resuming is the engine's. Guarantor that what rolls out is what was learned, and
that a teacher which follows is what its scores say: the fingerprint of what every one of them will really run must be
the learner's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

from slipstream.errors import ModelError, RecordsLost, WorkerDied
from slipstream.metrics import Metrics
from slipstream.pipeline.pool import Pool, Worker
from slipstream.protocols import Fingerprint, Loaded, Mode, MovingScorer, Sampler, WeightsRef

E = TypeVar("E", Sampler, MovingScorer)


async def load(sampler: Sampler, name: str, weights: WeightsRef, expected: Fingerprint, *, mode: Mode) -> Loaded:
    """Into one sampler, which says what it runs now."""
    return proven(
        await sampler.publish(weights, mode),
        name,
        weights,
        expected,
        "its rollouts would be from another policy than recorded; is its model the student, and its dtype "
        "sampler.dtype?",
    )


async def load_teacher(scorer: MovingScorer, name: str, weights: WeightsRef, expected: Fingerprint) -> Loaded:
    return proven(
        await scorer.publish(weights), name, weights, expected, "its scores would be of another teacher than recorded"
    )


def proven(loaded: Loaded, name: str, weights: WeightsRef, expected: Fingerprint, so: str) -> Loaded:
    if loaded.fingerprint != expected:
        raise ModelError(
            f"publish of version {weights.version}: {name} runs weights {loaded.fingerprint}, the learner exported "
            f"{expected}: {so}"
        )
    return loaded


class Newest(Pool[E]):
    """A pool in which everybody runs the newest weights, whoever comes when."""

    newest: tuple[WeightsRef, Fingerprint] | None = None
    """For those who come later; kept only if any may."""
    version = 0
    """Of the weights that are in all of them, or on the way there."""

    async def publish(self, weights: WeightsRef, expected: Fingerprint, *, version: int, mode: Mode) -> list[Loaded]:
        """Load weights into all of them at the same time; `version` is the one that is due."""
        if weights.version != version:
            raise ModelError(
                f"publish of version {version}: the learner exported its weights after update {weights.version}"
            )
        self.version = version
        if self.engines.replace is not None:
            self.newest = weights, expected
        done: list[Loaded] = []

        async def one(worker: Worker[E]) -> None:
            try:
                # what drains goes on with its work until nothing runs; else all that runs stands still
                worker.track.begin(f"publish {version}", "other" if mode == "drain" else "pause")
                loaded = await self.load(worker, weights, expected, mode)
            except WorkerDied as error:
                self.bury(worker, error)
                return
            except RecordsLost as error:  # the learner's machine is gone, and it with it
                raise WorkerDied(str(error)) from None
            finally:
                worker.track.end(f"publish {version}")
            worker.track.relabel(f"{self.stage} v{version}")
            done.append(loaded)

        async with asyncio.TaskGroup() as tasks:
            for worker in list(self.workers):
                tasks.create_task(one(worker))
        return done

    async def load(self, worker: Worker[E], weights: WeightsRef, expected: Fingerprint, mode: Mode) -> Loaded:
        raise NotImplementedError

    async def welcome(self, worker: Worker[E]) -> None:
        """The newest weights, and those that are published while it loads them."""
        loaded = None
        while self.newest is not loaded:
            loaded = self.newest
            assert loaded is not None, "nobody is welcomed before the first publish"
            weights, expected = loaded
            await self.load(worker, weights, expected, "drain")
            worker.track.label = f"{self.stage} v{weights.version}"


class Samplers(Newest[Sampler]):
    async def load(self, worker: Worker[Sampler], weights: WeightsRef, expected: Fingerprint, mode: Mode) -> Loaded:
        return await load(worker.engine, worker.name, weights, expected, mode=mode)

    async def relieve(self, worker: Worker[Sampler]) -> None:
        """What is half rolled out goes on elsewhere."""
        with suppress(WorkerDied):
            await worker.engine.release()


class MovingTeacher(Newest[MovingScorer]):
    """The scorers of a teacher that follows the student."""

    async def load(
        self, worker: Worker[MovingScorer], weights: WeightsRef, expected: Fingerprint, mode: Mode
    ) -> Loaded:
        return await load_teacher(worker.engine, worker.name, weights, expected)


def told(done: list[Loaded]) -> Metrics:
    """How long the slowest of the samplers stood still, and why."""
    return {
        "publish/wait": max((loaded.wait for loaded in done), default=0.0),
        "publish/load": max((loaded.load for loaded in done), default=0.0),
        "publish/rebuild": max((loaded.rebuild for loaded in done), default=0.0),
        "thrown_tokens": float(sum(loaded.thrown for loaded in done)),
    }
