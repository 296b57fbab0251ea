"""Places (name, resources and builder of an engine in its own process), and clients that represent such engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import ConfigError
from slipstream.pipeline.pool import names, scorer_name
from slipstream.plan.engines import EnginesPlan, LearnerPlan, ScorerPlan
from slipstream.protocols import (
    Engines,
    Fingerprint,
    Loaded,
    Metrics,
    Mode,
    Quote,
    Sampling,
    Unscored,
    Weighed,
    WeightsRef,
)
from slipstream.records import ONE, Attempts, Batch, Counts, Group, Handle, Prompt, Rollout, Said
from slipstream.runtimes.exchange import REMINDER, RemoteWorker
from slipstream.runtimes.ranked import RankedLearner

Say = Callable[[str], object]
SHOWN = 5
"""Maximum names in a line that lists many."""


class RemoteSampler(RemoteWorker):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group: list[Handle] = await self.call("generate", prompt, sampling, begun)
        return group

    async def release(self, numbers: Collection[int] = ()) -> None:
        await self.call("release", tuple(numbers))

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        loaded: Loaded = await self.call("publish", weights, mode)
        return loaded


class RemoteScorer(RemoteWorker):
    async def score(self, group: Group) -> list[Handle]:
        scored: list[Handle] = await self.call("score", group)
        return scored

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[Said]:
        said: list[Said] = await self.call("probe", list(texts), attempts)
        return said

    async def relabel(self, group: Group) -> list[Handle]:
        relabelled: list[Handle] = await self.call("relabel", group)
        return relabelled

    async def publish(self, weights: WeightsRef) -> Loaded:
        loaded: Loaded = await self.call("publish", weights)
        return loaded


class RemoteLearner(RemoteWorker):
    async def prepare(self, batch: Batch) -> list[Counts]:
        counts: list[Counts] = await self.call("prepare", batch)
        return counts

    async def accumulate(self, batch: Batch, counts: Counts) -> list[Weighed]:
        weighed: list[Weighed] = await self.call("accumulate", without_bodies(batch), counts)
        return weighed

    async def step(self, counts: Counts = ONE, lr: float = 1.0) -> Metrics:
        metrics: Metrics = await self.call("step", counts, lr)
        return metrics

    async def quote(self, batch: Batch) -> list[Quote]:
        quotes: list[Quote] = await self.call("quote", without_bodies(batch))
        return quotes

    async def weigh(self, batch: Batch) -> list[Weighed]:
        weighed: list[Weighed] = await self.call("weigh", batch)
        return weighed

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        metrics: Metrics = await self.call("compare", batch, teacher)
        return metrics

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        weights, fingerprint = await self.call("export", teacher)
        return weights, fingerprint

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self.call("save", path.absolute(), list(groups), optimizer=optimizer)

    async def restore(self, path: Path) -> Sequence[Group]:
        groups: Sequence[Group] = await self.call("restore", path.absolute())
        return groups


def without_bodies(batch: Batch) -> Batch:
    """Return a batch without bodies, which the learner stored at `prepare`."""
    groups = tuple([Handle(handle.header, None) for handle in group] for group in batch.groups)
    return Batch(groups, batch.update)


@dataclass(frozen=True)
class Place:
    """An engine to be started: name, resources, and the function that builds the engine in its process."""

    kind: type[RemoteWorker]
    name: str
    threads: int
    build: Callable[..., Any]
    meets: bool = False
    """True if the engine is one of several ranks; `build` then also gets the ranks' rendezvous address."""
    teacher: str = ""
    """Teacher of which the engine is a replica; "" for other engines."""
    computes: int = 1
    """Number of devices that the engine's model runs on, each of which may be a GPU; 0 if it runs no model."""

    @property
    def what(self) -> str:
        """Kind of worker that can be scaled, such as "sampler"; "" if more workers of this kind are useless."""
        if self.kind is RemoteSampler:
            return "sampler"
        return f"teacher.{self.teacher}" if self.teacher and self.computes else ""


def construct(what: str, *given: Any) -> Any:
    """Call a function of `build` in the engine's process, so that only this process imports the compute libraries."""
    from slipstream.runtimes import build

    return getattr(build, what)(*given)


def places(plan: EnginesPlan, tokenizer: Tokenizer) -> list[Place]:
    sampler, build = plan.sampler, partial(construct, "SelfGrading", plan.sampler, plan.grader, tokenizer)
    return [
        *learner_places(plan.learner, tokenizer),
        *(
            Place(RemoteSampler, name, sampler.threads, build, computes=sampler.devices)
            for name in names("sampler", sampler.replicas)
        ),
        *scorer_places(plan.scorers, tokenizer),
    ]


def learner_places(plan: LearnerPlan, tokenizer: Tokenizer) -> list[Place]:
    if plan.settings.ranks == 1:
        return [Place(RemoteLearner, "learner", plan.threads, partial(construct, "build_learner", plan, tokenizer))]
    return [
        Place(RemoteLearner, name, plan.threads, partial(construct, "build_rank", plan, tokenizer, rank), meets=True)
        for rank, name in enumerate(names("learner", plan.settings.ranks))
    ]


