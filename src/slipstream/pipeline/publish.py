"""Samplers and teachers of the run, and the publish of new weights to samplers and to teachers that follow the student.

A publish stops new groups (`Admission.gated`), pauses engines, loads and checks the weights, and resumes. This module
guarantees that every engine runs the exported weights: the fingerprint of the loaded weights must equal the learner's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.config.teacher import TeacherConfig
from slipstream.errors import ModelError, RecordsLost, WorkerDied
from slipstream.metrics import Metrics
from slipstream.pipeline.failures import ResponseWatch
from slipstream.pipeline.groups import Groups
from slipstream.pipeline.pool import Pool, Worker
from slipstream.pipeline.trace import Track
from slipstream.protocols import Fingerprint, Learner, Loaded, Mode, MovingScorer, Sampler, WeightsRef

Moving = TypeVar("Moving", Sampler, MovingScorer)


async def load(sampler: Sampler, name: str, weights: WeightsRef, expected: Fingerprint, *, mode: Mode) -> Loaded:
    """Load weights into one sampler; raise ModelError if its fingerprint differs."""
    consequence = "its rollouts would be from another policy than recorded"
    remedy = "check that its model is the student and its dtype is sampler.dtype"
    loaded = await sampler.publish(weights, mode)
    return with_fingerprint(loaded, expected, name, weights.version, f"{consequence}; {remedy}")


async def load_teacher(scorer: MovingScorer, name: str, weights: WeightsRef, expected: Fingerprint) -> Loaded:
    loaded = await scorer.publish(weights)
    consequence = "its scores would be of another teacher than recorded"
    return with_fingerprint(loaded, expected, name, weights.version, consequence)


def with_fingerprint(loaded: Loaded, expected: Fingerprint, name: str, version: int, consequence: str) -> Loaded:
    if loaded.fingerprint != expected:
        raise ModelError(
            f"publish of version {version}: {name} runs weights {loaded.fingerprint}, the learner exported "
            f"{expected}: {consequence}"
        )
    return loaded


class Newest(Pool[Moving]):
    """A pool whose workers all run the newest weights, including workers that start later."""

    newest: tuple[WeightsRef, Fingerprint] | None = None
    """Newest weights, for workers that start later; None before the first publish or if no worker can start later."""
    version = 0
    """Version of the weights that all workers have or are loading."""

    async def publish(self, weights: WeightsRef, expected: Fingerprint, *, version: int, mode: Mode) -> list[Loaded]:
        """Load weights into all workers at the same time; raise ModelError if `weights` has another version."""
        if weights.version != version:
            raise ModelError(
                f"publish of version {version}: the learner exported its weights after update {weights.version}"
            )
        self.version = version
        if self.engines.replace is not None:
            self.newest = weights, expected
        results: list[Loaded] = []

        async def publish_to(worker: Worker[Moving]) -> None:
            try:
                # a draining engine continues to work until no request runs; other modes pause all requests
                worker.track.begin(f"publish {version}", "other" if mode == "drain" else "pause")
                loaded = await self.load(worker, weights, expected, mode)
            except WorkerDied as error:
                self.handle_death(worker, error)
                return
            except RecordsLost as error:  # the weights are lost because the learner's machine is gone
                raise WorkerDied(str(error)) from None
            finally:
                worker.track.end(f"publish {version}")
            worker.track.relabel(f"{self.stage} v{version}")
            results.append(loaded)

        async with asyncio.TaskGroup() as tasks:
            for worker in list(self.workers):
                tasks.create_task(publish_to(worker))
        return results

    async def load(self, worker: Worker[Moving], weights: WeightsRef, expected: Fingerprint, mode: Mode) -> Loaded:
        raise NotImplementedError

    async def prepare(self, worker: Worker[Moving]) -> None:
        """Load the newest weights into a new worker; repeat this if newer weights were published during the load."""
        loaded = None
        while self.newest is not loaded:
            loaded = self.newest
            assert loaded is not None, "no worker joins before the first publish"
            weights, expected = loaded
            await self.load(worker, weights, expected, "drain")
            worker.track.label = f"{self.stage} v{weights.version}"


class SamplerPool(Pool[Sampler]):
    """A pool of samplers, which hand over their unfinished rollouts before they leave or pause."""

    async def release_work(self, worker: Worker[Sampler]) -> None:
        try:
            await worker.engine.release()
        except WorkerDied as error:
            self.handle_death(worker, error)


class TeacherSamplers(SamplerPool):
    """Samplers with the constant weights of a teacher."""


class Samplers(Newest[Sampler], SamplerPool):
    async def load(self, worker: Worker[Sampler], weights: WeightsRef, expected: Fingerprint, mode: Mode) -> Loaded:
        return await load(worker.engine, worker.name, weights, expected, mode=mode)


class MovingTeacher(Newest[MovingScorer]):
    """The scorers of a teacher that follows the student."""

    async def load(
        self, worker: Worker[MovingScorer], weights: WeightsRef, expected: Fingerprint, mode: Mode
    ) -> Loaded:
        return await load_teacher(worker.engine, worker.name, weights, expected)


NO_TEACHER = TeacherConfig(model="none", recheck=0)
"""Settings in a run without teachers."""


@dataclass(frozen=True)
class Teacher:
    name: str
    settings: TeacherConfig
    pool: Pool[Any]
    shows: tuple[str, ...] = ()
    """Fields of `Attempts` in the context of this teacher."""
    silence: ResponseWatch | None = None
    """Warns if the teacher's endpoint does not answer; None for a teacher without endpoint."""

    @property
    def follows(self) -> bool:
        return isinstance(self.pool, MovingTeacher)


