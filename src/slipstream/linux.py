"""Linux process settings (prctl): name, signal on the parent's death, adoption of orphans. No effect elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def be_called(name: str) -> None:
    """Set the name of this process in ps and top."""
    _prctl(PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Make this process the new parent of descendants that lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Kill this process when its parent dies. If the parent died before this call, nothing happens."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_with_parent() -> None:
    """Send SIGCONT on the parent's death, so that a stopped child can clean up."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def let_go_of_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed; keep files and pipes."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _prctl(option: int, value: int | bytes) -> None:
    if LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")
