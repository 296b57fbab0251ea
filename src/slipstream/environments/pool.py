"""Host processes of environments; each host runs many environments.

Environments are user code and may hang, crash or run out of memory, so they do not run in engine processes. `async`
methods run on the host's event loop, all other methods in one thread per environment. A single hanging environment
cannot be stopped. Its host gets no further environments, and is killed when its other environments have ended. If the
parent process ends, even by a crash, its hosts end, too.

If a host dies while several environments run in it, any of these may be the cause, so all are suspects (`Suspected`).
The episode of a suspect may be retried alone in a new host. At most `MAX_SUSPECTS` such hosts run at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from slipstream.children import Child, ChildPool, clock_stopped, close_all, first_message
from slipstream.environments import Message, Reply, Start, Step
from slipstream.environments.forms import Acting, Kind, failure_text, kind_of
from slipstream.errors import ConfigError, EnvironmentFailed, Suspected
from slipstream.processes import kill_group
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Sandbox

ABANDON_TIMEOUT = 5.0
"""Time limit in seconds for the end of an abandoned environment; after it, the host gets no further environments."""
FAILED_TASK = "a background task of the environment has failed, and its library has cancelled the environment"
MAX_SUSPECTS = 4
"""Maximum number of suspects that run at the same time, each in its own process."""


@dataclass(frozen=True)
class EnvironmentSettings:
    """Settings of host processes: environment class, sandbox, and maximum characters of an observation."""

    spec: str
    sandbox: str | None
    shown: int


# --- in a host --------------------------------------------------------------------------------------------------------


def serve(parent: Connection) -> None:
    wanted: EnvironmentSettings = first_message(parent)
    try:
        kind = kind_of(wanted.spec)
        if "sandbox" in kind.asks and wanted.sandbox is None:
            raise ConfigError(
                f"environment.use = {wanted.spec!r} runs code that the student writes: write environment.sandbox = "
                '"bubblewrap"'
            )
        if "sandbox" not in kind.asks and wanted.sandbox is not None:
            raise ConfigError(
                f"environment.sandbox does nothing: start of {wanted.spec!r} does not ask for it; drop it"
            )
        sandbox, schemas = None if wanted.sandbox is None else sandbox_of(wanted.sandbox), kind.schemas
    except ConfigError as error:
        parent.send(error)
        return
    parent.send(schemas)
    asyncio.run(EnvironmentServer(parent, kind, wanted.shown, sandbox).serve())


class EnvironmentServer:
    def __init__(self, parent: Connection, kind: Kind, shown: int, sandbox: Sandbox | None) -> None:
        self.parent, self.kind, self.shown, self.sandbox = parent, kind, shown, sandbox
        self.here: dict[int, Acting] = {}
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Task of each environment, by the environment's number."""
        self.queues: dict[int, asyncio.Queue[tuple[int, str, tuple[Any, ...]]]] = {}
        """Calls that each task has yet to answer."""
        self.working, self.abandoned = set[int](), set[int]()
        """Numbers of the environments in which a call runs, and of those whose running call nobody waits for."""

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(self._accept, *self.parent.recv())
        kill_group(0)  # the parent has ended: kill this host and all that it started

    def _accept(self, call: int, number: int, method: str, *args: Any) -> None:
        if number not in self.tasks:
            self.queues[number] = asyncio.Queue()
            self.tasks[number] = asyncio.get_running_loop().create_task(self._own(number, self.queues[number]))
        self.queues[number].put_nowait((call, method, args))
        if number in self.working:  # the parent no longer waits for the last call, which still runs
            self.abandoned.add(number)
            self.tasks[number].cancel()

    async def _own(self, number: int, queue: asyncio.Queue[tuple[int, str, tuple[Any, ...]]]) -> None:
        """Run all calls of one environment in this task, because a library's cancel scope must end where it began."""
        own = asyncio.current_task()
        assert own is not None
        while number in self.tasks or not queue.empty():
            try:
                call, method, args = await queue.get()
            except asyncio.CancelledError:  # by such a scope
                await self._drop(number)
                continue
            self.working.add(number)
            answer = await self._answer(number, method, *args)
            self.working.discard(number)
            if number in self.abandoned:
                self.abandoned.discard(number)
                own.uncancel()
            else:
                self.parent.send((call, answer))

    async def _answer(self, number: int, method: str, *args: Any) -> Any:
        try:
            return await getattr(self, f"_{method}")(number, *args)
        except EnvironmentFailed as error:
            return error
        except asyncio.CancelledError:
            return EnvironmentFailed("error", FAILED_TASK)
        except BaseException as error:  # user code may raise anything; only this environment fails
            return EnvironmentFailed("error", f"{method} raised {failure_text(self.kind, error)}")

    async def _start(self, number: int, arguments: dict[str, Any]) -> tuple[Message, ...]:
        self.threads[number] = ThreadPoolExecutor(1, "environment")
        self.here[number] = Acting(self.kind, partial(self._run, number), self.shown)
        return await self.here[number].start(Start(**arguments, sandbox=self.sandbox))

    async def _step(self, number: int, reply: Reply) -> Step:
        return await self._acting(number).step(reply)

    async def _close(self, number: int) -> dict[str, float]:
        """Close an environment and return its rewards. If this fails, the parent drops the environment."""
        acting = self._acting(number)
        del self.here[number]
        rewards = await acting.close()
        self._gone(number)
        return rewards

    def _acting(self, number: int) -> Acting:
        if number not in self.here:
            raise EnvironmentFailed("error", FAILED_TASK)
        return self.here[number]

    async def _drop(self, number: int) -> None:
        """Abandon an environment: close it, ignore its errors and rewards, and wait until its thread is idle."""
        with suppress(Exception, asyncio.CancelledError):
            if number in self.here:
                await self.here.pop(number).close()
        if number in self.threads:  # this may wait forever
            await asyncio.get_running_loop().run_in_executor(self.threads[number], int)
        self._gone(number)

    def _gone(self, number: int) -> None:
        self.here.pop(number, None)
        self.tasks.pop(number, None)
        self.queues.pop(number, None)
        if number in self.threads:
            self.threads.pop(number).shutdown(wait=False)

    async def _run(self, number: int, method: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **arguments)
        call = partial(called, method, *args, **arguments)
        found = await asyncio.get_running_loop().run_in_executor(self.threads[number], call)
        return await found if inspect.isawaitable(found) else found


def called(method: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    try:
        return method(*args, **arguments)
    except StopIteration as error:  # a future cannot hold it, so that the call would never end
        raise RuntimeError("raised StopIteration") from error


# --- in the parent ----------------------------------------------------------------------------------------------------


class EnvironmentProcess(Child):
    def __init__(self, wanted: EnvironmentSettings) -> None:
        super().__init__("slipstream.environments.pool", wanted)
        self.wanted = wanted
        self.live = set[int]()
        """Numbers of the environments that run in this process."""
        self.crowd = frozenset[int]()
        """Numbers of the environments that were in this process when the process ended."""
        self.waiting: dict[int, tuple[Future[Any], int]] = {}
        """Calls for which a caller still waits, by number: the future answer and the number of the environment."""
        self.calls = count()
        self.reader = threading.Thread(target=self._receive, daemon=True)
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
        if self.connection.closed:
            raise OSError("the process has been closed")
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
                self._settle(*self.connection.recv())
        except (EOFError, OSError, pickle.UnpicklingError):
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


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent may end before its first message
        serve(Connection(int(sys.argv[1])))
