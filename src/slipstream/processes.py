"""Child processes: start them, end them with their parent or with all descendants, and describe how they ended."""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from slipstream.errors import SandboxError, first_line

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
PATH = "/usr/local/bin:/usr/bin:/bin"
"""Directories of programs that get no environment variables of this process."""
RARE_COLLECTIONS = (50_000, 20, 100)
"""Thresholds of garbage collection where most objects stay in use, such as imports: it took a third of the time."""
OPEN_CONTEXTS: dict[object, tuple[int, ...]] = {}
"""Thresholds of each open context of `garbage_collection`, the newest last; None has those from before the first."""
WITH_PARENT = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")
"""Command prefix that kills a program when its parent dies."""
GRACE = 10.0
"""Seconds in which a process that must end may end by itself, before it is killed."""
MAX_SEARCHES = 1000
"""Maximum number of search rounds for processes to kill, since a process may start others meanwhile."""


# --- this process -----------------------------------------------------------------------------------------


def set_process_name(name: str) -> None:
    _prctl(PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Make this process the new parent of descendants that lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Kill this process when its parent dies. If the parent died before this call, nothing happens."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_with_parent() -> None:
    """Continue this process (SIGCONT) when its parent dies, so that it can clean up even if it was stopped."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def leave_closed_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed; keep files and pipes."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def garbage_collection(*thresholds: int) -> Iterator[None]:
    """Set the thresholds at which Python collects garbage; the last one makes full collections rare.

    Contexts may end in any order: the newest open one decides, and the end of the last one restores what was before.
    """
    own = object()
    OPEN_CONTEXTS.setdefault(None, gc.get_threshold())
    OPEN_CONTEXTS[own] = thresholds
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        del OPEN_CONTEXTS[own]
        gc.set_threshold(*list(OPEN_CONTEXTS.values())[-1])
        if OPEN_CONTEXTS.keys() == {None}:
            OPEN_CONTEXTS.clear()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value!r})")


# --- start ------------------------------------------------------------------------------------------------------------


def start_python(
    module: str, connection: Connection, environment: Mapping[str, str] = os.environ, *, stdout: int | None = None
) -> Popen[bytes]:
    """Start `python -m MODULE FD` in a new session, where FD is the file descriptor of a connection."""
    return Popen(
        [sys.executable, "-P", "-m", module, str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=DEVNULL,
        stdout=stdout,
        start_new_session=True,  # the parent alone handles the terminal's signals
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


async def start_program(
    argv: Sequence[str],
    *,
    stdin: int = DEVNULL,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    descriptors: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a program of a model or agent in a new session; raise SandboxError if it cannot be started.

    It inherits only the file descriptors in `descriptors`, and runs as `user` unless that is None.
    """
    other: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *(word.encode(errors="replace") for word in argv),
            stdin=stdin,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(env or {}),
            cwd=cwd,
            pass_fds=descriptors,
            start_new_session=True,
            **other,
        )
    )
    try:
        return await asyncio.shield(starting)
    except (OSError, ValueError) as error:
        raise SandboxError(f"sandbox: {Path(argv[0]).name} cannot be started: {first_line(error)}") from None
    except asyncio.CancelledError:  # wait for the start to finish, since only then can the process be killed
        await end_program(await starting)
        raise


# --- end --------------------------------------------------------------------------------------------------------------


def exit_text(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a process group (0: that of this process); return False if there is no such group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False


def kill_program(process: asyncio.subprocess.Process) -> None:
    """Kill a program with all descendants and its process group, even if the program itself has ended.

    One signal ends the program with its group first. Otherwise it could react to the end of its children.
    """
    found = descendants(process.pid) if process.returncode is None else []
    kill_group(process.pid)
    for pid in found:
        kill(pid)


def kill_at_home(home: str) -> None:
    """Kill all processes whose environment has this HOME: it belongs to one program and its descendants.

    Processes that left their session are found; processes that changed their HOME are not.
    """
    _kill_with(f"\0HOME={home}\0")


def kill_below(directory: Path) -> None:
    """Kill all processes whose HOME is below this directory."""
    _kill_with(f"\0HOME={directory}/")


def _kill_with(entry: str) -> None:
    """Kill all processes whose environment contains this text."""
    for _ in range(MAX_SEARCHES):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 (names are all that is needed)
        found = [pid for pid in pids if entry in f"\0{read_proc(f'/proc/{pid}/environ')}"]
        if not found:
            return
        for pid in found:
            kill(pid)


async def wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Wait until the process ends. asyncio's `wait` also waits for its pipes, which other processes may hold open."""
    with suppress(ProcessLookupError):
        descriptor, gone, loop = os.pidfd_open(process.pid), asyncio.Event(), asyncio.get_running_loop()
        try:
            loop.add_reader(descriptor, gone.set)
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    while process.returncode is None:  # asyncio sets the code shortly afterwards
        await asyncio.sleep(0.001)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close this process's ends of the pipes, since an escaped process may keep the other ends open."""
    process._transport.close()  # type: ignore[attr-defined]


async def end_program(process: asyncio.subprocess.Process) -> None:
    kill_program(process)
    await wait_for_exit(process)
    close_pipes(process)


# --- /proc ------------------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Return the ids of the children of all threads of a process."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (names are all that is needed)
            found += [int(child) for child in read_proc(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for descendant in found:  # the loop also reaches those that it appends
        found += children(descendant)
    return found


def read_proc(file: str) -> str:
    """Read a file of /proc; return an empty text if its process has just ended."""
    with suppress(OSError):
        return Path(file).read_text("utf-8", "surrogateescape")
    return ""
