"""An engine in a Ray actor, and the client that calls it. Calls travel in batches, records travel by themselves.

    coordinator: RemoteWorker                             actor: Host
    call 1 ─▶ outbox ─┐
    call 2 ─▶ outbox ─┼── exchange(7, [1, 2, cancel 0]) ──▶ starts 1 and 2, cancels 0;
    cancel 0 ▶ outbox ┘                                     exchange 6, if it still waits here, returns empty
    answers ◀───────────────── headers, bodies ───────────  7 returns when something has finished, or when 8 comes

At most two exchanges are in flight, and only the newer one waits: nothing polls, a call leaves as soon as it is made,
and what piles up meanwhile leaves together. An answer is small: in place of every record and of exported weights it
holds an index into `bodies`, the second return value. The coordinator has that as an ObjectRef and never fetches it; it
belongs to the coordinator, so it outlives its maker, and it is freed when the last `Body` that names it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import traceback
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from slipstream.engines.base import WeightsRef
from slipstream.errors import EngineError, WorkerDied, first_line
from slipstream.records import Batch, Handle

CANCEL = ""
TICK = 0.02
"""Seconds between two exchanges of a worker that has plenty to do. One costs a millisecond here and one there."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine; `CANCEL` cancels the call of that number."""

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
    """Where a record lies: its bundle, and its place there.

    The bundle is an ObjectRef with the coordinator. In a call it is its place among the bundles of the exchange, which
    Ray hands over as read-only views of the object store before the exchange begins.
    """

    bundle: Any
    index: int


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


def failed(id: int, error: BaseException) -> Answer:
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a foreign error class does when it is pickled: its name and message must do
        pickled = pickle.dumps(EngineError(f"{type(error).__name__}: {first_line(error)}"))
    return Answer(id, error=pickled, trace=trace)


