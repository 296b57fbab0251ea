"""Every engine in a Ray actor of its own: here, where Ray is started and stopped with the run, or on a cluster.

Placement, processes and the transport of records are Ray's; how calls travel is in `exchange`. Nothing restarts: the
pipeline goes on with the workers that are left.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray.exceptions import RayActorError

from slipstream.engines.base import Engines, Fingerprint, Graded, Loaded, Metrics, Mode, Sampling, Unscored, WeightsRef
from slipstream.engines.native.model import load_config
from slipstream.errors import ConfigError, EngineError, first_line
from slipstream.pipeline.pool import names, scorer_name
from slipstream.plan.engines import EnginesPlan, GraderPlan, LearnerPlan, SamplerPlan, ScorerPlan
from slipstream.records import ONE, Batch, Counts, Group, Handle, Prompt
from slipstream.runtimes.build import build_grader, build_learner, build_rank, build_sampler, build_scorer
from slipstream.runtimes.exchange import RemoteWorker, reason
from slipstream.runtimes.ranked import RankedLearner
from slipstream.tasks.chat import Tokenizer

Say = Callable[[str], None]
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
GOODBYE = 10.0
"""Seconds that engines have to close before their processes are killed."""
KNOCK = 10.0
"""Seconds in which a cluster must accept a connection."""
REMINDER = 60.0
"""Seconds between two lines about actors that have not started."""


class RemoteSampler(RemoteWorker):
    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        group: list[Handle] = await self.call("generate", prompt, sampling)
        return group

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        loaded: Loaded = await self.call("publish", weights, mode)
        return loaded


class RemoteScorer(RemoteWorker):
    async def score(self, group: Group) -> list[Handle]:
        scored: list[Handle] = await self.call("score", group)
        return scored


class RemoteLearner(RemoteWorker):
    async def prepare(self, batch: Batch) -> list[Counts]:
        counts: list[Counts] = await self.call("prepare", batch)
        return counts

    async def accumulate(self, batch: Batch, counts: Counts) -> None:
        """The learner has the bodies since `prepare`."""
        groups = tuple([Handle(handle.header, None) for handle in group] for group in batch.groups)
        await self.call("accumulate", Batch(groups, batch.update), counts)

    async def step(self, counts: Counts = ONE) -> Metrics:
        metrics: Metrics = await self.call("step", counts)
        return metrics

    async def compare(self, batch: Batch) -> Metrics:
        metrics: Metrics = await self.call("compare", batch)
        return metrics

    async def export(self) -> tuple[WeightsRef, Fingerprint]:
        weights, fingerprint = await self.call("export")
        return weights, fingerprint

    async def save(self, path: Path, *, optimizer: bool = True) -> None:
        await self.call("save", path.absolute(), optimizer=optimizer)

    async def restore(self, path: Path) -> None:
        await self.call("restore", path.absolute())


@dataclass(frozen=True)
class Place:
    """An engine to be: its name, what it asks of the cluster, and what builds it, there."""

    kind: type[RemoteWorker]
    name: str
    threads: int
    build: Callable[..., Any]
    meets: bool = False
    """It is one of several ranks: `build` is told where they meet."""
    teacher: str = ""
    """The one of whom it is a replica."""
    computes: int = 1
    """How many devices its model runs on, each of which may be a GPU; none, where it runs no model."""


class SelfGrading(Graded):
    """Rewards are attached where the tokens are."""

    def __init__(self, sampler: SamplerPlan, grader: GraderPlan, tokenizer: Tokenizer) -> None:
        with ExitStack() as stack:
            grading = build_grader(grader, tokenizer)
            stack.callback(grading.close)
            sampling = build_sampler(sampler, tokenizer)
            stack.callback(sampling.close)
            super().__init__(sampling, grading)
            self.close = stack.pop_all().close


def open_engines(plan: EnginesPlan, tokenizer: Tokenizer, *, say: Say = print) -> Engines:
    wanted = places(plan, tokenizer)
    with ExitStack() as stack:
        connect(plan.runtime.address, wanted, stack, say)
        gpus = gpus_each(plan.runtime.device, sum(place.computes for place in wanted), say)
        teachers = "".join(f" and teacher {scorer.here}" for scorer in plan.scorers.values() if scorer.here)
        say(f"loading student {plan.learner.student.name}{teachers}")
        workers = start(wanted, stack, gpus=gpus, say=say)
        opened = stack.pop_all()
    return Engines(
        samplers=tuple(worker for worker in workers if isinstance(worker, RemoteSampler)),
        scorers=by_teacher(wanted, workers) or {"": (Unscored(),)},
        learner=as_one(plan.learner, [worker for worker in workers if isinstance(worker, RemoteLearner)]),
        close=opened.close,
    )


def places(plan: EnginesPlan, tokenizer: Tokenizer) -> list[Place]:
    sampler, build = plan.sampler, partial(SelfGrading, plan.sampler, plan.grader, tokenizer)
    return [
        *learner_places(plan.learner, tokenizer),
        *(
            Place(RemoteSampler, name, sampler.threads, build, computes=sampler.devices)
            for name in names("sampler", sampler.replicas)
        ),
        *scorer_places(plan.scorers, tokenizer),
    ]


def scorer_places(scorers: Mapping[str, ScorerPlan], tokenizer: Tokenizer) -> Iterator[Place]:
    """Of an endpoint, too, the clients are actors: records go there and back without passing through here."""
    for teacher, scorer in scorers.items():
        build, computes = partial(build_scorer, scorer, tokenizer), int(bool(scorer.here))
        for name in names(scorer_name(teacher, scorers), scorer.replicas):
            yield Place(RemoteScorer, name, scorer.threads, build, teacher=teacher, computes=computes)


def by_teacher(wanted: Sequence[Place], workers: Sequence[RemoteWorker]) -> dict[str, tuple[RemoteScorer, ...]]:
    found: dict[str, tuple[RemoteScorer, ...]] = {}
    for place, worker in zip(wanted, workers, strict=True):
        if isinstance(worker, RemoteScorer):
            found[place.teacher] = (*found.get(place.teacher, ()), worker)
    return found


def learner_places(plan: LearnerPlan, tokenizer: Tokenizer) -> list[Place]:
    if plan.settings.ranks == 1:
        return [Place(RemoteLearner, "learner", plan.threads, partial(build_learner, plan, tokenizer))]
    return [
        Place(RemoteLearner, name, plan.threads, partial(build_rank, plan, tokenizer, rank), meets=True)
        for rank, name in enumerate(names("learner", plan.settings.ranks))
    ]


def as_one(plan: LearnerPlan, ranks: Sequence[RemoteLearner]) -> RemoteLearner | RankedLearner:
    if len(ranks) == 1:
        return ranks[0]
    learner, hidden = plan.settings, load_config(plan.student.name).get_text_config().hidden_size
    return RankedLearner(ranks, hidden=hidden, minibatches=learner.minibatches, shared_prompt=learner.shared_prompt)


def connect(address: str | None, wanted: Sequence[Place], stack: ExitStack, say: Say) -> None:
    """Use the Ray of this process, connect to a cluster, or start one here that always has room for them all."""
    cpus = sum(place.threads for place in wanted)
    if not ray.is_initialized():
        stack.callback(ray.shutdown)
        if address is None:
            say("starting Ray")
            start_here(cpus)
        else:
            say(f"connecting to Ray at {address}")
            start_there(address)
    there = has("CPU")
    if there < cpus:
        raise ConfigError(
            f"the engines ask Ray for {cpus} CPUs and it has {there:.0f}: lower runtime.threads or the replicas"
        )


def start_here(cpus: int) -> None:
    """A Ray that only this machine can reach.

    Ray's ports run code for whoever connects. It replaces 127.0.0.1 by an address that others can reach, unless it
    believes that there are no clusters here, as on macOS. A terminal sends Ctrl-\\ to all processes, and Ray's must
    survive it: what is ignored here they ignore, too.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    quit = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        ray.init("local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        signal.signal(signal.SIGQUIT, quit)


def start_there(address: str) -> None:
    try:
        address_there = services.canonicalize_bootstrap_address(address)
        host, _, port = str(address_there).rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK).close()  # Ray itself would try for minutes
        ray.init(address_there, **QUIET)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"runtime.address = {address!r}: no Ray cluster answers there ({first_line(error)}); write the host:port "
            "that `ray start --head` printed, or drop the address to start Ray here"
        ) from None


