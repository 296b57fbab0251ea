"""Processes of sandboxed programs: start them, limit their output, measure their memory, kill all of them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SandboxError, first_line
from slipstream.linux import LINUX
from slipstream.sandbox.base import Limits, Ran, Status, encoded

LOOK = 0.1
"""Seconds between two measurements of a program's processes."""
ENDED = 5.0
"""Timeout in seconds for the end of a killed process."""
KILLED = 1000
"""Maximum number of search rounds for processes to kill, since a process may start others meanwhile."""
DRAINED = 1.0
"""Timeout in seconds for reading the remaining output of an ended program."""
SPACE = 16 << 30
"""Maximum address space of a process in bytes (32 times its memory limit, if that is more)."""
UNIX_SOCKET = 64 << 10
"""Bytes that a Unix socket may hold in addition to its send buffer."""
PATH = "/usr/local/bin:/usr/bin:/bin"


def environment(path: str, home: str) -> dict[str, str]:
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}


def limited(argv: Sequence[str], limits: Limits, *, processes: bool, space: bool = False) -> list[str]:
    """Return a command line that sets limits on each process and runs `argv`.

    `processes` limits their number too (per user and user namespace), `space` the address space and so page tables.
    """
    cpu = int(limits.seconds * (os.cpu_count() or 1)) + 1
    return [
        "/usr/bin/prlimit",
        *(f"--cpu={cpu}", f"--data={limits.memory}", f"--fsize={limits.disk}", "--nofile=128", "--memlock=0"),
        *("--rtprio=0", "--msgqueue=0", "--sigpending=256"),
        "--core=1",  # a limit of 0 would still start the system's crash handler, as root
        *([f"--nproc={limits.processes}"] if processes else []),
        *([f"--as={max(SPACE, 32 * limits.memory)}"] if space else []),
        *("--", *argv),
    ]


def check_installed(programs: Iterable[str], advice: str) -> None:
    for each in programs:
        if not os.access(f"/usr/bin/{each}", os.X_OK):
            raise ConfigError(f"sandbox: there is no /usr/bin/{each} here: {advice}")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ConfigError("sandbox: this kernel does not list a process's children (CONFIG_PROC_CHILDREN)")