class Host:
    """The actor. It imports nothing heavy before `start` unpickles what builds the engine.

    Ctrl-C in a terminal goes to every process of its group, but not to this one: Ray starts its processes with SIGINT
    blocked, so the coordinator can still save a checkpoint.
    """

    def __init__(self, name: str, threads: int, directory: str) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
        with contextlib.suppress(OSError):  # relative paths in a config mean the same here, where that exists
            os.chdir(directory)
        self.name, self.engine, self.store = name, None, None
        self.turn = 0
        """Exchanges accepted so far."""
        self.early: dict[int, Sequence[Call]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.answers: list[Answer] = []
        self.bodies: list[Any] = []
        self.changed = asyncio.Event()
        self.answered = 0.0
        """When an exchange last returned with answers."""

    def __repr__(self) -> str:
        """How Ray's logs call it."""
        return self.name

    def meet(self) -> tuple[str, int]:
        """Where the ranks of an engine find each other, at the address by which Ray knows this machine."""
        from slipstream.engines.native.ranks import open_store

        self.store, where = open_store(ray.util.get_node_ip_address())
        return where

    async def start(self, build: Callable[..., Any], *told: Any) -> Answer:
        try:
            self.engine = build(*told)
        except Exception as error:
            return failed(0, error)
        gc.freeze()  # what was imported and loaded stays: no collection need look through it again
        return Answer(0, os.getpid())

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def exchange(self, turn: int, calls: Sequence[Call], *bundles: Any) -> tuple[list[Answer], list[Any]]:
        self.early[turn] = swapped(calls, lambda body: bundles[body.bundle][body.index])
        while self.turn in self.early:  # Ray does not promise that they arrive in order
            for call in self.early.pop(self.turn):
                self._accept(call)
            self.turn += 1
        self.changed.set()
        while not self.answers and turn == self.turn - 1:
            self.changed.clear()
            await self.changed.wait()
        await self._settle_down(turn)
        if turn < self.turn - 1:
            return [], []
        answers, self.answers, bodies, self.bodies = self.answers, [], self.bodies, []
        return answers, bodies

    async def _settle_down(self, turn: int) -> None:
        """Answers that come soon after others travel together, as long as there is more to come."""
        clock = asyncio.get_running_loop().time
        until = self.answered + TICK
        while self.running and turn == self.turn - 1 and clock() < until:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), until - clock())
        if turn == self.turn - 1:
            self.answered = clock()

    def _accept(self, call: Call) -> None:
        if call.method != CANCEL:
            self.running[call.id] = asyncio.create_task(self._run(call))
            self.running[call.id].add_done_callback(lambda _: self.running.pop(call.id))
        elif call.id in self.running:
            self.running[call.id].cancel()

    async def _run(self, call: Call) -> None:
        try:
            result = await getattr(self.engine, call.method)(*call.args, **call.options)
            self.answers.append(Answer(call.id, swapped(result, self._keep)))
        except asyncio.CancelledError:  # if it is not the caller who cancelled, it must hear of it
            self.answers.append(failed(call.id, EngineError(f"{call.method} was cancelled in {self.name}")))
        except Exception as error:
            self.answers.append(failed(call.id, error))
        self.changed.set()

    def _keep(self, body: Any) -> int:
        self.bodies.append(body)
        return len(self.bodies) - 1

    def cpu_seconds(self) -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    async def close(self) -> None:
        if tasks := list(self.running.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if (close := getattr(self.engine, "close", None)) is not None:
            close()


class RemoteWorker:
    """The coordinator's end. When the actor is gone, so are all calls that are with it, and all that come later."""

    def __init__(self, name: str, *, threads: int = 1, cpus: float = 0, gpus: float = 0) -> None:
        actor: Any = ray.remote(Host)
        actor = actor.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        self.name, self.host, self.pid = name, actor.remote(name, threads, str(Path.cwd())), 0
        self.gone = ""
        self.ids, self.turn = count(), 0
        self.outbox: list[Call] = []
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.sent, self.delayed = 0.0, False
        """When the last exchange left, and whether the next one waits for its time."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.receiving: set[asyncio.Task[None]] = set()
        """A task of this loop for each exchange in flight."""

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        if self.gone:
            raise WorkerDied(self.gone)
        loop = asyncio.get_running_loop()
        if loop is not self.loop:  # an exchange of an earlier one is nobody's any more
            self.loop, self.receiving, self.sent, self.delayed = loop, set(), 0.0, False
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

    def _post(self, call: Call) -> None:
        self.outbox.append(call)
        asyncio.get_running_loop().call_soon(self._send)  # with all that is posted until then

    def _send_delayed(self) -> None:
        self.delayed = False
        self._send()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        to_wait = self.waiting and not self.receiving
        if self.gone or len(self.receiving) == 2 or not (self.outbox or to_wait):
            return
        if self.receiving and (early := self.sent + TICK - loop.time()) > 0:  # it has something to do
            if not self.delayed:
                self.delayed = True
                loop.call_later(early, self._send_delayed)
            return
        self.sent = loop.time()
        calls, self.outbox = self.outbox, []
        bundles: dict[Any, int] = {}
        try:
            named = swapped(calls, lambda body: Body(bundles.setdefault(body.bundle, len(bundles)), body.index))
            returned = self.host.exchange.remote(self.turn, named, *bundles)
        except Exception as error:  # an argument cannot be sent: nothing has left
            self._fail([call.id for call in calls], error)
            return
        self._expect(self.turn, calls, returned)
        self.turn += 1

    def _expect(self, turn: int, calls: Sequence[Call], returned: Any) -> None:
        self.receiving.add(asyncio.get_running_loop().create_task(self._receive(turn, calls, *returned)))

    async def _receive(self, turn: int, calls: Sequence[Call], headers: Any, bodies: Any) -> None:
        task, receiving = asyncio.current_task(), self.receiving
        assert task is not None
        try:
            answers: list[Answer] = await headers
        except RayActorError as error:
            self._bury(error)
            return
        except RayError as error:  # a bundle was lost with its machine: this exchange never began
            self._fail([call.id for call in calls], EngineError(f"{self.name}: {first_line(error)}"))
            self._expect(turn, [], self.host.exchange.remote(turn, []))
            return
        finally:
            receiving.discard(task)
        for answer in answers:
            waiting = self.waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                self._settle(waiting, answer, bodies)
        asyncio.get_running_loop().call_soon(self._send)  # after those who now go on and call again

    def _settle(self, waiting: asyncio.Future[Any], answer: Answer, bodies: Any) -> None:
        try:
            waiting.set_result(swapped(answer.get(), lambda index: Body(bodies, index)))
        except Exception as error:
            waiting.set_exception(error)

    def _bury(self, error: RayError) -> None:
        self.gone = f"{self.name} (pid {self.pid}) is gone: {reason(error)}"
        ray.kill(self.host)  # it may only be out of reach
        self._fail(self.waiting, WorkerDied(self.gone))

    def _fail(self, ids: Iterable[int], error: Exception) -> None:
        for id in list(ids):
            if (waiting := self.waiting.get(id)) is not None and not waiting.done():
                waiting.set_exception(copy(error))  # each has a traceback of its own


def reason(error: RayError) -> str:
    """The one telling sentence among many, where there is one."""
    detail = str(error).partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return detail or first_line(error)