def has(resource: str) -> float:
    resources: dict[str, float] = dict(ray.cluster_resources())
    return resources.get(resource, 0.0)


def gpus_each(device: str, engines: int, say: Say) -> int:
    """One for each engine, or none."""
    there = has("GPU")
    if device == "auto":
        if 0 < there < engines:
            say(f"running on CPU: {engines} engines need a GPU each, Ray has {there:.0f}; see runtime.kind = 'inline'")
        return int(there >= engines)
    if not device.startswith("cuda"):
        return 0
    if there < engines:
        raise ConfigError(
            f"runtime.device = 'cuda': {engines} engines need a GPU each, Ray has {there:.0f}; lower the replicas, or "
            "write runtime.kind = 'inline' to share one"
        )
    return 1


def start(
    wanted: Sequence[Place], stack: ExitStack, *, gpus: float = 0, cpus: float = 1, say: Say
) -> list[RemoteWorker]:
    """All at the same time. An engine that cannot be built raises here as itself."""
    workers = [
        place.kind(place.name, threads=place.threads, cpus=cpus * place.threads, gpus=gpus * place.computes)
        for place in wanted
    ]
    stack.callback(stop, workers)
    starting = begin(workers, wanted)
    while starting:
        ready, _ = ray.wait(list(starting), timeout=REMINDER)
        if not ready:
            say(f"waiting for Ray to start {', '.join(worker.name for worker in starting.values())}")
        for ref in ready:
            worker = starting.pop(ref)
            try:
                worker.pid = ray.get(ref).get()
            except RayActorError as error:
                raise EngineError(f"{worker.name} died while it was loaded: {reason(error)}") from None
    return workers


def begin(workers: Sequence[RemoteWorker], wanted: Sequence[Place]) -> dict[Any, RemoteWorker]:
    """Ray hands on what the first rank says, when it says it: they load at the same time."""
    both = list(zip(workers, wanted, strict=True))
    ranks = [worker for worker, place in both if place.meets]
    meeting = [worker.host.meet.remote() for worker in ranks[:1]]
    return {worker.host.start.remote(place.build, *(meeting if place.meets else [])): worker for worker, place in both}


def stop(workers: Sequence[RemoteWorker]) -> None:
    closing = [worker.host.close.remote() for worker in workers if worker.pid]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=GOODBYE)
    for worker in workers:
        ray.kill(worker.host)


async def cpu_seconds(engines: Engines) -> dict[str, float]:
    """CPU time that every engine has used so far, with the processes it started and has waited for."""
    learners = engines.learner.ranks if isinstance(engines.learner, RankedLearner) else [engines.learner]
    scorers = [scorer for replicas in engines.scorers.values() for scorer in replicas]
    workers = [w for w in (*engines.samplers, *scorers, *learners) if isinstance(w, RemoteWorker)]
    return {worker.name: await worker.host.cpu_seconds.remote() for worker in workers}
