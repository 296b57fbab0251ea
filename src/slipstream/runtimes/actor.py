"""A Ray actor that runs an engine, and the coordinator's link to it, which sends calls and answers in batches.

    coordinator: RayLink                                  actor: Actor
    call 1 ─▶ outbox ─┐
    call 2 ─▶ outbox ─┼── exchange(7, [1, 2, cancel 0]) ──▶ starts 1 and 2, cancels 0;
    cancel 0 ▶ outbox ┘                                     exchange 6, if it still waits here, returns empty
    answers ◀───────────────── headers, bodies ───────────  7 returns when something has finished, or when 8 comes

At most two exchanges are in flight, and only the newer exchange waits. So nothing polls, a call leaves as soon as it is
made, and calls that accumulate leave together. The coordinator has `bodies`, the second return value, as an ObjectRef
and never fetches it. The coordinator owns `bodies`, so they outlive the actor and are freed with the last `Body`.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from slipstream.engines.shared_memory import parts_of
from slipstream.errors import RecordsLost, WorkerDied, first_line
from slipstream.processes import GRACE
from slipstream.runtimes import exchange
from slipstream.runtimes.exchange import Answer, Body, Call, EngineServer, RemoteWorker, map_references, number_bundles
from slipstream.runtimes.workers import WorkerSpec

EXCHANGE_INTERVAL = 0.02
"""Minimum seconds between two exchanges of a busy worker; an exchange costs about 1 ms on each side."""


class Actor:
    """Server of one engine. It imports nothing heavy before the call `START` unpickles the engine's builder.

    Ctrl-C in a terminal does not reach this process, because Ray starts its processes with SIGINT blocked. The
    coordinator can therefore still save a checkpoint.
    """

    def __init__(self, name: str, threads: int, directory: str) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
        with contextlib.suppress(OSError):  # relative paths in a config keep their meaning if the directory exists
            os.chdir(directory)
        self.host, self.store = EngineServer(name, self._tell), None
        self.turn = 0
        """Number of exchanges accepted so far."""
        self.early: dict[int, Sequence[Call]] = {}
        self.answers: list[Answer] = []
        self.bodies: list[list[Any]] = []
        self.changed = asyncio.Event()
        self.answered = 0.0
        """Time at which an exchange last returned with answers."""

    def __repr__(self) -> str:
        """Return the name that Ray's logs show."""
        return self.host.name

    def meet(self) -> tuple[str, int]:
        """Open a rendezvous store for the ranks, and return its host (Ray's address of this machine) and port."""
        from slipstream.engines.native.ranks import open_store

        self.store, where = open_store(ray.util.get_node_ip_address())
        return where

    def process(self) -> int:
        return os.getpid()

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def exchange(self, turn: int, calls: Sequence[Call], *bundles: Any) -> tuple[list[Answer], list[list[Any]]]:
        def found(body: Body) -> Any:
            answer, spec = body.index
            return bundles[body.bundle][answer][spec]

        self.early[turn] = map_references(calls, found)
        while self.turn in self.early:  # Ray does not guarantee that exchanges arrive in order
            for call in self.early.pop(self.turn):
                self.host.accept(call)
            self.turn += 1
        self.changed.set()
        while not self.answers and turn == self.turn - 1:
            self.changed.clear()
            await self.changed.wait()
        await self._wait_for_more(turn)
        if turn < self.turn - 1:
            return [], []
        answers, self.answers, bodies, self.bodies = self.answers, [], self.bodies, []
        return answers, bodies

    def _tell(self, answer: Answer, bodies: list[Any]) -> None:
        self.answers.append(replace(answer, size=sum(part.nbytes for part in parts_of(bodies)) if bodies else 0))
        self.bodies.append(bodies)
        self.changed.set()

    async def _wait_for_more(self, turn: int) -> None:
        """Wait for further answers until EXCHANGE_INTERVAL after the previous ones, so that they travel together."""
        clock = asyncio.get_running_loop().time
        until = self.answered + EXCHANGE_INTERVAL
        while self.host.running and turn == self.turn - 1 and clock() < until:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), until - clock())
        if turn == self.turn - 1:
            self.answered = clock()

    async def close(self) -> None:
        await self.host.close()


