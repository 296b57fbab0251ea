"""Calls to an engine in another process, independent of the transport.

    coordinator: RemoteWorker ── Link ──▶ EngineServer: engine
    call 1, call 2, cancel 0 ───────────▶ starts 1 and 2, cancels 0
    answer ◀───────────────── value, bodies of 2

Calls are sent immediately and answered when they end, so a publish is answered while a thousand generates wait. Answers
are small: records and exported weights are replaced by indices into `bodies`. The coordinator never opens bodies. It
holds each as a `Body`, which the link forwards and which is freed with its last holder.

While callers wait, the process gets regular pings. Its event loop answers the pings, because engines are built and
compute in threads. A process that is silent for `heartbeat` seconds is considered hung and killed. These seconds are
counted in beats of the coordinator's own loop, so a coordinator that was stopped kills no worker.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import EngineError, WorkerDied, first_line
from slipstream.processes import cpu_seconds
from slipstream.protocols import Proxy, WeightsRef
from slipstream.records import Batch, Handle

START, CANCEL, PING, CPU_SECONDS = "start", "", "ping", "cpu seconds"
"""Methods of the host itself; all other calls go to the engine."""
WITHOUT_TURN = (START, CPU_SECONDS, "release", "offload", "reload")
"""Methods that a worker may run while others use its devices."""
NO_CALLER = -1
"""Id of calls whose answer is ignored, such as pings."""
PINGS_PER_PERIOD = 6
"""Pings per heartbeat period."""
DEFAULT_HEARTBEAT = 60.0
"""Default of `runtime.heartbeat`, in seconds."""
REMINDER_INTERVAL = 60.0
"""Seconds between two messages about engines that have not started."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an engine's or the host's method; `CANCEL` cancels the call with the same id."""

    id: int
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Return value of a call, or its pickled error with the remote traceback."""

    id: int
    value: Any = None
    error: bytes = b""
    trace: str = ""
    size: int = 0
    """Bytes of its bodies, if the link does not know them otherwise."""

    def get(self) -> Any:
        if not self.error:
            return self.value
        error = pickle.loads(self.error)
        error.add_note(self.trace)
        raise error


@dataclass(frozen=True, slots=True)
class Body:
    """Reference to a record: the bundle that holds it, and its index there. Links number the bundles of each call."""

    bundle: Any
    index: Any


def map_bodies(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same arguments or results with every body replaced by `change(body)`."""
    match value:
        case Handle(header, body):
            return value if body is None else Handle(header, change(body))
        case WeightsRef(body=body):
            return replace(value, body=change(body))
        case Batch(groups):
            return replace(value, groups=map_bodies(groups, change))
        case list() | tuple():
            return type(value)([map_bodies(item, change) for item in value])
        case Call(id, method, args, options):
            return Call(id, method, map_bodies(args, change), options)
        case _:
            return value


def map_references(value: Any, change: Callable[[Body], Any]) -> Any:
    """Return the same calls with every `Body` replaced by `change(body)`; other records are not replaced."""
    return map_bodies(value, lambda body: change(body) if isinstance(body, Body) else body)


def number_bundles(calls: Any) -> tuple[Any, list[Any]]:
    """Return calls in which bundles are replaced by numbers, and the bundles in the order of these numbers."""
    numbers = dict[Any, int]()
    numbered = map_references(calls, lambda body: Body(numbers.setdefault(body.bundle, len(numbers)), body.index))
    return numbered, list(numbers)


def failure_of(id: int, error: BaseException) -> Answer:
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # classes of other libraries may fail to pickle: send name and message only
        pickled = pickle.dumps(EngineError(f"{type(error).__name__}: {first_line(error)}"))
    return Answer(id, error=pickled, trace=trace)


