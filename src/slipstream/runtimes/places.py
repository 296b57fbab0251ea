"""Places (name, resources and builder of an engine in its own process), and clients that represent such engines."""

# mypy: disable-error-code="no-any-return"
# Answers of another process have no static type.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import ConfigError
from slipstream.pipeline.pool import names, scorer_name
from slipstream.plan.engines import EnginesPlan
from slipstream.plan.gpus import Crew, problem
from slipstream.protocols import (
    Engines,
    Fingerprint,
    Loaded,
    Metrics,
    Mode,
    Quote,
    SampleFreshness,
    Sampling,
    Unscored,
    WeightsRef,
)
from slipstream.records import ONE, Attempts, Batch, Counts, Group, Handle, Prompt, Rollout, TextScores
from slipstream.runtimes.exchange import REMINDER, RemoteWorker
from slipstream.runtimes.ranked import RankedLearner

Say = Callable[[str], object]
SHOWN = 5
"""Maximum names in a line that lists many."""


class RemoteSampler(RemoteWorker):
    makes = "rollouts"

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        return await self.call("generate", prompt, sampling, begun)

    async def release(self, numbers: Collection[int] = ()) -> None:
        await self.call("release", tuple(numbers))

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return await self.call("publish", weights, mode)


class RemoteScorer(RemoteWorker):
    makes = "scores"

    async def score(self, group: Group) -> list[Handle]:
        return await self.call("score", group)

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[TextScores]:
        return await self.call("probe", list(texts), attempts)

    async def relabel(self, group: Group) -> list[Handle]:
        return await self.call("relabel", group)

    async def publish(self, weights: WeightsRef) -> Loaded:
        return await self.call("publish", weights)


class RemoteLearner(RemoteWorker):
    makes = "weights"

    async def prepare(self, batch: Batch) -> list[Counts]:
        return await self.call("prepare", batch)

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        return await self.call("accumulate", without_bodies(batch), counts)

    async def step(self, counts: Counts = ONE, lr: float = 1.0) -> Metrics:
        return await self.call("step", counts, lr)

    async def quote(self, batch: Batch) -> list[Quote]:
        return await self.call("quote", without_bodies(batch))

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        return await self.call("weigh", batch)

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        return await self.call("compare", batch, teacher)

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        return await self.call("export", teacher)

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self.call("save", path.absolute(), list(groups), optimizer=optimizer)

    async def restore(self, path: Path) -> Sequence[Group]:
        return await self.call("restore", path.absolute())


def without_bodies(batch: Batch) -> Batch:
    """Return a batch without bodies, which the learner stored at `prepare`."""
    groups = tuple([Handle(handle.header, None) for handle in group] for group in batch.groups)
    return replace(batch, groups=groups)


@dataclass(frozen=True)
class Place:
    kind: type[RemoteWorker]
    name: str
    threads: int
    build: Callable[..., Any]
    meets: bool = False
    """True if the engine is one of several ranks; `build` then also gets the ranks' rendezvous address."""
    teacher: str = ""
    """Teacher whose scorer or sampler the engine is; "" for other engines."""
    computes: int = 1
    """Number of devices that the engine's model runs on, each of which may be a GPU; 0 if it runs no model."""

    @property
    def what(self) -> str:
        """Kind of worker that can be scaled, such as "sampler"; "" if more workers of this kind are useless."""
        if self.kind is RemoteSampler:
            return "" if self.teacher or not self.computes else "sampler"
        return f"teacher.{self.teacher}" if self.teacher and self.computes else ""


def construct(what: str, *given: Any) -> Any:
    """Call a function of `build` in the engine's process, so that only this process imports the compute libraries."""
    from slipstream.runtimes import build

    return getattr(build, what)(*given)


