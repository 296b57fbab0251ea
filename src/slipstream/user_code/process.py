"""Child process that runs user code in a new interpreter, without the memory of the process that starts it.

If the parent process ends, even by a crash, then the child and all processes that the child started end, too.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from slipstream.processes import exit_text, kill_group, start_python, wake_with_parent

STARTED = 120.0
"""Timeout in seconds for starting a process, which includes the imports of user code."""


def begun(parent: Connection) -> Any:
    """Set up the child process, and return the first message that the parent sends."""
    wake_with_parent()
    sys.dont_write_bytecode = True  # write no __pycache__ next to the user's files
    sys.path.insert(0, str(Path.cwd()))  # `module:name` in a config is searched here first
    return parent.recv()


def outside() -> AbstractAsyncContextManager[None]:
    """Return the context in which to await another process: on modelled time the clock stands still meanwhile."""
    found: AbstractAsyncContextManager[None] = getattr(asyncio.get_running_loop(), "outside", nullcontext)()
    return found


class Child:
    def __init__(self, module: str, first: Any) -> None:
        """Start `python -m MODULE FD`, where FD is the file descriptor of a connection, and send `first` through it."""
        self.connection, theirs = Pipe()
        with theirs:
            # send output of user code to standard error: standard output belongs to this process
            self.process = start_python(module, theirs, stdout=2)
        with suppress(OSError):  # a process that cannot start is reported when the parent waits for it
            self.connection.send(first)

    @property
    def ended(self) -> bool:
        return self.connection.closed or self.process.poll() is not None

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
