"""Run every engine in a process of its own on this machine: no daemon, no port, no file.

Calls and answers use socket pairs. Records and weights are in shared memory that their producer writes and their
readers map; the coordinator has descriptors only. A worker that died or hangs can be
replaced. All processes end with the coordinator (`launcher` explains how).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from socket import socket, socketpair
from subprocess import Popen
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.http.client import TAKEN
from slipstream.engines.shared_memory import Mapped
from slipstream.errors import AllDied, ConfigError, EngineError
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.gpus import crews_of, sum_line, unused_line
from slipstream.processes import GRACE, exit_text, kill, start_python
from slipstream.protocols import Engines
from slipstream.runtimes.channel import Channel
from slipstream.runtimes.exchange import DEFAULT_HEARTBEAT, Answer, Body, RemoteWorker, number_bundles
from slipstream.runtimes.launcher import LIST_GPUS, ProcessSettings, run_launcher
from slipstream.runtimes.workers import (
    PARTIES,
    Say,
    WorkerManager,
    WorkerSpec,
    construct,
    engines_from,
    gpus_each,
    loading_message,
    worker_specs,
)

LAUNCHER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of the launcher: its imports must not start threads, and `torch.cuda.is_available` must not call CUDA.

Engines set their own number of threads.
"""
FIRST_ANSWER_TIMEOUT = 120.0
"""Seconds in which the launcher must finish its imports and answer the first request."""


class LauncherGone(Exception):
    """The message is a predicate of the launcher."""


