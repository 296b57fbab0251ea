"""Run every engine in a Ray actor, on a cluster or on this machine, where Ray is started and stopped with the run.

Ray handles placement, processes and the transport of records. Ray restarts nothing by itself: when an actor
dies or hangs, Slipstream creates another actor.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import AllDied, ConfigError, first_line
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.gpus import crews_of
from slipstream.processes import GRACE
from slipstream.protocols import Engines
from slipstream.run_dir.atomic_files import directory_lock, held, writer
from slipstream.runtimes.actor import RayLink
from slipstream.runtimes.exchange import DEFAULT_HEARTBEAT, RemoteWorker
from slipstream.runtimes.workers import (
    Say,
    WorkerManager,
    WorkerSpec,
    engines_from,
    gpus_each,
    loading_message,
    worker_specs,
)

QUIET_OPTIONS: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
MAX_DIRECTORY_LENGTH = 20
"""Longest directory path, in characters, that keeps the names of Ray's sockets within the limit of any system."""
JANITOR = """
sweep() {
  for process in /proc/[0-9]*; do
    grep -qs "^ray\\|^gcs" $process/comm && ls -l $process/fd 2>/dev/null | grep -q "$0/" && kill -9 ${process#/proc/}
  done
  rm -rf "$0"
}
read now || sleep 2
sweep
test "$now" || for more in 1 2 3 4 5; do sleep 1; sweep; done
"""
"""Shell script that removes Ray's processes and files when the coordinator asks for it or has ended."""
RAY_DIRECTORY = "ray-"
"""Prefix of the names of Ray directories that are created here."""
OWN_RESOURCE = "slipstream"
"""Name of a resource that marks a Ray started by this process. Such a Ray has enough CPUs for all engines."""
VITAL_DAEMONS = ("gcs_server", "raylet")
"""Ray daemons that no actor can work without."""
CLUSTER_CONNECT_TIMEOUT = 10.0
"""Seconds in which a cluster must accept a connection."""


def open_engines(
    plan: EnginesPlan, tokenizer: Tokenizer, *, home: ExitStack | None = None, say: Say = print, still: Say = str
) -> Engines:
    """Open all engines. Ray (started or connected here) closes with `home`, or with the engines if `home` is None."""
    wanted = sorted(worker_specs(plan, tokenizer), key=lambda spec: -spec.computes)  # Ray places the largest first
    with ExitStack() as stack:
        connect(plan.runtime.address, wanted, home or stack, say)
        gpus = gpus_each(plan.runtime.device, crews_of(plan), machines(), say)
        say(loading_message(plan))
        cpus = 0 if resource_count(OWN_RESOURCE) else 1
        manager = start(wanted, stack, gpus=gpus, cpus=cpus, heartbeat=plan.runtime.heartbeat, say=say, still=still)
        return engines_from(plan, manager, stack.pop_all().close)


def connect(address: str | None, wanted: Sequence[WorkerSpec], stack: ExitStack, say: Say) -> None:
    """Use the Ray of this process, or connect to a cluster, or start a Ray here with enough CPUs for all engines."""
    cpus = sum(spec.threads for spec in wanted)
    if ray.is_initialized() and (ended_daemon() or (daemons() and not resource_count(OWN_RESOURCE))):
        stack.close()  # a vital daemon has ended, or hangs and was given up by Ray
    if not ray.is_initialized():
        ray_worker._worker_logs_enabled = False  # Slipstream reports failures of daemons itself
        here = stack.enter_context(directory()) if address is None else ""
        stack.callback(shut_down)
        if address is None:
            say("starting Ray")
            start_here(cpus, here)
        else:
            say(f"connecting to Ray at {address}")
            start_there(address)
    there = resource_count("CPU")
    if there < cpus:
        raise ConfigError(
            f"the engines ask Ray for {cpus} CPUs and it has {there:.0f}: lower runtime.threads or the replicas"
        )