def scorer_places(scorers: Mapping[str, ScorerPlan], tokenizer: Tokenizer) -> Iterator[Place]:
    """Yield a place per scorer replica. Clients of endpoints also get processes, so records pass unopened."""
    for teacher, scorer in scorers.items():
        build, computes = partial(construct, "build_scorer", scorer, tokenizer), int(bool(scorer.here))
        for name in names(scorer_name(teacher, scorers), scorer.replicas):
            yield Place(RemoteScorer, name, scorer.threads, build, teacher=teacher, computes=computes)


def loading_message(plan: EnginesPlan) -> str:
    teachers = "".join(f" and teacher {scorer.here}" for scorer in plan.scorers.values() if scorer.here)
    return f"loading student {plan.learner.student.name}{teachers}"


def gpus_each(device: str, engines: int, there: float, say: Say) -> int:
    """Return 1 if each engine gets a GPU, else 0; raise a ConfigError if "cuda" is configured but GPUs are too few."""
    if device == "auto":
        if 0 < there < engines:
            say(
                f"running on CPU: {engines} engines need a GPU each, there are {there:.0f}; see runtime.kind = 'inline'"
            )
        return int(there >= engines)
    if not device.startswith("cuda"):
        return 0
    if there < engines:
        raise ConfigError(
            f"runtime.device = 'cuda': {engines} engines need a GPU each, there are {there:.0f}; lower the replicas, "
            "or write runtime.kind = 'inline' to share one"
        )
    return 1


class Vacancy:
    """Place without a worker; `coming` is the worker that is being started in this place, or None."""

    coming: RemoteWorker | None = None


class Staff:
    """Workers and the place of each. A worker that died or hangs can be replaced."""

    def __init__(
        self,
        born: Callable[[Place], RemoteWorker],
        buried: Callable[[Place], None] = lambda _: None,
        takes: Callable[[Place], Mapping[str, float]] = lambda _: {},
        there: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Use `born` to start a process on the resources that its place `takes`, and `buried` to release them."""
        self.born, self.buried, self.takes, self.there = born, buried, takes, there
        self.places = dict[Any, Place]()
        """Place of each worker and of each `Vacancy`."""
        self.kinds = dict[str, Place]()
        """An example place of each kind that can be scaled."""

    def begin(
        self, wanted: Sequence[Place], meeting: Callable[[RemoteWorker], Any], say: Say, still: Say = str
    ) -> None:
        """Start all workers at the same time; `meeting` returns the rendezvous address from the first rank.

        `still` is called whenever the list of pending workers changes, `say` only if loading takes long.
        """
        self.places = {self.born(place): place for place in wanted}
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
        """End a worker, start another one in its place, and return it."""
        if isinstance(worker, RemoteWorker):
            worker.end("another takes its place")
        place = self.places[worker]
        other = self.born(place)
        if isinstance(worker, Vacancy):
            worker.coming = other
        await started(other, place)
        del self.places[worker]
        self.places[other] = place
        return other

    def free(self) -> dict[str, float]:
        """Return the free resources: those that are neither used by workers nor needed by vacancies."""
        found = dict(self.there())
        for worker, place in self.places.items():
            if isinstance(worker, Vacancy) and not (worker.coming and worker.coming.pid):
                for what, number in self.takes(place).items():
                    found[what] = found.get(what, 0.0) - number
        return found

    def hire(self, kind: str, name: str) -> Vacancy:
        """Add a place of this kind, in which `replace` starts a worker."""
        vacancy = Vacancy()
        self.places[vacancy] = replace(self.kinds[kind], name=name)
        return vacancy

    async def dismiss(self, worker: Any) -> None:
        """Remove a worker when it has answered all its calls, or remove a vacancy."""
        if isinstance(worker, RemoteWorker):
            if worker.waiting:
                await asyncio.wait(worker.waiting.values())
            await worker.link.leave(worker)
        self.buried(self.places.pop(worker))


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
    for worker, place in staff.places.items():
        if isinstance(worker, RemoteScorer):
            scorers[place.teacher] = (*scorers.get(place.teacher, ()), worker)
    return Engines(
        samplers=tuple(worker for worker in staff.places if isinstance(worker, RemoteSampler)),
        scorers=scorers or {"": (Unscored(),)},
        learner=join_ranks(plan.learner, [worker for worker in staff.places if isinstance(worker, RemoteLearner)]),
        close=close,
        replace=staff.replace,
        hire=staff.hire,
        dismiss=staff.dismiss,
        takes={kind: staff.takes(place) for kind, place in staff.kinds.items()},
        free=staff.free,
    )


def join_ranks(plan: LearnerPlan, ranks: Sequence[RemoteLearner]) -> RemoteLearner | RankedLearner:
    if len(ranks) == 1:
        return ranks[0]
    learner = plan.settings
    return RankedLearner(ranks, hidden=plan.width, minibatches=learner.minibatches, shared_prompt=learner.shared_prompt)


async def cpu_seconds(engines: Engines) -> dict[str, float]:
    """Return the CPU seconds of every engine that has its own process."""
    learners = engines.learner.ranks if isinstance(engines.learner, RankedLearner) else [engines.learner]
    scorers = [scorer for replicas in engines.scorers.values() for scorer in replicas]
    workers = [w for w in (*engines.samplers, *scorers, *learners) if isinstance(w, RemoteWorker)]
    return {worker.name: await worker.cpu_seconds() for worker in workers}
