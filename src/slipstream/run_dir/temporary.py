"""Temporary directories that outlive no process for long: the next process that makes one removes those of dead ones.

A directory is locked while its process, or a process forked from it, runs. SIGKILL releases the lock, too.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryDirectory:
    def __init__(
        self, prefix: str, parent: str | None = None, *, before_removal: Callable[[Path], object] | None = None
    ) -> None:
        """Make a directory of this prefix, which no other kind of directory may have, and remove abandoned ones.

        `before_removal` is called with each abandoned directory before it is removed.
        """
        where = Path(parent or tempfile.gettempdir())
        # one that is not locked yet could be new: its maker holds the lock of the parent meanwhile
        guard = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks: nothing is locked or removed
                fcntl.flock(guard, fcntl.LOCK_EX)
                remove_abandoned(where, prefix, before_removal)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
            self.lock = os.open(self.path, DIRECTORY)
            with suppress(OSError):
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        finally:
            os.close(guard)

    def close(self) -> None:
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def remove_abandoned(where: Path, prefix: str, before_removal: Callable[[Path], object] | None = None) -> None:
    """Remove the directories of this prefix that no process locks and this user may remove."""
    for each in where.glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(each, DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if before_removal is not None:
                    before_removal(each)
                shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(descriptor)