class ProcessLauncher(AbstractContextManager["ProcessLauncher"]):
    """Process launcher: the process from which engines are forked (`launcher.run_launcher`).

    The launcher is a fork if this process has only one thread; if not, it is a new process. The launcher starts to
    import at once, so `train` creates it first. Engines do not inherit the environment variables in `secrets`. After
    its imports, a launcher that has not answered for `heartbeat` seconds is killed.
    """

    def __init__(self, secrets: Collection[str] = (), heartbeat: float = DEFAULT_HEARTBEAT) -> None:
        self.secrets, self.heartbeat, self.patience = secrets, heartbeat, FIRST_ANSWER_TIMEOUT
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each engine needs some in both processes
        self.gone = False
        self.control, theirs = Pipe()
        # a fork copies only one thread of this process
        forks = len(list(Path("/proc/self/task").iterdir())) == 1
        self.process: Popen[bytes] | None = None
        if forks:
            self.pid = fork_launcher(theirs, self.control, secrets)
        else:
            environment = {name: value for name, value in os.environ.items() if name not in secrets}
            self.process = start_python("slipstream.runtimes.launcher", theirs, environment | LAUNCHER_ENVIRONMENT)
            self.pid = self.process.pid
        self.bare = True
        """True until the first request: the launcher may still be importing, and has no child."""
        theirs.close()

    def another(self) -> ProcessLauncher:
        return ProcessLauncher(self.secrets, self.heartbeat)

    def start_engine(self, settings: ProcessSettings) -> LocalLink:
        self.bare = False
        ours, theirs = socketpair()
        try:
            with theirs:
                return LocalLink(ours, self._request(settings, theirs), self)
        except LauncherGone as fate:
            ours.close()
            raise AllDied(f"{settings.name} cannot start: the process launcher, which forks it, {fate}") from None

    def gpus(self) -> list[str]:
        """Return this machine's GPUs as CUDA_VISIBLE_DEVICES names them, counted by the launcher."""
        try:
            names: list[str] = self._request(LIST_GPUS)
        except LauncherGone as fate:
            raise AllDied(f"no engine can start: the process launcher, which forks them, {fate}") from None
        return names

    def ended(self, pid: int) -> str:
        """Kill a process if it still runs, and return how it ended."""
        try:
            return exit_text(self._request(pid))
        except LauncherGone:
            return "the process launcher, its parent process, was killed"

    def _request(self, request: object, end: socket | None = None) -> Any:
        """Return the launcher's answer; kill a launcher that hangs, because this wait stops the whole run.

        `end` is a socket that the launcher gets, too.
        """
        fate = "is gone"
        try:
            self.control.send(request)
            if end is not None:
                send_handle(self.control, end.fileno(), self.pid)
            if not self.control.poll(self.patience):
                fate = f"has not answered for {self.patience:g} s and was killed"
                kill(self.pid)
            answer = self.control.recv()
        except (EOFError, ConnectionError):
            self.gone = True
            raise LauncherGone(fate) from None
        self.patience = self.heartbeat
        return answer

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher, all engines and their children."""
        if self.bare:  # a command that fails early must not wait for the imports
            kill(self.pid)
        kill(self.pid, signal.SIGCONT)  # one that was stopped would not notice that the connection is closed
        self.control.close()
        if self.process:
            self.process.wait()
        else:
            os.waitpid(self.pid, 0)


def fork_launcher(theirs: Connection, ours: Connection, secrets: Collection[str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        ours.close()
        TAKEN.clear()
        for name in secrets:
            os.environ.pop(name, None)
        os.environ |= LAUNCHER_ENVIRONMENT
        os.setsid()  # signals from a terminal must reach the coordinator only
        run_launcher(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class LocalLink:
    def __init__(self, ours: socket, pid: int, launcher: ProcessLauncher) -> None:
        self.channel, self.pid, self.launcher = Channel(ours, self._on_answer), pid, launcher
        self.started = False
        """True if the engine is built; engines that are not built are killed, not closed."""
        self.ending = ""
        self.lost = asyncio.Event()
        """Set when the process has closed its end of the channel."""

    async def start(self, worker: RemoteWorker, build: Callable[..., Any], *args: Any) -> None:
        await worker.load(pickle.dumps(partial(build, *args)))
        self.started = True

    @property
    def exchanged(self) -> int:
        return self.channel.exchanged

    def attach(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.channel.attach(self._on_closed)

    def send(self) -> None:
        if self.worker.gone:
            return
        for call in self.worker.take_outbox():
            try:
                numbered, memories = number_bundles(call)
                self.channel.send(numbered, memories)
            except Exception as error:  # pickling an argument can raise any exception
                self.worker.fail([call.id], error)

    def _on_answer(self, answer: Answer, memories: list[Mapped]) -> None:
        answer = replace(answer, size=sum(memory.size for memory in memories))
        self.worker.settle(answer, partial(Body, memories[0] if memories else None))

    def _on_closed(self) -> None:
        self.lost.set()
        self.worker.mark_gone(self.ended())
        self.channel.close()

    async def leave(self, worker: RemoteWorker) -> None:
        if not worker.gone:
            self.attach(worker)
            self.channel.close_writing()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), GRACE)
        worker.end("it was dismissed")
        self.ended()
        self.channel.close()

    def kill(self) -> None:
        """Kill the process. This closes its end of the channel, which calls `_on_closed`."""
        kill(self.pid)

    def ended(self) -> str:
        self.ending = self.ending or self.launcher.ended(self.pid)
        return self.ending


def open_engines(
    plan: EnginesPlan,
    tokenizer: Tokenizer,
    *,
    launcher: ProcessLauncher | None = None,
    say: Say = print,
    still: Say = str,
) -> Engines:
    """Open all engines; start a launcher if none is given or if the given one is gone."""
    wanted = worker_specs(plan, tokenizer)
    with ExitStack() as stack:
        if launcher is None or launcher.gone:
            launcher = stack.enter_context(launcher.another() if launcher else ProcessLauncher())
        gpus = launcher.gpus()
        each = gpus_each(plan.runtime.device, crews_of(plan), [len(gpus)], say)
        say(loading_message(plan))
        manager = start(
            wanted, launcher, stack, gpus=gpus if each else [], heartbeat=plan.runtime.heartbeat, say=say, still=still
        )
        return engines_from(plan, manager, stack.pop_all().close)


def check_gpus(plan: EnginesPlan, machines: Sequence[int], say: Say) -> list[str]:
    """Raise the errors and print the messages about GPUs that `open_engines` would, but open nothing.

    `machines` are the numbers of GPUs of assumed machines; if it is empty, those of this one. Return lines to print.
    """
    from torch import cuda

    if machines and plan.runtime.kind == "inline":
        return ["all engines share one GPU"]
    if len(machines) > 1 and plan.runtime.kind == "local":
        raise ConfigError('--gpus: runtime.kind = "local" uses one machine: write runtime.kind = "ray", or one number')
    crews, device = crews_of(plan), plan.runtime.device
    there = machines or [cuda.device_count()]
    if not gpus_each(device, crews, there, say):
        return []
    return [f"{sum_line(crews)}, of {sum(there)}", *filter(None, [unused_line(crews, there)])]


def start(
    wanted: Sequence[WorkerSpec],
    launcher: ProcessLauncher,
    stack: ExitStack,
    *,
    gpus: Sequence[str] | None = None,
    heartbeat: float = DEFAULT_HEARTBEAT,
    say: Say,
    still: Say = str,
) -> WorkerManager:
    """Start all engines at once, each on its own GPUs, which its replacement inherits; `gpus` None: all share GPUs.

    Two parties that take turns have the same GPUs.
    """
    where = meeting(launcher, stack, say) if any(spec.meets for spec in wanted) else None
    links: list[LocalLink] = []
    stack.callback(stop, links)
    own, shared = dict[str, list[str]](), shared_devices(wanted) if gpus else 0
    pools = {party: deque((gpus or [])[:shared]) for party in PARTIES} | {"": deque((gpus or [])[shared:])}

    def start_worker(spec: WorkerSpec) -> RemoteWorker:
        if spec.name not in own:
            free = pools[spec.party]
            if gpus and spec.computes > len(free):
                raise EngineError(f"no GPU is free for {spec.name}")
            own[spec.name] = [free.popleft() for _ in range(spec.computes if gpus else 0)]
        visible = None if gpus is None else ",".join(own[spec.name])
        links.append(launcher.start_engine(ProcessSettings(spec.name, spec.threads, str(Path.cwd()), visible)))
        return spec.kind(spec.name, links[-1], heartbeat)

    def release(spec: WorkerSpec) -> None:
        pools[spec.party].extend(own.pop(spec.name, ()))

    def resources_of(spec: WorkerSpec) -> dict[str, float]:
        return {"GPU": spec.computes} if gpus else {}

    manager = WorkerManager(start_worker, release, resources_of, lambda: {"GPU": len(pools[""])})
    manager.begin(wanted, lambda _: where, say, still)
    return manager


def shared_devices(wanted: Sequence[WorkerSpec]) -> int:
    """Return the number of devices that parties use in turn: as many as the largest party needs."""
    return max(sum(spec.computes for spec in wanted if spec.party == party) for party in PARTIES)


def meeting(launcher: ProcessLauncher, stack: ExitStack, say: Say) -> tuple[str, int]:
    """Start a process that serves the rendezvous of ranks and ends after them; return its address."""
    (worker,) = start(
        [WorkerSpec(RemoteWorker, "meeting", 1, partial(construct, "Meet"))], launcher, stack, say=say
    ).specs
    where: tuple[str, int] = asyncio.run(worker.call("where"))
    return where


def stop(links: Sequence[LocalLink]) -> None:
    """Close all engines within GRACE seconds, then end their processes."""
    closing = [link for link in links if link.started and not link.ending]
    for link in closing:
        link.channel.detach()
        link.channel.close_writing()
    until = time.monotonic() + GRACE
    for link in closing:
        link.channel.drain(until)
    for link in links:
        link.ended()
        link.channel.close()