def publish_metrics(results: list[Loaded], weights: WeightsRef) -> Metrics:
    drafted, accepted = (sum(getattr(loaded, name) for loaded in results) for name in ("drafted", "accepted"))
    speculation = {"sampler/drafted": float(drafted), "sampler/accepted": accepted / drafted} if drafted else {}
    return {
        **speculation,
        "publish/bytes": float(len(results) * sum(tensor.nbytes for tensor in weights.manifest)),
        "publish/wait": max((loaded.wait for loaded in results), default=0.0),
        "publish/load": max((loaded.load for loaded in results), default=0.0),
        "publish/rebuild": max((loaded.rebuild for loaded in results), default=0.0),
        "thrown_tokens": float(sum(loaded.thrown for loaded in results)),
    }


# --- the stage that delivers weights ---------------------------------------------------------------------------------


@dataclass
class Publishing:
    learner: Learner
    track: Track
    samplers: Samplers
    teachers: Collection[Teacher]
    groups: Groups
    after_publish: Callable[[], Awaitable[None]]
    """Called when every sampler has the newest weights, before a group starts under them."""

    async def begin(self) -> None:
        """Give all samplers and all following teachers their first weights."""
        weights, expected = await self.export()
        await self.samplers.publish(weights, expected, version=self.groups.admission.version, mode="drain")
        await asyncio.gather(*await self.move_teachers(first=True))

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        with self.track.busy("export", "other"):
            return await self.learner.export(teacher)

    async def move_teachers(self, *, first: bool = False) -> list[asyncio.Task[None]]:
        """Start to publish weights to teachers that follow the student and are due (`first`: all); return the tasks."""
        version, moving = self.groups.admission.version, list[asyncio.Task[None]]()
        for teacher in self.teachers:
            follow = teacher.settings.follow
            if follow is not None and (first or version % follow.period == 0):
                weights, expected = await self.export(teacher.name)
                while first and weights.version < version - version % follow.period:
                    # after a resume, earlier versions, which scored groups in flight, come first
                    loaded = weights.version
                    await self._load(teacher, weights, expected, loaded)
                    weights, expected = await self.export(teacher.name)
                    if weights.version == loaded:  # the newest, if the period was changed
                        break
                due = weights.version if first else version
                moving.append(self.groups.task_group.create_task(self._move(teacher, weights, expected, due)))
        return moving

    async def _move(self, teacher: Teacher, weights: WeightsRef, expected: Fingerprint, version: int) -> None:
        clock = self.track.trace.now
        began = clock()
        await self._load(teacher, weights, expected, version)
        self.groups.ledger.add_move(teacher.name, version, clock() - began)

    async def _load(self, teacher: Teacher, weights: WeightsRef, expected: Fingerprint, version: int) -> None:
        assert isinstance(teacher.pool, MovingTeacher)
        await teacher.pool.publish(weights, expected, version=version, mode="drain")

    async def deliver(self, weights: WeightsRef, expected: Fingerprint, moving: Sequence[asyncio.Task[None]]) -> None:
        """Publish to all samplers, and wait for moving teachers; then return credits and let groups start again."""
        admission, clock = self.groups.admission, self.track.trace.now
        began = clock()
        loaded = await self.samplers.publish(
            weights, expected, version=admission.version, mode=admission.schedule.publish
        )
        self.groups.ledger.add_publish(publish_metrics(loaded, weights) | {"seconds/publish": clock() - began})
        await asyncio.gather(*moving)
        await self.after_publish()
        admission.publish()
        self.groups.resume()