class RayLink:
    def __init__(self, spec: WorkerSpec, resources: Mapping[str, float], ended: Callable[[], str]) -> None:
        """Create the actor; `ended` returns the name of a vital Ray daemon that has ended, or ""."""
        options = {"num_cpus": resources["CPU"], "num_gpus": resources["GPU"], "max_restarts": 0, "max_task_retries": 0}
        actor: Any = ray.remote(Actor)
        self.actor, self.pid = actor.options(**options).remote(spec.name, spec.threads, str(Path.cwd())), 0
        self.ended, self.turn, self.exchanged = ended, 0, 0
        self.sent, self.delayed = 0.0, False
        """`sent`: time of the last exchange. `delayed`: True if the next exchange is scheduled."""
        self.receiving: set[asyncio.Task[None]] = set()
        """One task of this event loop for each exchange in flight."""

    async def start(self, worker: RemoteWorker, build: Callable[..., Any], *args: Any) -> None:
        try:
            found = [await each for each in args]
            self.pid = await self.actor.process.remote()  # it may take long until Ray has the resources
        except RayActorError as error:
            raise WorkerDied(f"{worker.name} died before it was loaded: {reason(error)}") from None
        await worker.load(ray.cloudpickle.dumps(partial(build, *found)))

    def kill(self) -> None:
        ray.kill(self.actor)

    async def leave(self, worker: RemoteWorker) -> None:
        if not worker.gone:
            with contextlib.suppress(TimeoutError, RayError):
                await asyncio.wait_for(self.actor.close.remote(), GRACE)
        worker.end("it was dismissed")

    def attach(self, worker: RemoteWorker) -> None:
        """Use the running event loop; exchanges of the earlier loop are abandoned."""
        self.worker, self.receiving, self.sent, self.delayed = worker, set(), 0.0, False

    def _send_delayed(self) -> None:
        self.delayed = False
        self.send()

    def send(self) -> None:
        loop, worker = asyncio.get_running_loop(), self.worker
        if daemon := self.ended():
            worker.mark_gone(f"{daemon}, a daemon of Ray, has ended")
        to_wait = worker.waiting and not self.receiving
        if worker.gone or len(self.receiving) == 2 or not (worker.outbox or to_wait):
            return
        if self.receiving and (early := self.sent + EXCHANGE_INTERVAL - loop.time()) > 0:  # the worker is busy
            if not self.delayed:
                self.delayed = True
                loop.call_later(early, self._send_delayed)
            return
        self.sent = loop.time()
        calls = worker.take_outbox()
        try:
            numbered, bundles = number_bundles(calls)
            returned = self.actor.exchange.remote(self.turn, numbered, *bundles)
        except Exception as error:  # an argument cannot be pickled: nothing was sent
            worker.fail([call.id for call in calls], error)
            return
        self._expect(self.turn, calls, returned)
        self.turn += 1

    def _expect(self, turn: int, calls: Sequence[Call], returned: Any) -> None:
        self.receiving.add(asyncio.get_running_loop().create_task(self._receive(turn, calls, *returned)))

    def _resend_without(self, lost: str, calls: Sequence[Call]) -> None:
        """Fail the calls that use the bundle `lost` ("": calls that use any bundle), and post the other calls again."""
        worker, again = self.worker, list[Call]()
        for call in calls:
            if any(lost in ("", bundle.hex()) for bundle in number_bundles(call)[1]):
                why = f"records for {worker.name} are lost: the machine that held them is gone"
                worker.fail([call.id], RecordsLost(why))
            elif call.id in worker.waiting or call.method in (exchange.CANCEL, exchange.PING):
                again.append(call)
        worker.outbox[:0] = again

    async def _receive(self, turn: int, calls: Sequence[Call], headers: Any, bodies: Any) -> None:
        task, receiving = asyncio.current_task(), self.receiving
        assert task is not None
        try:
            answers: list[Answer] = await headers
        except RayActorError as error:
            self.worker.end(reason(error))  # `end` kills: the actor may be alive but unreachable
            return
        except RayError as error:  # a bundle was lost with its machine: this exchange never began
            self._resend_without(getattr(error, "object_ref_hex", ""), calls)
            self._expect(turn, [], self.actor.exchange.remote(turn, []))
            return
        finally:
            receiving.discard(task)
        for number, answer in enumerate(answers):
            self.worker.settle(answer, partial(body_of, bodies, number))
        asyncio.get_running_loop().call_soon(self.send)  # after the resumed callers have posted new calls


def body_of(bodies: Any, answer: int, spec: int) -> Body:
    return Body(bodies, (answer, spec))


def reason(error: RayError) -> str:
    """Return the informative sentence of a Ray error if there is one, else the first line."""
    detail = str(error).partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return (detail or first_line(error)).removesuffix(".")