@contextmanager
def directory() -> Iterator[str]:
    """Make a directory for Ray's sockets and logs; a separate process removes it with all that is left of Ray.

    If that process is killed too, the next run removes the directory, because its lock is then no longer held.
    """
    usual = tempfile.gettempdir()
    where = Path(usual if len(usual) <= MAX_DIRECTORY_LENGTH else "/tmp")
    for left in where.glob(f"{RAY_DIRECTORY}*"):  # a directory without a lock is foreign or just being created
        if writer(left) and held(left) is False and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=RAY_DIRECTORY, dir=where)
    with (
        directory_lock(Path(path)),
        Popen(["sh", "-c", JANITOR, path], stdin=PIPE, start_new_session=True) as janitor,
    ):
        try:
            yield path
        finally:
            janitor.communicate(b"now\n")


def start_here(cpus: int, path: str) -> None:
    """Start a Ray that only this machine can reach.

    Ray's ports run code for clients with a token. By default Ray would keep the token in a file that all users may
    read. Ray replaces 127.0.0.1 by a public address unless it believes that clusters are impossible, as on macOS. A
    terminal's quit signal goes to all processes; Ray's processes ignore the signal only if it is ignored here when they
    start.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    quit = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        ray.init(
            "local",
            num_cpus=cpus,
            resources={OWN_RESOURCE: 1},
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=path,
            **QUIET_OPTIONS,
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        signal.signal(signal.SIGQUIT, quit)


def shut_down() -> None:
    """Shut Ray down; kill its daemons after GRACE seconds, because Ray waits forever for a stopped daemon."""
    ours = daemons()
    impatient = threading.Timer(GRACE, lambda: [daemon.kill() for daemon in ours])
    impatient.start()
    try:
        ray.shutdown()
    finally:
        impatient.cancel()


def daemons() -> list[Any]:
    """Return the daemon processes of the Ray that was started here; an empty list if there is none."""
    node = ray_worker._global_node
    return [info.process for infos in node.all_processes.values() for info in infos] if node else []


def ended_daemon() -> str:
    """Return the name of a vital daemon that has ended, or "". Ray itself would end this process a minute later."""
    node = ray_worker._global_node
    return next((kind for kind, _ in node.dead_processes() if kind in VITAL_DAEMONS), "") if node else ""


def start_there(address: str) -> None:
    try:
        address_there = services.canonicalize_bootstrap_address(address)
        host, _, port = str(address_there).rpartition(":")
        socket.create_connection((host, int(port)), timeout=CLUSTER_CONNECT_TIMEOUT).close()  # Ray retries for minutes
        ray.init(address_there, **QUIET_OPTIONS)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"runtime.address = {address!r}: no Ray cluster answers there ({first_line(error)}); write the host:port "
            "that `ray start --head` printed, or drop the address to start Ray here"
        ) from None


def resource_count(resource: str) -> float:
    resources: dict[str, float] = dict(ray.cluster_resources())
    return resources.get(resource, 0.0)


def machines() -> list[int]:
    """Return the number of GPUs of each machine of the cluster."""
    return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def start(
    wanted: Sequence[WorkerSpec],
    stack: ExitStack,
    *,
    gpus: float = 0,
    cpus: float = 1,
    heartbeat: float = DEFAULT_HEARTBEAT,
    say: Say,
    still: Say = str,
) -> WorkerManager:
    links: list[RayLink] = []
    stack.callback(stop, links)

    def resources_of(spec: WorkerSpec) -> dict[str, float]:
        return {"CPU": cpus * spec.threads, "GPU": gpus * spec.computes}

    def start_worker(spec: WorkerSpec) -> RemoteWorker:
        if daemon := ended_daemon():
            raise AllDied(f"{spec.name} cannot start: {daemon}, a daemon of Ray, has ended")
        links.append(RayLink(spec, resources_of(spec), ended_daemon))
        return spec.kind(spec.name, links[-1], heartbeat)

    def meeting(first: RemoteWorker) -> Any:
        """Return an ObjectRef of the rendezvous address, so that the other ranks need not wait for the first."""
        assert isinstance(first.link, RayLink)
        return first.link.actor.meet.remote()

    manager = WorkerManager(start_worker, resources_of=resources_of, available=ray.available_resources)
    manager.begin(wanted, meeting, say, still)
    return manager


def stop(links: Sequence[RayLink]) -> None:
    if ended_daemon():
        return
    closing = [link.actor.close.remote() for link in links if link.pid]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=GRACE)
    for link in links:
        ray.kill(link.actor)
