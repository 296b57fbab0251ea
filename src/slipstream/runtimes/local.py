"""Every engine in a process of its own on this machine: no daemon, no port, no file.

Calls and answers go over socket pairs. Records are packed once, by whoever makes them, and pass through the coordinator
unopened; weights lie in memory that the learner writes and all samplers map. A worker that died or hangs can be
replaced by another. However the coordinator ends, all of it ends (`worker` says how).
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
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from socket import socket, socketpair
from subprocess import DEVNULL, Popen
from types import TracebackType
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.http.client import TAKEN
from slipstream.errors import AllDied, EngineError
from slipstream.plan.engines import EnginesPlan
from slipstream.protocols import Engines
from slipstream.runtimes.channel import Channel, Parcel
from slipstream.runtimes.exchange import GOODBYE, HEARTBEAT, Answer, Body, Call, RemoteWorker, renamed
from slipstream.runtimes.places import Place, Say, Staff, built, engines_from, gpus_each, loading, places
from slipstream.runtimes.worker import GPUS, Birth, nurse

BARE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""So that nothing which a nursery imports starts a thread; engines say how many they want."""
HEARD = 120.0
"""Seconds in which a nursery has imported everything and answered, or hangs."""


class Nursery:
    """The process from which engines are forked (`worker.nurse`).

    It is a fork of this one as long as there is only one thread here, and begins to import at once: `train` makes it
    before it does anything that takes time. Else it is started afresh. No engine inherits the environment variables in
    `secrets`. Once it has imported all, one that has not answered for `heartbeat` seconds hangs, and is killed.
    """

    def __init__(self, secrets: Collection[str] = (), heartbeat: float = HEARTBEAT) -> None:
        self.secrets, self.heartbeat, self.patience = secrets, heartbeat, HEARD
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each engine takes some, here and there
        self.gone = False
        self.control, theirs = Pipe()
        self.process = None if alone() else started(theirs, secrets)
        self.pid = self.process.pid if self.process else forked(theirs, self.control, secrets)
        self.bare = True
        """Nothing has been asked of it: it may still be importing, and has no child."""
        theirs.close()

    def another(self) -> Nursery:
        return Nursery(self.secrets, self.heartbeat)

    def born(self, birth: Birth) -> LocalLink:
        """An engine's process, and the way to it."""
        self.bare = False
        ours, theirs = socketpair()
        try:
            with theirs:
                self.control.send(birth)
                send_handle(self.control, theirs.fileno(), self.pid)
            return LocalLink(ours, self._answer(), self)
        except (EOFError, ConnectionError):
            self.gone = True
            ours.close()
            raise AllDied(f"{birth.name} cannot start: the nursery, from which it is forked, is gone") from None

    def gpus(self) -> list[str]:
        """Those of this machine, as CUDA_VISIBLE_DEVICES names them. It is the nursery that can count them."""
        try:
            self.control.send(GPUS)
            found: list[str] = self._answer()
        except (EOFError, ConnectionError):
            self.gone = True
            raise AllDied("no engine can start: the nursery, from which they are forked, is gone") from None
        return found

    def ended(self, pid: int) -> str:
        """How a process ended, which is killed if it has not."""
        try:
            self.control.send(pid)
            code = self._answer()
        except (EOFError, ConnectionError):
            self.gone = True
            return "the nursery, its parent process, was killed"
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _answer(self) -> Any:
        """Whoever waits here stops the whole run: not for a nursery that hangs."""
        if not self.control.poll(self.patience):
            os.kill(self.pid, signal.SIGKILL)
        answer = self.control.recv()
        self.patience = self.heartbeat
        return answer

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """When this returns nothing is left of it, its engines and what those started."""
        if self.bare:  # whoever is told of a mistake does not wait for imports
            os.kill(self.pid, signal.SIGKILL)
        self.control.close()
        if self.process:
            self.process.wait()
        else:
            os.waitpid(self.pid, 0)


def alone() -> bool:
    """Whether this process has one thread, so that a copy of it misses none."""
    return sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1


