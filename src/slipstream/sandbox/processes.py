"""A program at work: what it says is read up to a bound, what it takes is looked at, and all ends with the call."""

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
"""Seconds between two looks at what all its processes take."""
ENDED = 5.0
"""Seconds in which what was killed is gone."""
KILLED = 1000
"""Times that processes are looked for which start others while they are killed."""
DRAINED = 1.0
"""Seconds for reading what an ended program has left in its pipes."""
SPACE = 16 << 30
"""Bytes of addresses that any process may have."""
UNIX_SOCKET = 64 << 10
"""Bytes that a Unix socket may hold beyond its buffer for sending."""
PATH = "/usr/local/bin:/usr/bin:/bin"


def environment(path: str, home: str) -> dict[str, str]:
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}


def limited(argv: Sequence[str], limits: Limits, *, processes: bool, space: bool = False) -> list[str]:
    """With these limits on each process. That of their number counts all of a user's in a user namespace.

    `space` bounds addresses, too, and with them page tables, which are at least 1/512 of what they map.
    """
    cpu = int(limits.seconds * (os.cpu_count() or 1)) + 1
    return [
        "/usr/bin/prlimit",
        *(f"--cpu={cpu}", f"--data={limits.memory}", f"--fsize={limits.disk}", "--nofile=128", "--memlock=0"),
        *("--rtprio=0", "--msgqueue=0", "--sigpending=256"),
        "--core=1",  # of 0 bytes, the system's handler of crashes would still be started, as root
        *([f"--nproc={limits.processes}"] if processes else []),
        *([f"--as={max(SPACE, 32 * limits.memory)}"] if space else []),
        *("--", *argv),
    ]


def check_installed(programs: Iterable[str], advice: str) -> None:
    for each in programs:
        if not os.access(f"/usr/bin/{each}", os.X_OK):
            raise ConfigError(f"sandbox: there is no /usr/bin/{each} here: {advice}")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ConfigError("sandbox: this kernel does not tell a process's children (CONFIG_PROC_CHILDREN)")


@contextmanager
def sealed(content: bytes) -> Iterator[int]:
    """A file in memory, open for reading, that nobody can change any more."""
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
    """In a session of its own, with no descriptor of ours but these; as another user, who is in no group."""
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
    except asyncio.CancelledError:  # half started, it could not be ended
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
    """Wait for its end, or bring it about; `over` looks at what it takes, by the number of its process, which may stand
    outside of what it has started."""
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
    """Its own end: asyncio's `wait` waits for that of its pipes, too, which others may hold."""
    with suppress(ProcessLookupError):
        descriptor, gone, loop = os.pidfd_open(process.pid), asyncio.Event(), asyncio.get_running_loop()
        try:
            loop.add_reader(descriptor, gone.set)
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    while process.returncode is None:  # which asyncio is about to learn
        await asyncio.sleep(0.001)


async def end(process: asyncio.subprocess.Process, ended: asyncio.Task[None], *, outside: bool) -> None:
    """Of one that stands outside and waits, first what is below it: it ends once all that is gone."""
    below = descendants(process.pid)[1:] if outside and not ended.done() else []
    for pid in below:
        _kill(pid)
    if below:
        await asyncio.wait([ended], timeout=ENDED)
    kill(process)
    await asyncio.wait([ended], timeout=ENDED)


def kill(process: asyncio.subprocess.Process) -> None:
    """At once: with all that is below it, and its group, also where it itself has ended."""
    if process.returncode is None:
        for pid in descendants(process.pid)[1:]:
            _kill(pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_at_home(home: str) -> None:
    """Kill what a program without walls has left behind: nothing else has this HOME.

    A process that leaves its session is found by it, and one that changes its own environment is not.
    """
    told = f"\0HOME={home}\0".encode()
    for _ in range(KILLED if LINUX else 0):
        pids = [int(each) for each in os.listdir("/proc") if each.isdigit()]  # noqa: PTH208 (names are all that is needed)
        if not (found := [pid for pid in pids if told in b"\0" + _bytes(f"/proc/{pid}/environ")]):
            return
        for pid in found:
            _kill(pid)


def release(process: asyncio.subprocess.Process) -> None:
    """Our ends of its pipes: what got away may hold the others open."""
    process._transport.close()  # type: ignore[attr-defined]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


# --- what is there, as /proc has it -----------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """This process first, then its children, then theirs."""
    found, at = [pid], 0
    while at < len(found):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{found[at]}/task"):  # noqa: PTH208 (names are all that is needed)
                found += [int(each) for each in _text(f"/proc/{found[at]}/task/{thread}/children").split()]
        at += 1
    return found


def memory(pids: Iterable[int], most: int) -> int:
    """Bytes that are theirs and no file's, with their page tables. What several share is counted once, where it
    matters."""
    pids = list(pids)
    tables = sum(_kilobytes(f"/proc/{pid}/status", ("VmPTE:",)) for pid in pids) << 10
    rough = sum(_kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) for pid in pids) << 10
    if rough + tables <= most:
        return rough + tables
    shared = sum(_kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids) << 10
    return (shared or rough) + tables


def sockets(pid: int) -> int:
    """Bytes that the sockets of a process's network namespace may hold.

    Linux tells what waits in TCP and UDP sockets. It tells nothing of a Unix socket, which counts as what it can hold.
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
    """Of a process that has just ended, nothing."""
    with suppress(OSError):
        return Path(file).read_bytes()
    return b""
