"""A host process, which runs many environments.

`async` methods run on its event loop, all other methods in one thread per environment.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from slipstream.children import first_message
from slipstream.environments import Message, Reply, Start, Step
from slipstream.environments.forms import Acting, Kind, failure_text, kind_of
from slipstream.errors import ConfigError, EnvironmentFailed
from slipstream.processes import kill_group
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Sandbox

FAILED_TASK = "a background task of the environment has failed, and its library has cancelled the environment"


@dataclass(frozen=True)
class EnvironmentSettings:
    """Settings of host processes: environment class, sandbox, and maximum characters of an observation."""

    spec: str
    sandbox: str | None
    shown: int


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


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent may end before its first message
        serve(Connection(int(sys.argv[1])))