def forked(theirs: Connection, ours: Connection, secrets: Collection[str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        ours.close()
        TAKEN.clear()
        for name in secrets:
            os.environ.pop(name, None)
        os.environ |= BARE
        os.setsid()  # what a terminal sends goes to the coordinator alone
        nurse(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def started(theirs: Connection, secrets: Collection[str]) -> Popen[bytes]:
    told = BARE | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Popen(
        [sys.executable, "-m", "slipstream.runtimes.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in secrets} | told,
    )


class LocalLink:
    def __init__(self, ours: socket, pid: int, nursery: Nursery) -> None:
        self.channel, self.pid, self.nursery = Channel(ours, self._heard), pid, nursery
        self.started = False
        """Whether the engine could be built, and is to be closed."""
        self.ending = ""
        self.lost = asyncio.Event()
        """Its end of the channel is closed."""

    async def start(self, worker: RemoteWorker, build: Callable[..., Any], *told: Any) -> None:
        await worker.load(pickle.dumps(partial(build, *told)))
        self.started = True

    def attach(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.channel.attach(self._lost)

    def send(self) -> None:
        if not self.worker.gone:
            for call in self.worker.posted():
                self._send(self.worker, call)

    def _send(self, worker: RemoteWorker, call: Call) -> None:
        places = dict[Parcel, int]()
        try:
            named = renamed(call, lambda body: Body(places.setdefault(body.bundle, len(places)), body.index))
            self.channel.send(named, list(places))
        except Exception as error:  # an argument cannot be sent, whatever its pickling raises
            worker.fail([call.id], error)

    def _heard(self, answer: Answer, parcels: list[Parcel]) -> None:
        self.worker.settle(answer, partial(Body, parcels[0] if parcels else None))

    def _lost(self) -> None:
        self.lost.set()
        self.worker.bury(self.ended())

    async def leave(self, worker: RemoteWorker) -> None:
        if not worker.gone:
            self.attach(worker)
            self.channel.say_goodbye()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), GOODBYE)
        worker.end("it was dismissed")
        self.ended()
        self.channel.close()

    def kill(self) -> None:
        """Its end of the channel closes with it, so `_lost` hears of that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> str:
        """How the process ended, which is killed if it has not."""
        self.ending = self.ending or self.nursery.ended(self.pid)
        return self.ending


def open_engines(
    plan: EnginesPlan, tokenizer: Tokenizer, *, nursery: Nursery | None = None, say: Say = print, still: Say = str
) -> Engines:
    """Without a nursery, or where that is gone, they get one of their own."""
    wanted = places(plan, tokenizer)
    with ExitStack() as stack:
        if nursery is None or nursery.gone:
            nursery = stack.enter_context(nursery.another() if nursery else Nursery())
        gpus = nursery.gpus()
        each = gpus_each(plan.runtime.device, sum(place.computes for place in wanted), len(gpus), say)
        say(loading(plan))
        staff = start(
            wanted, nursery, stack, gpus=gpus if each else [], heartbeat=plan.runtime.heartbeat, say=say, still=still
        )
        return engines_from(plan, staff, stack.pop_all().close)


def check_gpus(plan: EnginesPlan, tokenizer: Tokenizer, say: Say) -> None:
    """What `open_engines` will say of them, or refuse, before anything is opened."""
    from torch import cuda

    gpus_each(plan.runtime.device, sum(place.computes for place in places(plan, tokenizer)), cuda.device_count(), say)


def start(
    wanted: Sequence[Place],
    nursery: Nursery,
    stack: ExitStack,
    *,
    gpus: Sequence[str] | None = None,
    heartbeat: float = HEARTBEAT,
    say: Say,
    still: Say = str,
) -> Staff:
    """All at the same time, each with GPUs of its own if there are any, which whoever replaces it gets too; without
    `gpus` each may look at all of them."""
    where = meeting(nursery, stack, say) if any(place.meets for place in wanted) else None
    links: list[LocalLink] = []
    stack.callback(stop, links)
    free, own = deque(gpus or []), dict[str, list[str]]()

    def born(place: Place) -> RemoteWorker:
        if place.name not in own:
            if gpus and place.computes > len(free):
                raise EngineError("no GPU is free for it")
            own[place.name] = [free.popleft() for _ in range(place.computes if gpus else 0)]
        visible = None if gpus is None else ",".join(own[place.name])
        links.append(nursery.born(Birth(place.name, place.threads, str(Path.cwd()), visible)))
        return place.kind(place.name, links[-1], heartbeat)

    def buried(place: Place) -> None:
        free.extend(own.pop(place.name, ()))

    def takes(place: Place) -> dict[str, float]:
        return {"GPU": place.computes} if gpus else {}

    staff = Staff(born, buried, takes, lambda: {"GPU": len(free)})
    staff.begin(wanted, lambda _: where, say, still)
    return staff


def meeting(nursery: Nursery, stack: ExitStack, say: Say) -> tuple[str, int]:
    """Where ranks meet: a process that does nothing else, and ends after them."""
    (worker,) = start([Place(RemoteWorker, "meeting", 1, partial(built, "Meet"))], nursery, stack, say=say).places
    where: tuple[str, int] = asyncio.run(worker.call("where"))
    return where


def stop(links: Sequence[LocalLink]) -> None:
    """Engines close, those of them that hear it in time."""
    closing = [link for link in links if link.started and not link.ending]
    for link in closing:
        link.channel.hang_up()
    until = time.monotonic() + GOODBYE
    for link in closing:
        link.channel.drain(until)
    for link in links:
        link.ended()
        link.channel.close()