def places(plan: EnginesPlan, tokenizer: Tokenizer) -> list[Place]:
    """Return a place for each engine. Clients of endpoints also get processes, so records pass unopened."""
    learner, sampler = plan.learner, plan.sampler
    if learner.settings.ranks == 1:
        build = partial(construct, "build_learner", learner, tokenizer)
        found = [Place(RemoteLearner, "learner", learner.threads, build)]
    else:
        build = partial(construct, "build_rank", learner, tokenizer)
        found = [
            Place(RemoteLearner, name, learner.threads, partial(build, rank), meets=True)
            for rank, name in enumerate(names("learner", learner.settings.ranks))
        ]
    build = partial(construct, "SelfGrading", sampler, plan.grader, tokenizer)
    for name in names("sampler", sampler.replicas):
        found.append(Place(RemoteSampler, name, sampler.threads, build, computes=sampler.devices))
    for teacher, runs in plan.teacher_samplers.items():
        build = partial(construct, "OwnTeacherSampler", runs, tokenizer)
        for name in names(f"sampler-{teacher}", runs.replicas):
            found.append(Place(RemoteSampler, name, runs.threads, build, teacher=teacher))
    for teacher, scorer in plan.scorers.items():
        build, computes = partial(construct, "build_scorer", scorer, tokenizer), scorer.devices
        for name in names(scorer_name(teacher, plan.scorers), scorer.replicas):
            found.append(Place(RemoteScorer, name, scorer.threads, build, teacher=teacher, computes=computes))
    return found


def loading_message(plan: EnginesPlan) -> str:
    teachers = "".join(f" and teacher {scorer.here}" for scorer in plan.scorers.values() if scorer.here)
    return f"loading student {plan.learner.student.name}{teachers}"


def gpus_each(device: str, crews: Sequence[Crew], machines: Sequence[int], say: Say) -> int:
    """Return 1 if each engine gets its GPUs, else 0; raise a ConfigError if "cuda" is configured and they do not fit.

    `machines` are the numbers of GPUs of all machines.
    """
    if device != "auto" and not device.startswith("cuda"):
        return 0
    why = problem(crews, machines)
    if device == "auto":
        if why and sum(machines):
            say(f"running on CPU: {why}; see runtime.kind = 'inline'")
        return int(not why)
    if why:
        raise ConfigError(
            f"runtime.device = 'cuda': {why}; lower the replicas, or write runtime.kind = 'inline' to share one"
        )
    return 1


class Vacancy:
    """Place without a worker; `coming` is the worker that is being started in this place, or None."""

    coming: RemoteWorker | None = None
    traffic: ClassVar[Counter[str]] = Counter()


