"""Child processes: new Python interpreters, without the memory of the process that starts them, for code that may fail.

If the parent process ends, even by a crash, then its children end, too, and all processes that they started, except
those that began a session of their own.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from math import inf
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Generic, TypeVar

from slipstream.processes import exit_text, kill_group, start_python, wake_with_parent

C = TypeVar("C", bound="Child")
STARTED = 120.0
"""Timeout in seconds for starting a child, which includes the imports of user code."""
LIVENESS_INTERVAL = 0.5
"""Seconds after which a wait for a message asks whether the process still runs."""


def first_message(parent: Connection) -> Any:
    """Set up the child process, and return the first message that the parent sends."""
    wake_with_parent()
    sys.dont_write_bytecode = True  # write no __pycache__ next to the user's files
    sys.path.insert(0, str(Path.cwd()))  # `module:name` in a config is searched here first
    return parent.recv()


def clock_stopped() -> AbstractAsyncContextManager[None]:
    """Return the context in which to await another process: on modelled time the clock stands still meanwhile."""
    found: AbstractAsyncContextManager[None] = getattr(asyncio.get_running_loop(), "clock_stopped", nullcontext)()
    return found


class Child:
    """Parent's side of a child process. Its first message says that it is ready, or is the error why it never will."""

    def __init__(self, module: str, first: Any) -> None:
        """Start `python -m MODULE FD`, where FD is the file descriptor of a connection, and send `first` through it."""
        self.connection, theirs = Pipe()
        with theirs:
            # send output of user code to standard error: standard output belongs to this process
            # a fixed hash seed repeats what the user's code draws from sets
            self.process = start_python(module, theirs, {"PYTHONHASHSEED": "0", **os.environ}, stdout=2)
        with suppress(OSError):  # a process that cannot start is reported when the parent waits for it
            self.connection.send(first)
        self.greeting: Any = None
        """First message of the process; None before it."""
        self.starting = threading.Lock()

    def ready(self) -> Any:
        """Wait until the process is ready, and return its first message; raise its error or that of `lost`."""
        with self.starting:  # several threads may wait here, but only one thread may read the connection
            if self.greeting is None:
                try:
                    self.greeting = self.receive(STARTED)
                except TimeoutError:
                    raise self.lost(f"{STARTED:.0f} s", late=True) from None
                except (EOFError, OSError):
                    raise self.lost(self.end(), late=False) from None
                if not isinstance(self.greeting, Exception):
                    self.on_ready()
            if isinstance(self.greeting, Exception):
                raise self.greeting
            return self.greeting

    def receive(self, timeout: float = inf) -> Any:
        """Return the next message; raise TimeoutError after `timeout` seconds, and EOFError if the process has ended.

        The end of the connection alone does not show this: a process that it forked may hold the other end.
        """
        until = time.monotonic() + timeout
        while True:
            ended = self.ended  # asked before the last look at what it has sent
            if self.connection.poll(0 if ended else max(0.0, min(LIVENESS_INTERVAL, until - time.monotonic()))):
                return self.connection.recv()
            if ended:
                raise EOFError
            if time.monotonic() >= until:
                raise TimeoutError

    def lost(self, how: str, *, late: bool) -> Exception:
        """Return the error of a process that was not ready in time; `how`: its end, or the time limit if `late`."""
        raise NotImplementedError

    def on_ready(self) -> None:
        """Do what a subclass needs when its process is ready."""

    @property
    def refused(self) -> bool:
        return isinstance(self.greeting, Exception)

    @property
    def is_ready(self) -> bool:
        return self.greeting is not None and not self.refused

    @property
    def ended(self) -> bool:
        """Return whether the process has ended, but leave its status uncollected: `kill` still needs its group's id."""
        if self.connection.closed or self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has just collected it
            return True

    def end(self) -> str:
        """Kill the process if it still runs, and describe how it ended: exit status or signal."""
        self.kill()
        return exit_text(self.process.wait())

    def kill(self) -> None:
        """Kill the process and its process group, which includes the processes that it started."""
        if self.process.returncode is None:  # afterwards another process may have this id
            kill_group(self.process.pid)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()


class ChildPool(Generic[C]):
    """A fixed number of children. One that ended is replaced, and one that is lost while it starts is started again."""

    def __init__(self, start: Callable[[], C], size: int) -> None:
        """Start the children now, because that takes long."""
        self.start, self.closed = start, False
        self.children = [start() for _ in range(size)]

    def ready(self, place: int) -> C:
        """Return child number `place` when it is ready. If it is lost while it starts, start it once more."""
        for again in (True, False):
            if self.children[place].ended:
                self.renew(place)
            try:
                self.children[place].ready()
                break
            except Exception:
                self.children[place].close()
                if self.closed or not again or self.children[place].refused:
                    raise
        return self.children[place]

    def renew(self, place: int) -> None:
        self.children[place].close()
        self.children[place] = self.start()

    def close(self) -> None:
        self.closed = True
        close_all(self.children)


def close_all(children: list[C]) -> None:
    """Kill all children, then wait for their end."""
    for child in children:
        child.kill()
    for child in children:
        child.close()
