"""A process in which code of the user's own does what it likes, started afresh: it knows nothing of the script or
notebook that started it, and ends with its parent, however that ends, with whatever has started in it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from slipstream.linux import wake_with_parent

STARTED = 120.0
"""Seconds in which what the user's code imports must have been imported."""


def begun(parent: Connection) -> Any:
    """In the child: what it is told first."""
    wake_with_parent()
    sys.dont_write_bytecode = True  # beside files that are not ours
    sys.path.insert(0, str(Path.cwd()))  # where a config's `module:name` is looked for first
    return parent.recv()


class Child:
    def __init__(self, module: str, first: Any) -> None:
        """`python -m module` is given the number of its end of the connection."""
        self.connection, theirs = Pipe()
        with theirs:
            self.process = Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                stdout=2,  # what the user's code prints is for a person, and not our output
                start_new_session=True,  # what a terminal sends is the parent's to handle
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        with suppress(OSError):  # who cannot start is found out when it should be ready
            self.connection.send(first)

    @property
    def ended(self) -> bool:
        return self.connection.closed or self.process.poll() is not None

    def end(self) -> str:
        """How it ended, or was ended now."""
        self.kill()
        code = self.process.wait()
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """With all that was started in it."""
        if self.process.returncode is None:  # nobody else has its number yet
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()
