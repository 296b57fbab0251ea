"""An engine in a process of its own, and the client that calls it, whatever the way between the two.

    coordinator: RemoteWorker ── Link ──▶ Host: engine
    call 1, call 2, cancel 0 ───────────▶ starts 1 and 2, cancels 0
    answer ◀───────────────── value, bodies of 2

Calls leave as soon as they are made, and an answer comes when its call has ended: a publish is heard while a thousand
generates wait. An answer is small: in place of every record and of exported weights it holds an index into `bodies`.
The coordinator never opens those: it holds each as a `Body`, which the link sends on, and which is freed with its last
holder.

As long as anybody waits for an answer, the process is asked every few seconds whether it is there, and its event loop
says so: engines are built and compute in threads, so that it can. One that says nothing for `heartbeat` seconds hangs,
and is killed. The seconds are counted in beats of the coordinator's own loop: a coordinator that was stopped itself, or
had its hands full, blames nobody.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import resource
import traceback
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from slipstream.errors import EngineError, WorkerDied, first_line
from slipstream.protocols import WeightsRef
from slipstream.records import Batch, Handle

START, CANCEL, PING, CPU_SECONDS = "start", "", "ping", "cpu seconds"
"""What the host does itself; all other calls are the engine's."""
NOBODY = -1
"""The number of a call whose answer nobody waits for."""
BEATS = 6
"""How often within a heartbeat a process is asked whether it is there."""
HEARTBEAT = 60.0
"""What `runtime.heartbeat` is unless a config says otherwise."""
GOODBYE = 10.0
"""Seconds that engines have to close before their processes are killed."""
REMINDER = 60.0
"""Seconds between two lines about engines that have not started."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine; or one of the host's: `CANCEL` cancels the call of that number."""

    id: int
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call has returned, or the error that it raised, pickled, with its traceback there."""

    id: int
    value: Any = None
    error: bytes = b""
    trace: str = ""

    def get(self) -> Any:
        if not self.error:
            return self.value
        error = pickle.loads(self.error)
        error.add_note(self.trace)
        raise error


@dataclass(frozen=True, slots=True)
class Body:
    """Where a record lies: what its link holds for an answer, and its place there. In a call, whatever the link makes
    of the two."""

    bundle: Any
    index: Any


def swapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments or results, with every body in them changed."""
    match value:
        case Handle(header, body):
            return value if body is None else Handle(header, change(body))
        case WeightsRef(body=body):
            return replace(value, body=change(body))
        case Batch(groups, update):
            return Batch(swapped(groups, change), update)
        case list() | tuple():
            return type(value)([swapped(item, change) for item in value])
        case Call(id, method, args, options):
            return Call(id, method, swapped(args, change), options)
        case _:
            return value


def renamed(value: Any, change: Callable[[Body], Any]) -> Any:
    """Return the same calls with every reference in them changed. A record that the coordinator made itself has none:
    it travels inside the call."""
    return swapped(value, lambda body: change(body) if isinstance(body, Body) else body)


def failed(id: int, error: BaseException) -> Answer:
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a foreign error class does when it is pickled: its name and message must do
        pickled = pickle.dumps(EngineError(f"{type(error).__name__}: {first_line(error)}"))
    return Answer(id, error=pickled, trace=trace)


