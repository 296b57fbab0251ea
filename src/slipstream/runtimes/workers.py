"""Workers: the specification of an engine in its own process, the client of each engine, and their manager."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import ConfigError, WorkerDied
from slipstream.pipeline.pool import names, scorer_name
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.gpus import Crew, problem
from slipstream.protocols import Engines, Learner, MovingScorer, Relabeller, Sampler, Unscored
from slipstream.records import Batch, Handle
from slipstream.runtimes.exchange import REMINDER_INTERVAL, RemoteWorker
from slipstream.runtimes.ranked import RankedLearner
from slipstream.runtimes.time_share import TimeShare

Say = Callable[[str], object]
PARTIES = ("learner", "sampler")
"""Workers that share devices with `runtime.time_share`: all ranks of the learner, and all samplers of the student."""
MAX_LISTED = 5
"""Maximum names in a line that lists many."""


class RemoteSampler(RemoteWorker, Sampler):
    makes = "rollouts"


class RemoteScorer(RemoteWorker, MovingScorer, Relabeller):
    makes = "scores"


class RemoteLearner(RemoteWorker, Learner):
    makes = "weights"

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Send no bodies that the learner stored at `prepare`."""
        if method in ("accumulate", "quote"):
            args = (without_bodies(args[0]), *args[1:])
        return await super().call(method, *args, **options)


def without_bodies(batch: Batch) -> Batch:
    groups = tuple([Handle(handle.header, None) for handle in group] for group in batch.groups)
    return replace(batch, groups=groups)


@dataclass(frozen=True)
class WorkerSpec:
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
    party: str = ""
    """Name of the workers with which it holds shared devices (`runtime.time_share`); "" if it shares none."""

    @property
    def what(self) -> str:
        """Kind of worker that can be scaled, such as "sampler"; "" if more workers of this kind are useless."""
        if self.party:
            return ""
        if self.kind is RemoteSampler:
            return "" if self.teacher or not self.computes else "sampler"
        return f"teacher.{self.teacher}" if self.teacher and self.computes else ""


def construct(what: str, *given: Any) -> Any:
    """Call a function of `build` in the engine's process, so that only this process imports the compute libraries."""
    from slipstream.runtimes import build

    return getattr(build, what)(*given)


def worker_specs(plan: EnginesPlan, tokenizer: Tokenizer) -> list[WorkerSpec]:
    """Return a spec for each engine. Clients of endpoints also get processes, so records pass unopened."""
    learner, sampler = plan.learner, plan.sampler
    learners, samplers = PARTIES if plan.runtime.time_share else ("", "")
    if learner.settings.ranks == 1:
        build = partial(construct, "build_learner", learner, tokenizer)
        found = [WorkerSpec(RemoteLearner, "learner", learner.threads, build, party=learners)]
    else:
        build = partial(construct, "build_rank", learner, tokenizer)
        found = [
            WorkerSpec(RemoteLearner, name, learner.threads, partial(build, rank), meets=True, party=learners)
            for rank, name in enumerate(names("learner", learner.settings.ranks))
        ]
    build = partial(construct, "SelfGrading", sampler, plan.grader, tokenizer)
    for name in names("sampler", sampler.replicas):
        found.append(WorkerSpec(RemoteSampler, name, sampler.threads, build, computes=sampler.devices, party=samplers))
    for teacher, runs in plan.teacher_samplers.items():
        build = partial(construct, "OwnTeacherSampler", runs, tokenizer)
        for name in names(f"sampler-{teacher}", runs.replicas):
            found.append(WorkerSpec(RemoteSampler, name, runs.threads, build, teacher=teacher))
    for teacher, scorer in plan.scorers.items():
        build, computes = partial(construct, "build_scorer", scorer, tokenizer), scorer.devices
        for name in names(scorer_name(teacher, plan.scorers), scorer.replicas):
            found.append(WorkerSpec(RemoteScorer, name, scorer.threads, build, teacher=teacher, computes=computes))
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


class Party:
    """Workers that use their devices in the same turn."""

    def __init__(self, share: TimeShare) -> None:
        self.share, self.workers = share, list[RemoteWorker]()
        share.holders.append(self)

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self.share.turn(self)

    async def offload(self) -> None:
        await self._all("offload")

    async def reload(self) -> None:
        await self._all("reload")

    async def _all(self, method: str) -> None:
        calls = [worker.call(method) for worker in self.workers if not worker.gone]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, WorkerDied):  # the dead have no tensors
                raise error


class Vacancy:
    """Stand-in for a worker that does not run yet; `coming` is the worker that is being started for it, or None."""

    coming: RemoteWorker | None = None
    traffic: ClassVar[Counter[str]] = Counter()


