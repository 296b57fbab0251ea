"""New weights into the samplers: gate, pause, load, check, resume.

The gate is `admission`'s, pausing and resuming is the sampler's. Guarantor that what rolls out is what was learned: the
fingerprint of what every sampler will really run must be the learner's.
"""

from __future__ import annotations

import asyncio

from slipstream.engines.base import Fingerprint, Loaded, Mode, Sampler, WeightsRef
from slipstream.errors import ModelError, WorkerDied
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


async def publish(
    samplers: Pool[Sampler], weights: WeightsRef, expected: Fingerprint, *, version: int, mode: Mode
) -> Metrics:
    """Load weights into all samplers at the same time; returns how long the slowest of them stood still, and why.

    `version` is the one that is due.
    """
    if weights.version != version:
        raise ModelError(
            f"publish of version {version}: the learner exported its weights after update {weights.version}"
        )
    done: list[Loaded] = []

    async def one(worker: Worker[Sampler]) -> None:
        try:
            # what drains goes on rolling out until nothing runs; else all that runs stands still
            worker.track.begin(f"publish {version}", "other" if mode == "drain" else "pause")
            loaded = await load(worker.engine, worker.name, weights, expected, mode=mode)
        except WorkerDied as error:
            samplers.bury(worker, error)
            return
        finally:
            worker.track.end(f"publish {version}")
        worker.track.relabel(f"rollout v{version}")
        done.append(loaded)

    async with asyncio.TaskGroup() as tasks:
        for worker in list(samplers.workers):
            tasks.create_task(one(worker))
    return {
        "publish/wait": max(loaded.wait for loaded in done),
        "publish/load": max(loaded.load for loaded in done),
        "publish/rebuild": max(loaded.rebuild for loaded in done),
        "thrown_tokens": float(sum(loaded.thrown for loaded in done)),
    }