@dataclass(eq=False)
class Staff:
    """Workers and the place of each. A worker that died or hangs can be replaced."""

    start_worker: Callable[[Place], RemoteWorker]
    """Start a process for a place, on the resources that the place needs."""
    release: Callable[[Place], None] = lambda _: None
    """Release the resources of a place."""
    resources_of: Callable[[Place], Mapping[str, float]] = lambda _: {}
    available: Callable[[], Mapping[str, float]] = dict
    places: dict[Any, Place] = field(default_factory=dict)
    """Place of each worker and of each `Vacancy`."""
    kinds: dict[str, Place] = field(default_factory=dict)
    """An example place of each kind that can be scaled."""
    past: Counter[str] = field(default_factory=Counter)
    """Traffic of workers that were replaced or dismissed."""

    def begin(
        self, wanted: Sequence[Place], meeting: Callable[[RemoteWorker], Any], say: Say, still: Say = str
    ) -> None:
        """Start all workers at the same time; `meeting` returns the rendezvous address from the first rank.

        `still` is called whenever the list of pending workers changes, `say` only if loading takes long.
        """
        self.places = {self.start_worker(place): place for place in wanted}
        self.kinds = {place.what: place for place in wanted if place.what}
        where = [meeting(worker) for worker, place in self.places.items() if place.meets][:1]
        asyncio.run(self._all_started(where, say, still))

    async def _all_started(self, where: Sequence[Any], say: Say, still: Say) -> None:
        starting = {
            asyncio.create_task(started(worker, place, *(where if place.meets else []))): place.name
            for worker, place in self.places.items()
        }
        while starting:
            still(f"loading {shorten(list(starting.values()))}")
            done, _ = await asyncio.wait(starting, timeout=REMINDER, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                say(f"waiting for {shorten(list(starting.values()))} to load")
            for task in done:
                del starting[task]
                task.result()

    async def replace(self, worker: Any) -> RemoteWorker:
        if isinstance(worker, RemoteWorker):
            worker.end("another takes its place")
        place = self.places[worker]
        other = self.start_worker(place)
        if isinstance(worker, Vacancy):
            worker.coming = other
        await started(other, place)
        self.past += worker.traffic
        del self.places[worker]
        self.places[other] = place
        return other

    def free(self) -> dict[str, float]:
        """Return the free resources: those that are neither used by workers nor needed by vacancies."""
        found = dict(self.available())
        for worker, place in self.places.items():
            if isinstance(worker, Vacancy) and not (worker.coming and worker.coming.pid):
                for what, number in self.resources_of(place).items():
                    found[what] = found.get(what, 0.0) - number
        return found

    def hire(self, kind: str, name: str) -> Vacancy:
        """Add a place of this kind, in which `replace` starts a worker."""
        vacancy = Vacancy()
        self.places[vacancy] = replace(self.kinds[kind], name=name)
        return vacancy

    def traffic(self) -> Mapping[str, int]:
        """Return the bytes so far that passed through the coordinator, and that it did not see, by what they are."""
        return sum((worker.traffic for worker in self.places), self.past)

    async def dismiss(self, worker: Any) -> None:
        """Remove a worker when it has answered all its calls, or remove a vacancy."""
        if isinstance(worker, RemoteWorker):
            if worker.waiting:
                await asyncio.wait(worker.waiting.values())
            await worker.link.leave(worker)
        self.past += worker.traffic
        self.release(self.places.pop(worker))


async def started(worker: RemoteWorker, place: Place, *args: Any) -> RemoteWorker:
    try:
        await worker.link.start(worker, place.build, *args)
    except BaseException:
        worker.end("it could not start")
        raise
    return worker


def shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def engines_from(plan: EnginesPlan, staff: Staff, close: Callable[[], None]) -> Engines:
    scorers: dict[str, tuple[RemoteScorer, ...]] = {}
    samplers: dict[str, tuple[RemoteSampler, ...]] = {}
    for worker, place in staff.places.items():
        if isinstance(worker, RemoteScorer):
            scorers[place.teacher] = (*scorers.get(place.teacher, ()), worker)
        elif isinstance(worker, RemoteSampler):
            samplers[place.teacher] = (*samplers.get(place.teacher, ()), worker)
    ranks = [worker for worker in staff.places if isinstance(worker, RemoteLearner)]
    learner: RemoteLearner | RankedLearner = ranks[0]
    if len(ranks) > 1:
        learner = RankedLearner(
            ranks,
            hidden=plan.learner.width,
            minibatches=plan.learner.settings.minibatches,
            shared_prompt=plan.learner.settings.shared_prompt,
        )
    return Engines(
        samplers=samplers.pop(""),
        teacher_samplers=samplers,
        scorers=scorers or {"": (Unscored(),)},
        learner=learner,
        close=close,
        replace=staff.replace,
        hire=staff.hire,
        dismiss=staff.dismiss,
        takes={kind: staff.resources_of(place) for kind, place in staff.kinds.items()},
        free=staff.free,
        traffic=staff.traffic,
    )


async def cpu_seconds(engines: Engines) -> dict[str, float]:
    """Return the CPU seconds of every engine that has its own process."""
    learners = engines.learner.ranks if isinstance(engines.learner, RankedLearner) else [engines.learner]
    scorers = [scorer for replicas in engines.scorers.values() for scorer in replicas]
    workers = [w for w in (*engines.samplers, *scorers, *learners) if isinstance(w, RemoteWorker)]
    return {worker.name: await worker.cpu_seconds() for worker in workers}
