"""One cgroup (v2) for each program in a sandbox: Linux then counts all of its memory, page tables and sockets included.

A cgroup is made next to or below this process's own cgroup. The controllers `memory` and `pids` must be enabled there,
and this user must have write access. This module enables no controller and moves no other process.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.errors import SandboxError
from slipstream.processes import descendants
from slipstream.sandbox.base import Limits, MiB

MOUNTED = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = {"memory", "pids"}
SPARE_MEMORY, SPARE_PROCESSES = 32 * MiB, 8
"""Bytes and processes that the sandbox itself needs, added to the limits of the program in it."""
CGROUP_NUMBERS = itertools.count()


def writable(mounted: Path = MOUNTED, membership: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return a directory in which this process can make cgroups, or None if there is no such directory."""
    own = [line[3:] for line in membership.read_text("utf-8").splitlines() if line.startswith("0::/")]
    here = [mounted / path[1:] for path in own]
    for place in (*here, *(each.parent for each in here)):
        with suppress(OSError):
            on = set((place / "cgroup.subtree_control").read_text("utf-8").split())
            if on >= CGROUP_CONTROLLERS and os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK):
                return place
    return None


@contextmanager
def group(parent: Path, limits: Limits) -> Iterator[Path]:
    """Make a cgroup with these limits, and remove it at the end. Files in the sandbox's directories count as memory."""
    made = parent / f"slipstream-{os.getpid()}-{next(CGROUP_NUMBERS)}"
    try:
        made.mkdir()
        (made / "memory.max").write_text(str(limits.memory + 2 * limits.disk + SPARE_MEMORY))
        if (made / "memory.swap.max").exists():
            (made / "memory.swap.max").write_text("0")
        (made / "pids.max").write_text(str(limits.processes + SPARE_PROCESSES))
    except OSError as error:
        raise SandboxError(f"sandbox: no cgroup can be made: {error}") from None
    try:
        yield made
    finally:
        with suppress(OSError):  # a process that cannot be killed keeps the cgroup
            made.rmdir()


def enter(made: Path, pid: int) -> None:
    """Move a process and its descendants into a cgroup; processes that they start later belong to it automatically."""
    for each in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):
            (made / "cgroup.procs").write_text(str(each))


def out_of_memory(made: Path) -> bool:
    events = made / "memory.events"
    counts = dict(line.split() for line in events.read_text("utf-8").splitlines()) if events.exists() else {}
    return counts.get("oom_kill", "0") != "0"


def in_force(parent: Path | None) -> str:
    """Return a log line about the limits of memory and processes. `parent` is None if no cgroup can be made."""
    if parent is not None:
        return f"sandbox: Linux bounds memory and processes by a cgroup for each program, below {parent}"
    measured = "memory, page tables and sockets of a program are measured every 0.1 s"
    return f"sandbox: {measured}, as there is no writable cgroup v2 with memory and pids here"