@contextmanager
def sealed(content: bytes) -> Iterator[int]:
    """Yield the file descriptor of an in-memory file that has this content and is read-only for everyone."""
    descriptor = os.memfd_create("slipstream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        all_seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, all_seals)
        yield descriptor
    finally:
        os.close(descriptor)


async def start(
    argv: Sequence[str],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    keeps: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a process in a new session. It inherits only the descriptors in `keeps`, and runs as `user` unless None."""
    other: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *map(encoded, argv),
            stdin=stdin,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env or {}),
            cwd=cwd,
            pass_fds=keeps,
            start_new_session=True,
            **other,
        )
    )
    try:
        return await asyncio.shield(starting)
    except (OSError, ValueError) as error:
        raise SandboxError(f"sandbox: {Path(argv[0]).name} cannot be started: {first_line(error)}") from None
    except asyncio.CancelledError:  # wait for the start to finish, since only then can the process be killed
        process = await starting
        kill(process)
        await exited(process)
        release(process)
        raise


async def finish(
    process: asyncio.subprocess.Process,
    limits: Limits,
    since: float,
    over: Callable[[int], Status | None],
    *,
    outside: bool = False,
) -> Ran:
    """Wait until a program ends or exceeds a limit, and kill it then. `outside`: `process` only starts the sandbox."""
    loop = asyncio.get_running_loop()
    assert process.stdout is not None and process.stderr is not None
    out, err = bytearray(), bytearray()
    ended = asyncio.create_task(exited(process))
    reading = [
        asyncio.create_task(_read(process.stdout, out, limits.output)),
        asyncio.create_task(_read(process.stderr, err, limits.output)),
    ]
    watching = asyncio.create_task(_watch(process.pid, over))
    status: Status | None = None
    waiting: set[asyncio.Task[Any]] = {ended, watching, *reading}
    try:
        while status is None and ended in waiting:
            left = since + limits.seconds - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            status = "timeout" if not done else next((t.result() for t in done if t is not ended and t.result()), None)
        await end(process, ended, outside=outside)
        await asyncio.wait(reading, timeout=DRAINED)
        if status is None:
            status = next((each.result() for each in reading if each.done() and each.result()), None)
    finally:
        kill(process)
        try:
            await asyncio.wait([ended], timeout=ENDED)
        finally:
            for task in (ended, watching, *reading):
                task.cancel()
            release(process)
    code = process.returncode if status is None else None
    said = [bytes(each[: limits.output]).decode(errors="replace") for each in (out, err)]
    return Ran(status or ("ok" if code == 0 else "failed"), code, said[0], said[1], loop.time() - since)


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> Status | None:
    while part := await stream.read(1 << 16):
        into += part
        if len(into) > most:
            return "output"
    return None


async def _watch(pid: int, over: Callable[[int], Status | None]) -> Status:
    while True:
        await asyncio.sleep(LOOK)
        if (status := over(pid)) is not None:
            return status


async def exited(process: asyncio.subprocess.Process) -> None:
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


async def end(process: asyncio.subprocess.Process, ended: asyncio.Task[None], *, outside: bool) -> None:
    """Kill a program. `outside`: `process` only starts the sandbox, so kill its descendants first and let it exit."""
    below = descendants(process.pid)[1:] if outside and not ended.done() else []
    for pid in below:
        _kill(pid)
    if below:
        await asyncio.wait([ended], timeout=ENDED)
    kill(process)
    await asyncio.wait([ended], timeout=ENDED)


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process with all descendants and its process group, even if the process itself has ended."""
    if process.returncode is None:
        for pid in descendants(process.pid)[1:]:
            _kill(pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_at_home(home: str) -> None:
    """Kill all processes whose environment has this HOME: it belongs to one program and its descendants.

    Processes that left their session are found; processes that changed their HOME are not.
    """
    told = f"\0HOME={home}\0".encode()
    for _ in range(KILLED if LINUX else 0):
        pids = [int(each) for each in os.listdir("/proc") if each.isdigit()]  # noqa: PTH208 (names are all that is needed)
        if not (found := [pid for pid in pids if told in b"\0" + _bytes(f"/proc/{pid}/environ")]):
            return
        for pid in found:
            _kill(pid)


def release(process: asyncio.subprocess.Process) -> None:
    """Close this process's ends of the pipes, since an escaped process may keep the other ends open."""
    process._transport.close()  # type: ignore[attr-defined]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


# --- measurements in /proc --------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Return this process and all of its descendants, level by level."""
    found, at = [pid], 0
    while at < len(found):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{found[at]}/task"):  # noqa: PTH208 (names are all that is needed)
                found += [int(each) for each in _text(f"/proc/{found[at]}/task/{thread}/children").split()]
        at += 1
    return found


def memory(pids: Iterable[int], most: int) -> int:
    """Return the memory of processes in bytes, without mapped files. Above `most`, count shared memory only once."""
    pids = list(pids)
    tables = sum(_kilobytes(f"/proc/{pid}/status", ("VmPTE:",)) for pid in pids) << 10
    rough = sum(_kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) for pid in pids) << 10
    if rough + tables <= most:
        return rough + tables
    shared = sum(_kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids) << 10
    return (shared or rough) + tables


def sockets(pid: int) -> int:
    """Return the bytes that the sockets of a process's network namespace may hold.

    For TCP and UDP sockets this is twice the queues that Linux reports; for Unix sockets it is their maximum capacity.
    """
    each = int(_text("/proc/sys/net/core/wmem_default") or 0) + UNIX_SOCKET
    found = each * max(0, len(_text(f"/proc/{pid}/net/unix").splitlines()) - 1)
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text(f"/proc/{pid}/net/{kind}").splitlines()[1:]:
            found += 2 * sum(int(waiting, 16) for waiting in line.split()[4].split(":"))
    return found


def _kilobytes(file: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) for line in _text(file).splitlines() if line.startswith(names))


def _text(file: str) -> str:
    return _bytes(file).decode(errors="replace")


def _bytes(file: str) -> bytes:
    """Read a file of /proc; return empty bytes if its process has just ended."""
    with suppress(OSError):
        return Path(file).read_bytes()
    return b""
