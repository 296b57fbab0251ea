"""What Linux does for a process, where this is Linux: its name, its parent's death, the orphans below it."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def be_called(name: str) -> None:
    """By ps and top."""
    _prctl(PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Whatever loses its parent below this process becomes a child of it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Of a parent that has died already, nobody hears."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_with_parent() -> None:
    """Who looks after itself when its parent is gone must not be stopped then."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def let_go_of_terminal() -> None:
    """One that was closed takes no more text; files and pipes still do."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _prctl(option: int, value: int | bytes) -> None:
    if LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")