class EngineServer:
    """Server in the process of an engine: it runs the coordinator's calls, and sends answers and bodies."""

    def __init__(
        self,
        name: str,
        tell: Callable[[Answer, list[Any]], None],
        pack: Callable[[list[Any]], Awaitable[list[Any]]] | None = None,
    ) -> None:
        """Call `tell` with each answer and its bodies, which `pack` (if given) converts first."""
        self.name, self.tell, self.pack = name, tell, pack
        self.engine: Any = None
        self.running: dict[int, asyncio.Task[None]] = {}

    def accept(self, call: Call) -> None:
        if call.method == PING:
            self.tell(Answer(call.id), [])
        elif call.method != CANCEL:
            self.running[call.id] = asyncio.create_task(self._run(call))
            self.running[call.id].add_done_callback(lambda _: self.running.pop(call.id))
        elif call.id in self.running:
            self.running[call.id].cancel()

    async def _run(self, call: Call) -> None:
        bodies, parcels = list[Any](), list[Any]()

        def keep(body: Any) -> int:
            bodies.append(body)
            return len(bodies) - 1

        try:
            result: Any = None
            if call.method == START:
                self.engine = await asyncio.to_thread(unpickle_engine, *call.args)
            elif call.method == CPU_SECONDS:
                result = cpu_seconds()
            else:
                result = await getattr(self.engine, call.method)(*call.args, **call.options)
            answer = Answer(call.id, map_bodies(result, keep))
            parcels = await self.pack(bodies) if self.pack else bodies
        except asyncio.CancelledError:  # the caller waits for an answer unless the caller cancelled
            answer = failure_of(call.id, EngineError(f"{call.method} was cancelled in {self.name}"))
        except Exception as error:
            answer = failure_of(call.id, error)
        self.tell(answer, parcels)

    async def close(self) -> None:
        if tasks := list(self.running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if (close := getattr(self.engine, "close", None)) is not None:
            close()


def unpickle_engine(pickled: bytes) -> Any:
    engine = pickle.loads(pickled)()
    gc.freeze()  # imported and loaded objects stay: collections can skip them
    return engine


class Link(Protocol):
    """Connection to the process of one engine."""

    @property
    def pid(self) -> int: ...

    @property
    def exchanged(self) -> int:
        """Return the bytes of all messages so far; 0 if they are not counted."""

    async def start(self, worker: RemoteWorker, build: Callable[..., Any], *args: Any) -> None:
        """Have the process build its engine (`worker.load`); raise the error if that fails."""
        ...

    def attach(self, worker: RemoteWorker) -> None:
        """Use the running event loop for all further calls and answers."""
        ...

    def send(self) -> None:
        """Send the calls in the worker's outbox, now or after a short delay."""
        ...

    def kill(self) -> None:
        """Kill the process in any state, without waiting for its end."""
        ...

    async def leave(self, worker: RemoteWorker) -> None:
        """Have the engine close within a time limit, and end its process."""
        ...


class RemoteWorker(Proxy):
    """Client of one engine in the coordinator. If the process is gone, all pending and later calls raise WorkerDied."""

    makes = "other"
    """Name of what its engine gives to others."""

    def __init__(self, name: str, link: Link, heartbeat: float = DEFAULT_HEARTBEAT) -> None:
        self.name, self.link, self.heartbeat = name, link, heartbeat
        self.gone = ""
        self.ids = count()
        self.outbox: list[Call] = []
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.beat: asyncio.TimerHandle | None = None
        """Timer of the next beat; None if no caller waits."""
        self.silent = 0
        """Number of beats since the last answer."""
        self.given = 0
        """Bytes of all bodies that its engine gave to others."""
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Context in which the worker may use devices that it shares with others."""

    @property
    def pid(self) -> int:
        return self.link.pid

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        if method in WITHOUT_TURN:
            return await self._call(method, *args, **options)
        async with self.turn():
            return await self._call(method, *args, **options)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if self.gone:
            raise WorkerDied(self.gone)
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self.loop, self.beat = loop, None
            self.link.attach(self)
        if self.beat is None:
            self.silent = 0
            self._next_beat(loop)
        id, answer = next(self.ids), loop.create_future()
        self.waiting[id] = answer
        here = tuple(arg.absolute() if isinstance(arg, Path) else arg for arg in args)
        self._post(Call(id, method, here, options))
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(Call(id, CANCEL))
            raise
        finally:
            del self.waiting[id]

    async def load(self, build: bytes) -> None:
        try:
            await self.call(START, build)
        except WorkerDied as error:
            raise WorkerDied(f"while it was loaded, {error}") from None

    @property
    def traffic(self) -> Counter[str]:
        """Return the bytes so far of messages, which the coordinator reads, and of bodies, which it does not."""
        return Counter({"coordinator": self.link.exchanged, self.makes: self.given})

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and of its ended child processes."""
        seconds: float = await self.call(CPU_SECONDS)
        return seconds

    def _next_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.beat = loop.call_later(self.heartbeat / PINGS_PER_PERIOD, self._on_beat, loop)

    def _on_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.beat = None
        if self.gone or not self.waiting:
            return
        if self.silent == PINGS_PER_PERIOD:
            self.end(f"it has not answered for {self.heartbeat:g} s (runtime.heartbeat)")
            return
        self.silent += 1
        self._post(Call(NO_CALLER, PING))
        self._next_beat(loop)

    def _post(self, call: Call) -> None:
        self.outbox.append(call)
        asyncio.get_running_loop().call_soon(self.link.send)  # sends all calls that are posted until then

    def take_outbox(self) -> list[Call]:
        calls, self.outbox = self.outbox, []
        return calls

    def settle(self, answer: Answer, body: Callable[[Any], Body]) -> None:
        """Pass an answer to its waiting caller; `body` turns an index into a `Body`."""
        self.silent = 0
        self.given += answer.size
        waiting = self.waiting.get(answer.id)
        if waiting is None or waiting.done():
            return
        try:
            waiting.set_result(map_bodies(answer.get(), body))
        except Exception as error:
            waiting.set_exception(error)

    def fail(self, ids: Iterable[int], error: Exception) -> None:
        for id in list(ids):
            if (waiting := self.waiting.get(id)) is not None and not waiting.done():
                waiting.set_exception(copy(error))  # every caller adds its own traceback

    def mark_gone(self, why: str) -> None:
        if not self.gone:
            self.gone = f"{self.name} (pid {self.pid}) is gone: {why}"
            self.fail(self.waiting, WorkerDied(self.gone))

    def end(self, why: str) -> None:
        if not self.gone:
            self.mark_gone(why)
            self.link.kill()
