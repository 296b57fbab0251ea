"""Host processes of environments; each host runs many environments.

Environments are user code and may hang, crash or run out of memory, so they do not run in engine processes. A single
hanging environment cannot be stopped. Its host gets no further environments, and is killed when its other environments
have ended. If the parent process ends, even by a crash, its hosts end, too.

If a host dies while several environments run in it, any of these may be the cause, so all are suspects (`Suspected`).
The episode of a suspect may be retried alone in a new host. At most `MAX_SUSPECTS` such hosts run at a time.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from slipstream.children import Child, ChildPool, clock_stopped, close_all
from slipstream.environments import Message, Reply, Step
from slipstream.environments.host import EnvironmentSettings
from slipstream.errors import ConfigError, EnvironmentFailed, Suspected

ABANDON_TIMEOUT = 5.0
"""Time limit in seconds for the end of an abandoned environment; after it, the host gets no further environments."""
MAX_SUSPECTS = 4
"""Maximum number of suspects that run at the same time, each in its own process."""


class EnvironmentProcess(Child):
    def __init__(self, wanted: EnvironmentSettings) -> None:
        super().__init__("slipstream.environments.host", wanted)
        self.wanted = wanted
        self.live = set[int]()
        """Numbers of the environments that run in this process."""
        self.crowd = frozenset[int]()
        """Numbers of the environments that were in this process when the process ended."""
        self.waiting: dict[int, tuple[Future[Any], int]] = {}
        """Calls for which a caller still waits, by number: the future answer and the number of the environment."""
        self.calls = count()
        self.reader = threading.Thread(target=self._receive, daemon=True)
        self.reads = True
        """False once the process has ended: what it forked may still hold the connection, and never answers."""
        self.outgoing = SimpleQueue[tuple[Future[None], Any] | None]()
        """Calls to send, each with a future that is done when it is sent; None after the last one."""

    def lost(self, how: str, *, late: bool) -> Exception:
        if late:
            return ConfigError(f"environment.use: its imports take more than {how}")
        return ConfigError(f"environment.use = {self.wanted.spec!r}: its process ends during the import ({how})")

    def on_ready(self) -> None:
        self.reader.start()
        threading.Thread(target=self._send, daemon=True).start()

    async def call(self, number: int, method: str, *args: Any) -> Any:
        call, answer = next(self.calls), Future[Any]()
        self.waiting[call] = answer, number
        try:
            async with clock_stopped():
                await asyncio.wrap_future(self._sent((call, number, method, *args)))
                result = await asyncio.wrap_future(answer)
        except OSError:
            self.kill()
            self.reader.join(ABANDON_TIMEOUT)  # the reader records which environments were in the process
            raise self._crash(number, acting=False) from None
        finally:
            self.waiting.pop(call, None)
        if isinstance(result, EnvironmentFailed):
            raise result
        return result

    def _sent(self, message: Any) -> Future[None]:
        if self.connection.closed or not self.reads:
            raise OSError("the process has ended")
        sent = Future[None]()
        self.outgoing.put((sent, message))
        return sent

    def _send(self) -> None:
        """Send calls in their order, in a thread: a process whose interpreter is held by a step reads nothing."""
        while (call := self.outgoing.get()) is not None:
            sent, message = call
            if not sent.set_running_or_notify_cancel():
                continue
            try:
                self.connection.send(message)
            except Exception as error:  # for the caller: the process has ended, or pickle cannot write the arguments
                sent.set_exception(error)
            else:
                sent.set_result(None)

    def _receive(self) -> None:
        try:
            while True:
                self._settle(*self.receive())
        except (EOFError, OSError, pickle.UnpicklingError):
            self.reads = False
            self.crowd = frozenset(self.live)
            for call, (_, number) in list(self.waiting.items()):
                self._settle(call, self._crash(number, acting=True))

    def _settle(self, call: int, result: Any) -> None:
        answer, _ = self.waiting.pop(call, (None, 0))
        if answer is not None and answer.set_running_or_notify_cancel():  # the caller still waits
            answer.set_result(result)

    def _crash(self, number: int, *, acting: bool) -> EnvironmentFailed:
        message = f"{self.wanted.spec} ended its process: {self.end()}"
        return EnvironmentFailed("crash", message) if self.crowd == {number} else Suspected(message, acting=acting)

    def close(self) -> None:
        self.kill()
        if self.reader.is_alive():
            self.reader.join()
        super().close()
        self.outgoing.put(None)


class EnvironmentPool(ChildPool[EnvironmentProcess]):
    def __init__(self, wanted: EnvironmentSettings, processes: int = 1) -> None:
        super().__init__(partial(EnvironmentProcess, wanted), processes)
        self.numbers = count()
        self.retired: list[EnvironmentProcess] = []
        """Processes that get no further environments, but in which some still run."""
        self.suspects: dict[EnvironmentProcess, asyncio.Future[None]] = {}
        """Processes that run one suspect each, with a future that is done when the suspect has ended."""
        self.leaving: set[asyncio.Task[None]] = set()

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools; raise ConfigError if the class cannot be used."""
        found: list[dict[str, Any]] = self.ready(0).greeting
        return found

    def place(self, *, alone: bool = False) -> Episode:
        return Episode(self, next(self.numbers), alone)

    async def host(self, *, alone: bool) -> EnvironmentProcess:
        """Return the host with the fewest environments; for `alone`, a new one once fewer than `MAX_SUSPECTS` run."""
        for host in [host for host in self.children if host.ended]:
            self.retire(host)
        if not alone:
            return min(self.children, key=lambda host: len(host.live))
        while len(self.suspects) >= MAX_SUSPECTS:
            await asyncio.wait(self.suspects.values(), return_when=asyncio.FIRST_COMPLETED)
        host = self.start()
        self.suspects[host] = asyncio.get_running_loop().create_future()
        return host

    def drop(self, host: EnvironmentProcess, number: int) -> None:
        """Abandon an environment: ask its host in the background to close it."""
        task = asyncio.get_running_loop().create_task(self._drop_environment(host, number))
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)

    async def _drop_environment(self, host: EnvironmentProcess, number: int) -> None:
        try:
            async with asyncio.timeout(ABANDON_TIMEOUT):
                if host.is_ready:  # else the environment never started
                    await host.call(number, "drop")
        except (TimeoutError, EnvironmentFailed):
            self.retire(host)
        finally:
            self.remove(host, number)

    def remove(self, host: EnvironmentProcess, number: int) -> None:
        """Remove an environment that has ended or hangs from its host's list; close a host that is no longer needed."""
        host.live.discard(number)
        if host in self.retired and not host.live:
            self.retired.remove(host)
            host.close()
        if host in self.suspects:
            self.suspects.pop(host).set_result(None)
            host.close()

    def retire(self, host: EnvironmentProcess) -> None:
        """Replace a host by a new one. The old host is closed when its last environment has ended."""
        if host in self.children:
            self.children[self.children.index(host)] = self.start()
            if host.live:
                self.retired.append(host)
            else:
                host.close()

    def close(self) -> None:
        self.closed = True
        close_all([*self.children, *self.retired, *self.suspects])