class Host:
    """The engine's end: runs what is called and tells what came of it, with the bodies that belong there."""

    def __init__(
        self,
        name: str,
        tell: Callable[[Answer, list[Any]], None],
        pack: Callable[[list[Any]], Awaitable[list[Any]]] | None = None,
    ) -> None:
        """`pack` makes of the bodies of an answer what is told with it."""
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
        bodies, told = list[Any](), list[Any]()

        def keep(body: Any) -> int:
            bodies.append(body)
            return len(bodies) - 1

        try:
            result: Any = None
            if call.method == START:
                self.engine = await asyncio.to_thread(built, *call.args)
            elif call.method == CPU_SECONDS:
                result = cpu_seconds_here()
            else:
                result = await getattr(self.engine, call.method)(*call.args, **call.options)
            answer = Answer(call.id, swapped(result, keep))
            told = await self.pack(bodies) if self.pack else bodies
        except asyncio.CancelledError:  # if it is not the caller who cancelled, it must hear of it
            answer = failed(call.id, EngineError(f"{call.method} was cancelled in {self.name}"))
        except Exception as error:
            answer = failed(call.id, error)
        self.tell(answer, told)

    async def close(self) -> None:
        if tasks := list(self.running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if (close := getattr(self.engine, "close", None)) is not None:
            close()


def built(pickled: bytes) -> Any:
    engine = pickle.loads(pickled)()
    gc.freeze()  # what was imported and loaded stays: no collection need look through it again
    return engine


def cpu_seconds_here() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Link(Protocol):
    """The way to the process of one engine."""

    @property
    def pid(self) -> int: ...

    async def start(self, worker: RemoteWorker, build: Callable[..., Any], *told: Any) -> None:
        """Have the process build its engine (`worker.load`), when it is there; raises what that raises."""
        ...

    def attach(self, worker: RemoteWorker) -> None:
        """The worker's calls come from another event loop from now on, which is the one that runs."""
        ...

    def send(self) -> None:
        """Take what is in the worker's outbox, now or when its time has come."""
        ...

    def kill(self) -> None:
        """Whatever state the process is in; without waiting for its end."""
        ...

    async def leave(self, worker: RemoteWorker) -> None:
        """Have the engine close, if it does in time, and end its process."""
        ...


class RemoteWorker:
    """The coordinator's end. When the process is gone, so are all calls that are with it, and all that come later."""

    def __init__(self, name: str, link: Link, heartbeat: float = HEARTBEAT) -> None:
        self.name, self.link, self.heartbeat = name, link, heartbeat
        self.gone = ""
        self.ids = count()
        self.outbox: list[Call] = []
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.beat: asyncio.TimerHandle | None = None
        """The next one, if somebody waits."""
        self.silent = 0
        """Beats since anything was heard."""

    @property
    def pid(self) -> int:
        return self.link.pid

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
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
        self._post(Call(id, method, args, options))
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(Call(id, CANCEL))
            raise
        finally:
            del self.waiting[id]

    async def load(self, build: bytes) -> None:
        """Build the engine, as the pickled function does."""
        try:
            await self.call(START, build)
        except WorkerDied as error:
            raise WorkerDied(f"while it was loaded, {error}") from None

    async def cpu_seconds(self) -> float:
        """CPU time that the process has used so far, with those it started and has waited for."""
        seconds: float = await self.call(CPU_SECONDS)
        return seconds

    def _next_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.beat = loop.call_later(self.heartbeat / BEATS, self._on_beat, loop)

    def _on_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Is it there? Asked as long as somebody waits."""
        self.beat = None
        if self.gone or not self.waiting:
            return
        if self.silent == BEATS:
            self.end(f"it has not answered for {self.heartbeat:g} s (runtime.heartbeat)")
            return
        self.silent += 1
        self._post(Call(NOBODY, PING))
        self._next_beat(loop)

    def _post(self, call: Call) -> None:
        self.outbox.append(call)
        asyncio.get_running_loop().call_soon(self.link.send)  # with all that is posted until then

    def posted(self) -> list[Call]:
        """What is in the outbox, and from now on with the link."""
        calls, self.outbox = self.outbox, []
        return calls

    def settle(self, answer: Answer, body: Callable[[Any], Body]) -> None:
        """An answer has come; `body` makes of an index what stands for the record."""
        self.silent = 0
        waiting = self.waiting.get(answer.id)
        if waiting is None or waiting.done():
            return
        try:
            waiting.set_result(swapped(answer.get(), body))
        except Exception as error:
            waiting.set_exception(error)

    def fail(self, ids: Iterable[int], error: Exception) -> None:
        for id in list(ids):
            if (waiting := self.waiting.get(id)) is not None and not waiting.done():
                waiting.set_exception(copy(error))  # each has a traceback of its own

    def bury(self, why: str) -> None:
        """The process has ended, or is as good as that."""
        if not self.gone:
            self.gone = f"{self.name} (pid {self.pid}) is gone: {why}"
            self.fail(self.waiting, WorkerDied(self.gone))

    def end(self, why: str) -> None:
        """Kill the process, if it is there."""
        if not self.gone:
            self.bury(why)
            self.link.kill()