@dataclass(eq=False)
class WorkerManager:
    """Workers and the spec of each. A worker that died or hangs can be replaced."""

    start_worker: Callable[[WorkerSpec], RemoteWorker]
    """Start the process of a worker, on the resources that the worker needs."""
    release: Callable[[WorkerSpec], None] = lambda _: None
    """Release the resources of a worker."""
    resources_of: Callable[[WorkerSpec], Mapping[str, float]] = lambda _: {}
    available: Callable[[], Mapping[str, float]] = dict
    specs: dict[Any, WorkerSpec] = field(default_factory=dict)
    """WorkerSpec of each worker and of each `Vacancy`."""
    kinds: dict[str, WorkerSpec] = field(default_factory=dict)
    """An example spec of each kind that can be scaled."""
    past: Counter[str] = field(default_factory=Counter)
    """Traffic of workers that were replaced or dismissed."""
    parties: dict[str, Party] = field(default_factory=dict)

    def begin(
        self, wanted: Sequence[WorkerSpec], meeting: Callable[[RemoteWorker], Any], say: Say, still: Say = str
    ) -> None:
        """Start all workers at the same time; `meeting` returns the rendezvous address from the first rank.

        `still` is called whenever the list of pending workers changes, `say` only if loading takes long.
        """
        share = TimeShare()
        self.parties = {name: Party(share) for name in {spec.party: None for spec in wanted if spec.party}}
        self.specs = {self.start_worker(spec): spec for spec in wanted}
        self.kinds = {spec.what: spec for spec in wanted if spec.what}
        where = [meeting(worker) for worker, spec in self.specs.items() if spec.meets][:1]
        asyncio.run(self._all_started(where, say, still))

    async def _all_started(self, where: Sequence[Any], say: Say, still: Say) -> None:
        starting = {
            asyncio.create_task(self.wait_until_started(worker, spec, *(where if spec.meets else []))): spec.name
            for worker, spec in self.specs.items()
        }
        while starting:
            still(f"loading {shorten(list(starting.values()))}")
            done, _ = await asyncio.wait(starting, timeout=REMINDER_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                say(f"waiting for {shorten(list(starting.values()))} to load")
            for task in done:
                del starting[task]
                task.result()

    async def replace(self, worker: Any) -> RemoteWorker:
        if isinstance(worker, RemoteWorker):
            worker.end("another takes its place")
        spec = self.specs[worker]
        other = self.start_worker(spec)
        if isinstance(worker, Vacancy):
            worker.coming = other
        await self.wait_until_started(other, spec)
        self.past += worker.traffic
        del self.specs[worker]
        self.specs[other] = spec
        return other

    async def wait_until_started(self, worker: RemoteWorker, spec: WorkerSpec, *args: Any) -> None:
        """Wait until a worker has built its engine, in the turn of its party if it shares devices."""
        party = self.parties.get(spec.party)
        if party is not None:
            worker.turn = party.turn
        async with worker.turn():
            try:
                await worker.link.start(worker, spec.build, *args)
            except BaseException:
                worker.end("it could not start")
                raise
        if party is not None:
            party.workers.append(worker)

    def free(self) -> dict[str, float]:
        """Return the free resources: those that are neither used by workers nor needed by vacancies."""
        found = dict(self.available())
        for worker, spec in self.specs.items():
            if isinstance(worker, Vacancy) and not (worker.coming and worker.coming.pid):
                for what, number in self.resources_of(spec).items():
                    found[what] = found.get(what, 0.0) - number
        return found

    def hire(self, kind: str, name: str) -> Vacancy:
        """Add a worker of this kind, which `replace` starts."""
        vacancy = Vacancy()
        self.specs[vacancy] = replace(self.kinds[kind], name=name)
        return vacancy

    def traffic(self) -> Mapping[str, int]:
        """Return the bytes so far that passed through the coordinator, and that it did not see, by what they are."""
        return sum((worker.traffic for worker in self.specs), self.past)

    async def dismiss(self, worker: Any) -> None:
        """Remove a worker when it has answered all its calls, or remove a vacancy."""
        if isinstance(worker, RemoteWorker):
            if worker.waiting:
                await asyncio.wait(worker.waiting.values())
            await worker.link.leave(worker)
        self.past += worker.traffic
        self.release(self.specs.pop(worker))


def shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def engines_from(plan: EnginesPlan, manager: WorkerManager, close: Callable[[], None]) -> Engines:
    scorers: dict[str, tuple[RemoteScorer, ...]] = {}
    samplers: dict[str, tuple[RemoteSampler, ...]] = {}
    for worker, spec in manager.specs.items():
        if isinstance(worker, RemoteScorer):
            scorers[spec.teacher] = (*scorers.get(spec.teacher, ()), worker)
        elif isinstance(worker, RemoteSampler):
            samplers[spec.teacher] = (*samplers.get(spec.teacher, ()), worker)
    ranks = [worker for worker in manager.specs if isinstance(worker, RemoteLearner)]
    learner: RemoteLearner | RankedLearner = ranks[0]
    if len(ranks) > 1:
        learner = RankedLearner(  # type: ignore[abstract]  # the proxy has all methods
            ranks,
            hidden=plan.learner.width,
            minibatches=plan.learner.settings.minibatches,
            packing=plan.learner.settings.packing,
        )
    return Engines(
        samplers=samplers.pop(""),
        teacher_samplers=samplers,
        scorers=scorers or {"": (Unscored(),)},
        learner=learner,
        close=close,
        replace=manager.replace,
        hire=manager.hire,
        dismiss=manager.dismiss,
        takes={kind: manager.resources_of(spec) for kind, spec in manager.kinds.items()},
        free=manager.free,
        traffic=manager.traffic,
    )


async def cpu_seconds(engines: Engines) -> dict[str, float]:
    """Return the CPU seconds of every engine that has its own process."""
    learners = engines.learner.ranks if isinstance(engines.learner, RankedLearner) else [engines.learner]
    scorers = [scorer for replicas in engines.scorers.values() for scorer in replicas]
    workers = [w for w in (*engines.samplers, *scorers, *learners) if isinstance(w, RemoteWorker)]
    return {worker.name: await worker.cpu_seconds() for worker in workers}