@dataclass
class Episode:
    """Handle of one environment in a host; the episode calls its methods."""

    hosts: EnvironmentPool
    number: int
    alone: bool
    host: EnvironmentProcess = field(init=False)

    async def ready(self) -> None:
        self.host = await self.hosts.host(alone=self.alone)
        self.host.live.add(self.number)
        if not self.host.is_ready:
            try:
                await asyncio.to_thread(self.host.ready)
            except ConfigError as error:
                self.hosts.retire(self.host)
                raise EnvironmentFailed("crash", str(error)) from None

    async def start(self, arguments: dict[str, Any]) -> Sequence[Message]:
        seen: Sequence[Message] = await self.host.call(self.number, "start", arguments)
        return seen

    async def step(self, reply: Reply) -> Step:
        found: Step = await self.host.call(self.number, "step", reply)
        return found

    async def close(self) -> dict[str, float]:
        rewards: dict[str, float] = await self.host.call(self.number, "close")
        self.hosts.remove(self.host, self.number)
        return rewards

    def drop(self) -> None:
        if hasattr(self, "host"):
            self.hosts.drop(self.host, self.number)


def schemas(wanted: EnvironmentSettings) -> list[dict[str, Any]]:
    """Return the tools' schemas, from a host started for this; raise ConfigError if the class cannot be used."""
    pool = EnvironmentPool(wanted)
    try:
        return pool.schemas()
    finally:
        pool.close()
