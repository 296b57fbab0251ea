"""Every engine in a Ray actor of its own: on a cluster, or here, where Ray is started and stopped with the run.

Placement, processes and the transport of records are Ray's. Nothing restarts: the pipeline goes on with the workers
that are left.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray._private import ray_constants, services
from ray.exceptions import RayActorError

from slipstream.engines.base import Engines
from slipstream.errors import ConfigError, EngineError, first_line
from slipstream.plan.engines import EnginesPlan
from slipstream.runtimes.actor import RayLink, reason
from slipstream.runtimes.exchange import GOODBYE, REMINDER, RemoteWorker
from slipstream.runtimes.places import Place, Say, engines_from, gpus_each, loading, places
from slipstream.tasks.chat import Tokenizer

QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
KNOCK = 10.0
"""Seconds in which a cluster must accept a connection."""


def open_engines(plan: EnginesPlan, tokenizer: Tokenizer, *, say: Say = print) -> Engines:
    wanted = places(plan, tokenizer)
    with ExitStack() as stack:
        connect(plan.runtime.address, wanted, stack, say)
        gpus = gpus_each(plan.runtime.device, sum(place.computes for place in wanted), has("GPU"), say)
        say(loading(plan))
        workers = start(wanted, stack, gpus=gpus, say=say)
        return engines_from(plan, wanted, workers, stack.pop_all().close)


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


def start(
    wanted: Sequence[Place], stack: ExitStack, *, gpus: float = 0, cpus: float = 1, say: Say
) -> list[RemoteWorker]:
    """All at the same time. An engine that cannot be built raises here as itself."""
    links = [
        RayLink(place.name, threads=place.threads, cpus=cpus * place.threads, gpus=gpus * place.computes)
        for place in wanted
    ]
    stack.callback(stop, links)
    starting = begin(links, wanted)
    while starting:
        ready, _ = ray.wait(list(starting), timeout=REMINDER)
        if not ready:
            say(f"waiting for Ray to start {', '.join(place.name for _, place in starting.values())}")
        for ref in ready:
            link, place = starting.pop(ref)
            try:
                link.pid = ray.get(ref).get()
            except RayActorError as error:
                raise EngineError(f"{place.name} died while it was loaded: {reason(error)}") from None
    return [place.kind(place.name, link) for place, link in zip(wanted, links, strict=True)]


def begin(links: Sequence[RayLink], wanted: Sequence[Place]) -> dict[Any, tuple[RayLink, Place]]:
    """Ray hands on what the first rank says, when it says it: they load at the same time."""
    both = list(zip(links, wanted, strict=True))
    ranks = [link for link, place in both if place.meets]
    meeting = [link.actor.meet.remote() for link in ranks[:1]]
    return {
        link.actor.start.remote(place.build, *(meeting if place.meets else [])): (link, place) for link, place in both
    }


def stop(links: Sequence[RayLink]) -> None:
    closing = [link.actor.close.remote() for link in links if link.pid]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=GOODBYE)
    for link in links:
        ray.kill(link.actor)
